"""Dtypes that kernels take, and the precision in which they compute."""

from typing import Optional

import torch

HALF = (torch.float16, torch.bfloat16)
SERVED = (*HALF, torch.float32)  # by kernels for every chip; fp64 is the reference's


def served(*tensors: Optional[torch.Tensor]) -> bool:
    """True if kernels take the dtypes of all these tensors; None counts as no tensor."""
    return all(x is None or x.dtype in SERVED for x in tensors)


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """x in the precision of element-wise maths: fp64 stays, every other dtype becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def in_one_dtype(*tensors: torch.Tensor) -> tuple:
    """The tensors in the precision in which products are summed: fp64 if any is fp64, else fp32."""
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return tuple([x.to(wide) for x in tensors])
