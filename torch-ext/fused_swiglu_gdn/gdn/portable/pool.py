"""Clears rows of a state pool before a call, in portable Triton.

Sizes: N sequences, P rows of the pool, HV K V.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime.copies import on_dense
from ...runtime.dtypes import SERVED
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv
from ..call import ClearRows

BLOCK = 4096


@triton.jit
def _clear_rows_kernel(
    pool_ptr,  # [P, HV, R, C]
    index_ptr,  # [N]
    kept_ptr,  # [N] uint8
    strides,  # of P, HV, R, C
    R,
    C,
    SIZE,  # HV R C
    BLOCK: tl.constexpr,
):
    """A program zeroes BLOCK elements of one sequence's row, if that row is to be cleared."""
    blocks = tl.cdiv(SIZE, BLOCK)
    n = tl.program_id(0) // blocks
    row = tl.load(index_ptr + n).to(tl.int64)
    if (row >= 0) & (tl.load(kept_ptr + n) == 0):
        e = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        at = row * strides[0] + (e // (R * C)).to(tl.int64) * strides[1]
        at += ((e // C) % R).to(tl.int64) * strides[2] + (e % C).to(tl.int64) * strides[3]
        zero = tl.zeros((BLOCK,), pool_ptr.dtype.element_ty)
        tl.store(pool_ptr + at, zero, mask=e < SIZE)


def prepare_gdn_clear_rows(call: ClearRows) -> Optional[Callable]:
    """(pool, indices, kept) -> None; rows of the pool, of any strides, are zeroed."""
    return on_dense(_prepare, call, "pool") if call.pool.dtype in SERVED else None


def _prepare(call: ClearRows) -> Callable:
    pool = call.pool
    _, heads, R, C = pool.shape
    size = heads * R * C
    kernel = Launch(
        _clear_rows_kernel, call.indices.numel() * cdiv(size, BLOCK), pool.device,
        numbers=(pool.stride(), R, C, size), constexprs=(BLOCK,), guarded=True,
    )  # fmt: skip
    return lambda pool, indices, kept: kernel(pool, indices, kept.view(torch.uint8))
