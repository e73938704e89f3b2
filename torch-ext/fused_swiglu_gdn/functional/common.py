"""What the public functions share."""

from typing import Optional, Tuple

import torch

from .. import dispatch
from ..facts import facts


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


def dense(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """x with its last dimension contiguous, the one thing that kernels ask of strides."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def shortcut(tensors: tuple, *options):
    """The key of a call, under which a plan may be kept that serves the next call like it.

    A short call costs the host more than the GPU; whoever passed the checks, and found its kernel,
    need not do so again. None where only the long way is right: while tracing, under autocast,
    while calls are recorded, for arguments that are no tensors.
    """
    if torch.compiler.is_compiling() or not dispatch.undisturbed():
        return None
    if torch.is_autocast_enabled("cuda"):
        return None
    try:
        key = (facts(*tensors), options, torch.is_grad_enabled())
        hash(key)
    except (AttributeError, TypeError):  # the checks have a better message
        return None
    return key
