"""A and P of a chunk by levels: every decay is exp2 of nothing positive (docs/kda.md).

Tokens i > j part at level s: neighbouring blocks of s tokens that make up one of 2 s. E_s of a
token is what it has lost since the middle of that block, its own gate included, or, before the
middle, what it loses until then. Of the level's pairs A_ij = (E_s k)_i . (E_s k)_j, and P with q.

A goes to where it is kept, as -A and as kept_blocks of gdn/portable/inverse.py reads it.
"""

import triton
import triton.language as tl

from ...gdn.portable.gates import to_log2
from ...gdn.portable.primitives import level


@triton.jit
def _load_decays(ptr, at, mask, RAW: tl.constexpr):
    """log2 of decays: RAW: as they were stored for gates that are raw; else of the caller's g."""
    x = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x if RAW else tl.where(mask, to_log2(x), 0.0)


@triton.jit
def _load_scaled(ptr, at, scale_ptr, t, mask):
    """Elements of q or k [.., C, K] times the factors of their tokens t, fp32."""
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr + t)


@triton.jit
def _kept_at(i, j):
    """Where keep_blocks puts element (i, j) of a [C, C] tile."""
    r = i % 16
    c = j % 16
    block = (4 * (i // 16) + j // 16) * 256
    return block + ((r % 8) * 4 + (c % 8) // 2) * 8 + (c // 8) * 4 + (r // 8) * 2 + c % 2


@triton.jit
def _store_pairs(p_ptr, kept_ptr, i, j, qk, kk, DIAGONAL: tl.constexpr):
    """P and -A at (i, j). A goes above the diagonal, in the diagonal blocks to both sides of it."""
    low = kept_ptr.dtype.element_ty
    if DIAGONAL:
        tl.store(p_ptr + i * 64 + j, tl.where(i >= j, qk, 0.0).to(p_ptr.dtype.element_ty))
        kk = tl.where(i == j, 0.0, -kk).to(low)
        tl.store(kept_ptr + _kept_at(j, i), kk, mask=i >= j)
        tl.store(kept_ptr + _kept_at(i, j), kk, mask=i > j)
    else:
        tl.store(p_ptr + i * 64 + j, qk.to(p_ptr.dtype.element_ty))
        tl.store(kept_ptr + _kept_at(j, i), (-kk).to(low))


@triton.jit
def store_half(
    q, k, x, gates, p, kept, q_stride, k_stride, x_stride, left, K: tl.constexpr,
    RAW: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Level 32, the lower left quarter of the chunk; zeros above the diagonal blocks of P."""
    i = tl.arange(0, 32)
    lo = i[:, None]
    hi = lo + 32
    kk = tl.zeros((32, 32), tl.float32)
    qk = tl.zeros((32, 32), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
        d = k0 + tl.arange(0, BLOCK_K)[None, :]
        in_lo = (lo < left) & (d < K)
        in_hi = (hi < left) & (d < K)
        f = tl.exp2(tl.cumsum(_load_decays(x, hi * x_stride + d, in_hi, RAW), axis=0))
        g = _load_decays(x, lo * x_stride + d, in_lo, RAW)
        r = tl.exp2(tl.cumsum(g, axis=0, reverse=True) - g)
        a = (_load_scaled(k, hi * k_stride + d, gates, hi, in_hi) * f).to(DOT)
        qa = (_load_scaled(q, hi * q_stride + d, gates + 64, hi, in_hi) * f).to(DOT)
        c = tl.trans((_load_scaled(k, lo * k_stride + d, gates, lo, in_lo) * r).to(DOT))
        kk = tl.dot(a, c, kk, input_precision=PREC)
        qk = tl.dot(qa, c, qk, input_precision=PREC)
    _store_pairs(p, kept, hi, i[None, :], qk, kk, False)
    t = tl.arange(0, 64)
    r, c = t[:, None], t[None, :]
    tl.store(p + r * 64 + c, tl.zeros((64, 64), p.dtype.element_ty), mask=r // 16 < c // 16)


@triton.jit
def store_quarters(
    q, k, x, gates, p, kept, q_stride, k_stride, x_stride, left, K: tl.constexpr,
    RAW: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Level 16: two blocks of 16 x 16."""
    i = tl.arange(0, 16)
    half = tl.arange(0, 2)[:, None, None] * 32
    lo = half + i[None, :, None]  # [2, 16, 1]
    hi = lo + 16
    kk = tl.zeros((2, 16, 16), tl.float32)
    qk = tl.zeros((2, 16, 16), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
        d = k0 + tl.arange(0, BLOCK_K)[None, None, :]
        in_lo = (lo < left) & (d < K)
        in_hi = (hi < left) & (d < K)
        f = tl.exp2(tl.cumsum(_load_decays(x, hi * x_stride + d, in_hi, RAW), axis=1))
        g = _load_decays(x, lo * x_stride + d, in_lo, RAW)
        r = tl.exp2(tl.cumsum(g, axis=1, reverse=True) - g)
        a = (_load_scaled(k, hi * k_stride + d, gates, hi, in_hi) * f).to(DOT)
        qa = (_load_scaled(q, hi * q_stride + d, gates + 64, hi, in_hi) * f).to(DOT)
        c = (_load_scaled(k, lo * k_stride + d, gates, lo, in_lo) * r).to(DOT)
        c = tl.permute(c, (0, 2, 1))
        kk = tl.dot(a, c, kk, input_precision=PREC)
        qk = tl.dot(qa, c, qk, input_precision=PREC)
    _store_pairs(p, kept, hi, half + i[None, None, :], qk, kk, False)


@triton.jit
def _factors(x, S: tl.constexpr, BLOCK: tl.constexpr):
    """E of level S for decays x in each 16 tokens, [4, 16, BLOCK] fp32."""
    y = tl.reshape(x, (32 // S, 2, S, BLOCK))
    behind = (tl.arange(0, 2) == 1)[None, :, None, None]
    if S == 1:
        e = tl.where(behind, y, 0.0)
    else:
        since = tl.cumsum(y, axis=2)
        until = tl.cumsum(y, axis=2, reverse=True) - y
        e = tl.where(behind, since, until)
    return tl.reshape(tl.exp2(e), (4, 16, BLOCK))


@triton.jit
def store_diagonal(
    q, k, x, gates, p, kept, q_stride, k_stride, x_stride, left, K: tl.constexpr,
    RAW: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Levels 8, 4, 2, 1 and the diagonal: four blocks of 16 x 16, a warp each."""
    row = tl.arange(0, 16)
    block = tl.arange(0, 4)[:, None, None] * 16
    i = row[None, :, None]
    j = row[None, None, :]
    t = block + i  # [4, 16, 1]
    kk = tl.zeros((4, 16, 16), tl.float32)
    qk = tl.zeros((4, 16, 16), tl.float32)
    for k0 in tl.range(0, K, BLOCK_D, disable_licm=True):
        d = k0 + tl.arange(0, BLOCK_D)[None, None, :]
        mask = (t < left) & (d < K)
        g = _load_decays(x, t * x_stride + d, mask, RAW)
        kn = _load_scaled(k, t * k_stride + d, gates, t, mask)
        qn = _load_scaled(q, t * q_stride + d, gates + 64, t, mask)
        qk += tl.where(i == j, tl.sum(qn * kn, axis=2)[:, :, None], 0.0)
        for s in tl.static_range(4):
            e = _factors(g, 2**s, BLOCK_D)
            a = (kn * e).to(DOT)
            c = tl.permute(a, (0, 2, 1))
            mine = level(i, j, 2**s)
            kk += tl.where(mine, tl.dot(a, c, input_precision=PREC), 0.0)
            qk += tl.where(mine, tl.dot((qn * e).to(DOT), c, input_precision=PREC), 0.0)
    _store_pairs(p, kept, t, block + j, qk, kk, True)
