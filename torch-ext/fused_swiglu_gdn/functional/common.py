"""What the public functions share."""

from typing import Optional, Tuple

import torch


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


def dense(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension contiguous, the one thing that kernels ask of strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
