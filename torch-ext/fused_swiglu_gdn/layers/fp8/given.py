"""The result of a norm in FP8, from a decoder layer to the module that it calls."""

import threading
from typing import Callable, Optional

import torch
from torch import nn

from ...fp8.call import Quantised
from ...fp8.ops import MULTIPLY
from ...runtime import dispatch
from ..plain import is_plain
from .weights import FORMS

MLPS = ("SwiGLUMLP", "SwiGLUGateUp")  # that add a residual to their result


class Given:
    """x is `codes` in FP8. residual: of x's shape, or None; an MLP that adds it to its result says
    so by `added`."""

    __slots__ = ("x", "codes", "residual", "added")


class _Waiting(threading.local):
    """Codes that a decoder layer gives to the module that it calls, until it has taken them."""

    it: Optional[Given] = None


_waiting = _Waiting()


def quantises(part: nn.Module, x: torch.Tensor) -> bool:
    """A module that a decoder layer calls with a norm's result takes that in FP8: some of its parts
    are FP8Linears, and nothing can change x before their products, since the module is ours and
    calling it does no more than its forward. x: what is normed in eager mode, a plain tensor, where
    torch is as it was (norm.serves)."""
    if x.dtype is not torch.bfloat16 or FORMS.keys().isdisjoint(map(type, part._modules.values())):
        return False
    if dispatch.forced is None and not dispatch.has_kernels_at(*MULTIPLY, x.device):
        return False
    if type(part).__dict__.get("served_as") is None or not is_plain(part):
        return False
    return x.numel() > 0 and not torch._C._len_torch_dispatch_stack()


def with_codes(
    x: torch.Tensor, codes: Quantised, residual: Optional[torch.Tensor], call: Callable, *args
) -> tuple:
    """(call(*args), whether that has added the residual); call is of a module that quantises x, and
    takes the codes once."""
    it = Given()
    it.x, it.codes, it.residual, it.added = x, codes, residual, False
    _waiting.it = it
    try:
        return call(*args), it.added
    finally:
        _waiting.it = None


def taken(x: torch.Tensor) -> Optional[Given]:
    """Returns what is given with x, once: later, x may be another value. A write by x.data, numpy,
    a graph or another library is counted nowhere."""
    it = _waiting.it
    if it is None or it.x is not x:
        return None
    _waiting.it = None
    return it
