"""What dtype is computed in."""

from typing import Optional

import torch

HALF = (torch.float16, torch.bfloat16)
SERVED = (*HALF, torch.float32)  # by kernels for every chip; fp64 is the reference's


def served(*tensors: Optional[torch.Tensor]) -> bool:
    """Whether kernels compute in the dtypes of all of these; None is no tensor."""
    return all(x is None or x.dtype in SERVED for x in tensors)


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """x in the precision that element-wise maths is done in: fp64 stays, all else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def in_one_dtype(*tensors: torch.Tensor) -> tuple:
    """The tensors in the precision that products of them are summed in: fp64 if one is fp64."""
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return tuple([x.to(wide) for x in tensors])
