"""The result of a norm in FP8, from a decoder layer to the module that it calls."""

import threading
from typing import Callable, NamedTuple, Optional

import torch
from torch import nn

from ...fp8.call import Quantised
from ...fp8.ops import MULTIPLY
from ...runtime import dispatch
from ..pinned import Pinned
from ..plain import is_plain
from .weights import FORMS, looked

MLPS = ("SwiGLUMLP", "SwiGLUGateUp")  # that add a residual to their result


class Coded(NamedTuple):
    """The result of a norm in FP8."""

    codes: Quantised
    pinned: Pinned  # the class of the FP8Linears that take it, which is unchanged


class Given:
    """x is `codes` in FP8. residual: of x's shape, or None; an MLP that adds it to its result says
    so by `added`."""

    __slots__ = ("x", "codes", "residual", "added")


class _Waiting(threading.local):
    """Codes that a decoder layer gives to the module that it calls, until it has taken them."""

    it: Optional[Given] = None


_waiting = _Waiting()


def quantises(part: nn.Module, x: torch.Tensor, before: Optional[Coded] = None) -> Optional[Pinned]:
    """The class of FP8Linears among a module's parts, if a decoder layer that calls the module with
    a norm's result gives that in FP8: nothing can change x before their products, since the module
    is ours and calling it does no more than its forward. x: what is normed in eager mode, a plain
    tensor, where torch is as it was (norm.serves). before: what the layer gave to the part before
    this one, in the same call, and so has looked at."""
    if x.dtype is not torch.bfloat16:
        return None
    form = next(filter(None, map(FORMS.get, map(type, part._modules.values()))), None)
    if form is None or type(part).__dict__.get("served_as") is None or not is_plain(part):
        return None
    if before is not None and before.pinned is form.pinned:
        return form.pinned
    if dispatch.forced is None and not dispatch.has_kernels_at(*MULTIPLY, x.device):
        return None
    if not x.numel() or torch._C._len_torch_dispatch_stack():
        return None
    return form.pinned if form.pinned.unchanged() else None


def with_codes(
    x: torch.Tensor, coded: Coded, residual: Optional[torch.Tensor], call: Callable, *args
) -> tuple:
    """(call(*args), whether that has added the residual); call is of a module that quantises x, and
    takes the codes once. A patch of the FP8Linears' class during it counts from the next layer
    on."""
    it = Given()
    it.x, it.residual, it.added = x, residual, False
    it.codes, looked.at = coded
    _waiting.it = it
    try:
        return call(*args), it.added
    finally:
        _waiting.it = looked.at = None


def taken(x: torch.Tensor) -> Optional[Given]:
    """Returns what is given with x, once: later, x may be another value. A write by x.data, numpy,
    a graph or another library is counted nowhere."""
    it = _waiting.it
    if it is None or it.x is not x:
        return None
    _waiting.it = None
    return it
