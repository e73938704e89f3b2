"""A and P of a chunk by levels: every decay is exp2 of nothing positive (docs/kda.md).

Tokens i > j part at level s: neighbouring blocks of s tokens that make up one of 2 s. E_s of a
token is what it has lost since the middle of that block, its own gate included, or, before the
middle, what it loses until then. Of the level's pairs A_ij = (E_s k)_i . (E_s k)_j, and P with q.

Levels 8 to 1 are inside blocks of 16 tokens, a warp each: tiles [4, 16, BLOCK] (sums.py), and
products of which the level's pairs are kept. Levels 16 and 32 are products of all 64 tokens.
"""

import triton
import triton.language as tl

from ...gdn.portable.inverse import kept_at
from .sums import of_blocks, summed_rows


@triton.jit
def _parting(i, j, S):
    """Pairs that part at level S, either token first."""
    return ((i ^ j) >= S) & ((i ^ j) < 2 * S)


@triton.jit
def add_inside(kk, qk, parts, q, k, S, DOT: tl.constexpr, PREC: tl.constexpr):
    """A and P [4, 16, 16] with the terms of level S of 8, 4, 2, 1; q, k [4, 16, BLOCK] fp32."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    e = tl.exp2(summed_rows((((i ^ j) < S) & ((j <= i) == ((i & S) != 0)))[None, :, :], parts))
    x = e * k
    y = tl.permute(x, (0, 2, 1)).to(DOT)  # transposed in fp32, it stays in registers
    mine = _parting(i, j, S)[None, :, :]
    kk += tl.where(mine, tl.dot(x.to(DOT), y, input_precision=PREC), 0.0)
    qk += tl.where(mine, tl.dot((e * q).to(DOT), y, input_precision=PREC), 0.0)
    return kk, qk


@triton.jit
def add_between(kk, qk, parts, total, q, k, STEP, DOT: tl.constexpr, PREC: tl.constexpr):
    """A and P [64, 64] with the terms of level 32 (STEP 0), or of a half's level 16 (1 and 2).

    Operands are zero but for blocks of 16 tokens behind the middle, and before it.
    """
    BLOCK: tl.constexpr = k.shape[2]
    i = tl.arange(0, 4)[:, None]
    j = tl.arange(0, 4)[None, :]
    beyond = of_blocks(total, (STEP == 0) & (((i == 2) & (j == 3)) | ((i == 1) & (j == 0))))
    b = tl.arange(0, 4)[:, None, None]
    behind = tl.where(STEP == 0, b >= 2, b == 2 * STEP - 1)
    before = tl.where(STEP == 0, b < 2, b == 2 * STEP - 2)
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    e = tl.exp2(summed_rows((j <= i) == behind, parts) + beyond[:, None, :])
    x = e * k
    y = tl.trans(tl.reshape(tl.where(before, x, 0.0).to(DOT), (64, BLOCK)))
    x = tl.reshape(tl.where(behind, x, 0.0).to(DOT), (64, BLOCK))
    kk = tl.dot(x, y, kk, input_precision=PREC)
    x = tl.reshape(tl.where(behind, e * q, 0.0).to(DOT), (64, BLOCK))
    return kk, tl.dot(x, y, qk, input_precision=PREC)


@triton.jit
def store_inside(p_ptr, kept_ptr, kk, qk):
    """Stores the diagonal blocks of P, and of -A as kept_blocks of gdn/portable/inverse.py reads
    it: on both sides of the diagonal."""
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    b = tl.arange(0, 4)[:, None, None] * 16
    qk = tl.where(i >= j, qk, 0.0).to(p_ptr.dtype.element_ty)
    tl.store(p_ptr + (b + i) * 64 + b + j, qk)
    tl.store(kept_ptr + kept_at(b + i, b + j), (-kk).to(kept_ptr.dtype.element_ty))


@triton.jit
def store_between(p_ptr, kept_ptr, kk, qk):
    """Stores the other blocks of P, zeros above the diagonal, and of -A, which lies above it."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    tl.store(p_ptr + i * 64 + j, qk.to(p_ptr.dtype.element_ty), mask=i // 16 != j // 16)
    kk = (-kk).to(kept_ptr.dtype.element_ty)
    tl.store(kept_ptr + kept_at(j, i), kk, mask=i // 16 > j // 16)
