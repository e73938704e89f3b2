"""Attention over parts of the slots: which slots a part has, and all parts of a row made one.

The number of parts follows from the shapes of a call, their size from the length on the device, so
that all programs have work however few slots are filled (arXiv:2311.01282).

Sizes: B batch rows, ROWS rows of queries of each, S slots, D channels.
"""

import triton
import triton.language as tl

from ...fp8.call import BLOCK
from ...fp8.portable.quantise import store_codes
from ...runtime.primitives import after_predecessor

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def parts_of(len_ptr, b, len_step, S, SPLITS, BLOCK_N: tl.constexpr, NEW: tl.constexpr):
    """(filled slots of batch row b, slots of a part: a multiple of BLOCK_N). NEW: slots that this
    call fills, beyond the length; without len_ptr all slots are filled."""
    length = S
    if len_ptr is not None:
        length = tl.load(len_ptr + b * len_step) + NEW
        length = tl.minimum(tl.maximum(length, 0), S).to(tl.int32)
    return length, tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS) * BLOCK_N


@triton.jit
def _combined(
    row, d, parts_ptr, len_ptr, len_step, B, S, SPLITS, ROWS: tl.constexpr, D: tl.constexpr,
    NEW: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Channels d of a row of all parts, fp32. A row that attends to no slot is 0."""
    part = tl.arange(0, PARTS)
    length, size = parts_of(len_ptr, row // ROWS, len_step, S, SPLITS, BLOCK_N, NEW)
    made = (part < SPLITS) & (part * size < length)
    place = row * SPLITS + part
    rows = B.to(tl.int64) * (ROWS * SPLITS)
    after_predecessor(PDL)
    top = tl.load(parts_ptr + rows * D + place, mask=made, other=float("-inf"))
    total = tl.load(parts_ptr + rows * (D + 1) + place, mask=made, other=0.0)
    acc = tl.load(
        parts_ptr + place[:, None] * D + d[None, :], mask=made[:, None] & (d < D)[None, :],
        other=0.0,
    )  # fmt: skip
    most = tl.max(top, 0)
    share = tl.exp2(top - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(share * total, 0)
    return tl.sum(share[:, None] * acc, 0) / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["B", "S", "SPLITS"])
def combine_kernel(
    parts_ptr,  # fp32 [B, ROWS, SPLITS, D] and [2, B, ROWS, SPLITS]: maxima, to base 2, and sums
    len_ptr,  # [B], [] or None
    y_ptr,  # [B, ROWS, D]
    len_step,
    B, S, SPLITS,
    ROWS: tl.constexpr, D: tl.constexpr, NEW: tl.constexpr,
    PARTS: tl.constexpr,  # SPLITS, rounded up to a power of two
    BLOCK_N: tl.constexpr,  # slots
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combines BLOCK_D channels of one row."""
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    d = (tl.program_id(0) % BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    y = _combined(
        row, d, parts_ptr, len_ptr, len_step, B, S, SPLITS, ROWS, D, NEW, PARTS, BLOCK_N, PDL
    )
    tl.store(y_ptr + row * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["B", "S", "SPLITS", "P"])
def combine_quantise_kernel(
    parts_ptr,  # as above
    len_ptr,
    codes_ptr,  # [P, ROWS * BLOCK] e4m3
    scales_ptr,  # [ROWS, P] fp32
    len_step,
    B, S, SPLITS, P,
    ROWS: tl.constexpr, NEW: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combines one row of BLOCK channels, rounded to bf16, in FP8 with a scale of its own."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, _BLOCK)
    y = _combined(
        row, d, parts_ptr, len_ptr, len_step, B, S, SPLITS, ROWS, _BLOCK, NEW, PARTS, BLOCK_N, PDL
    )
    y = tl.expand_dims(y.to(tl.bfloat16).to(tl.float32), 0)
    group = row % ROWS + tl.arange(0, 1)
    offs = group[:, None] * _BLOCK + d[None, :]
    store_codes(y, codes_ptr, scales_ptr, row // ROWS, group, offs, P, ROWS * _BLOCK)
