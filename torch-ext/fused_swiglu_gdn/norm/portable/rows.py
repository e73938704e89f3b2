"""Strides of the rows of a tensor [..., D], and the block of rows that a program takes."""

import itertools
from typing import Optional, Tuple

import torch

from ...runtime import tuning
from ...runtime.ops import contiguous
from ...runtime.sizes import next_power_of_2

MAX_BLOCK = 16384  # columns that a program holds at once


def two_strides(x: torch.Tensor) -> Optional[Tuple[int, int]]:
    """Strides (of a group of x.shape[-2] rows, of a row) of x [..., D], or None if two do not
    suffice."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    outer = [(n, s) for n, s in zip(x.shape[:-2], x.stride()[:-2]) if n > 1]
    if any(s0 != n1 * s1 for (_, s0), (n1, s1) in zip(outer, outer[1:])):
        return None
    return (outer[-1][1] if outer else 0, x.stride(-2) if x.ndim > 1 else 0)


def lie_in_rows(*tensors: Optional[torch.Tensor]) -> bool:
    """True if two strides address the rows of each tensor."""
    return all([x is None or two_strides(x) is not None for x in tensors])


def readable(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """x, or a contiguous copy if its rows cannot be addressed by two strides."""
    return x if lie_in_rows(x) else contiguous(x)


def layout(*tensors: Optional[torch.Tensor]) -> tuple:
    """(R, and for each tensor the strides of a group of R rows and of a row); zeros for None.

    All tensors have one shape. If one stride addresses the rows of all of them, R is 1: a group is
    a row.
    """
    x = tensors[0]
    R = x.shape[-2] if x.ndim > 1 else 1
    found = [(0, 0) if t is None else two_strides(t) for t in tensors]
    if x.numel() == R * x.shape[-1] or all(group == R * row for group, row in found):
        R, found = 1, [(row, 0) for _, row in found]
    return (R, *itertools.chain(*found))


def blocks(operation: str, where: torch.device, M: int, D: int) -> dict:
    """The launch configuration for M rows of D columns: BLOCK_M, BLOCK_D, warps and the rest of the
    table."""
    config = tuning.lookup(operation, where, M=M, D=D)
    if D > MAX_BLOCK:
        return {**config, "BLOCK_M": 1, "BLOCK_D": MAX_BLOCK}
    return {**config, "BLOCK_D": next_power_of_2(D)}
