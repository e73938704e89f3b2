"""What the public functions share."""

from typing import Callable, Optional, Tuple

import torch

from . import dispatch
from .facts import keep

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # another torch: every call goes the long way
    TensorGuards = None


def autocast(*tensors: Optional[torch.Tensor]) -> Tuple[Optional[torch.Tensor], ...]:
    """The tensors in autocast's dtype where autocast is on, else unchanged."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor):
        return tensors
    kind = first.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def _key(tensors: tuple, options: tuple) -> tuple:
    """Of an option also the type: True == 1 == 1.0, and the checks tell them apart."""
    return tensors[0].shape, options, tuple(map(type, options)), torch.is_grad_enabled()


class Shortcuts:
    """Plans of calls that have passed, for calls like them.

    A short call costs the host more than the GPU. Whoever passed the checks and found its kernel
    need not do so again: a plan serves all calls of the same options whose tensors have the same
    facts (type, sizes, strides, dtype, device, whether a gradient is needed, what modes of torch
    are on), which torch's own guards compare in a microsecond.
    """

    def __init__(self):
        self._known: dict = {}

    def find(self, tensors: tuple, options: tuple) -> Optional[Callable]:
        """The plan of this call, or None: then it goes the long way."""
        if torch.compiler.is_compiling() or not dispatch.undisturbed():
            return None
        try:
            known = self._known.get(_key(tensors, options))
        except (AttributeError, TypeError):  # the checks have a better message
            return None
        if known is None:
            return None
        absent, guards, plan = known
        if absent != [x is None for x in tensors]:
            return None
        return plan if guards.check(*[x for x in tensors if x is not None]) else None

    def keep(self, tensors: tuple, options: tuple, plan: Optional[Callable]) -> Optional[Callable]:
        """Keeps a plan of a call that find() had none for; returns it, or None if it is not kept:
        then the call has to go the long way."""
        if plan is None or TensorGuards is None or not dispatch.undisturbed():
            return None
        if torch.is_autocast_enabled(tensors[0].device.type):  # the guards do not know its dtype
            return None
        there = [x for x in tensors if x is not None]
        guards = TensorGuards(*there, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        absent = [x is None for x in tensors]
        keep(self._known, _key(tensors, options), (absent, guards, plan))
        return plan
