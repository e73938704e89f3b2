"""A and P of a chunk by levels: every decay is exp2 of nothing positive (docs/kda.md).

Tokens i > j part at level s: neighbouring blocks of s tokens that make up one of 2 s. E_s of a
token is what it has lost since the middle of that block, its own gate included, or, before the
middle, what it loses until then. Of the level's pairs A_ij = (E_s k)_i . (E_s k)_j, and P with q.

A goes to where it is kept, as -A and as kept_blocks of gdn/portable/inverse.py reads it.
"""

import triton
import triton.language as tl

from ...gdn.portable.gates import to_log2
from ...gdn.portable.inverse import kept_at
from ...gdn.portable.primitives import level, locate


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
def _store_pairs(p_ptr, kept_ptr, i, j, qk, kk, DIAGONAL: tl.constexpr):
    """P and -A at (i, j). A goes above the diagonal, in the diagonal blocks to both sides of it."""
    low = kept_ptr.dtype.element_ty
    if DIAGONAL:
        tl.store(p_ptr + i * 64 + j, tl.where(i >= j, qk, 0.0).to(p_ptr.dtype.element_ty))
        kk = tl.where(i == j, 0.0, -kk).to(low)
        tl.store(kept_ptr + kept_at(j, i), kk, mask=i >= j)
        tl.store(kept_ptr + kept_at(i, j), kk, mask=i > j)
    else:
        tl.store(p_ptr + i * 64 + j, qk.to(p_ptr.dtype.element_ty))
        tl.store(kept_ptr + kept_at(j, i), (-kk).to(low))


@triton.jit
def _store_below(
    q, k, x, gates, p, kept, q_stride, k_stride, x_stride, first, left, scale, S: tl.constexpr,
    K: tl.constexpr, RAW: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The block of level S whose rows are the S tokens behind the S from token `first` on."""
    i = tl.arange(0, S)
    lo = first + i[:, None]
    hi = lo + S
    kk = tl.zeros((S, S), tl.float32)
    qk = tl.zeros((S, S), tl.float32)
    for k0 in tl.range(0, K, BLOCK, num_stages=STAGES, disable_licm=True):
        d = k0 + tl.arange(0, BLOCK)[None, :]
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
    _store_pairs(p, kept, hi, first + i[None, :], qk * scale, kk, False)


@triton.jit
def _factors(x, S: tl.constexpr, BLOCK: tl.constexpr):
    """E of level S for decays x [16, BLOCK] fp32."""
    y = tl.reshape(x, (8 // S, 2, S, BLOCK))
    behind = (tl.arange(0, 2) == 1)[None, :, None, None]
    if S == 1:
        e = tl.where(behind, y, 0.0)
    else:
        since = tl.cumsum(y, axis=2)
        until = tl.cumsum(y, axis=2, reverse=True) - y
        e = tl.where(behind, since, until)
    return tl.reshape(tl.exp2(e), (16, BLOCK))


@triton.jit
def _store_diagonal(
    q, k, x, gates, p, kept, q_stride, k_stride, x_stride, first, left, scale, K: tl.constexpr,
    RAW: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Levels 8, 4, 2, 1 and the diagonal of the 16 tokens from `first` on."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    t = first + i
    kk = tl.zeros((16, 16), tl.float32)
    qk = tl.zeros((16, 16), tl.float32)
    for k0 in tl.range(0, K, BLOCK, num_stages=STAGES, disable_licm=True):
        d = k0 + tl.arange(0, BLOCK)[None, :]
        mask = (t < left) & (d < K)
        g = _load_decays(x, t * x_stride + d, mask, RAW)
        kn = _load_scaled(k, t * k_stride + d, gates, t, mask)
        qn = _load_scaled(q, t * q_stride + d, gates + 64, t, mask)
        qk += tl.where(i == j, tl.sum(qn * kn, axis=1)[:, None], 0.0)
        for s in tl.static_range(4):
            e = _factors(g, 2**s, BLOCK)
            a = (kn * e).to(DOT)
            c = tl.trans(a)
            mine = level(i, j, 2**s)
            kk += tl.where(mine, tl.dot(a, c, input_precision=PREC), 0.0)
            qk += tl.where(mine, tl.dot((qn * e).to(DOT), c, input_precision=PREC), 0.0)
    _store_pairs(p, kept, t, first + j, qk * scale, kk, True)


@triton.jit(do_not_specialize=["T", "N", "NT"])
def pairs_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    x_ptr,  # [B, T, HV, K], the caller's g; [rows, HV, C, K] fp32 with RAW, log2 of the decays
    cu_ptr,  # [N + 1] int32 | int64 or None
    p_ptr,  # [rows, HV, C, C], written
    kept_ptr,  # [rows, HV, STEP]: -A, written; the element type is DOT's
    gates_ptr,  # [rows, HV, GATES, C] fp32: factors of keys and of queries
    q_strides,  # of B, T, H
    k_strides,
    x_strides,  # of B, T, HV
    T, N,
    NT,  # ceil(T / C), equal length
    scale,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, RAW: tl.constexpr, GATES: tl.constexpr,
    STEP: tl.constexpr,  # elements from a unit's -A to the next
    BLOCK: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """A warp's part of a chunk and value head: a diagonal block of 16 tokens, a block of level 16,
    or level 32. Without other warps to wait for; parts that read the same lie together."""
    HV: tl.constexpr = H * R
    part = tl.program_id(0) % 7
    hv = (tl.program_id(0) // 7) % HV
    row = tl.program_id(0) // (7 * HV)
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0  # packed: a batch of one
    tok = start + c * 64
    left = (length - c * 64).to(tl.int32)
    unit = row.to(tl.int64) * HV + hv
    q = q_ptr + b * q_strides[0] + tok * q_strides[1] + (hv // R) * q_strides[2]
    k = k_ptr + b * k_strides[0] + tok * k_strides[1] + (hv // R) * k_strides[2]
    if RAW:
        x = x_ptr + unit * (64 * K)
    else:
        x = x_ptr + b * x_strides[0] + tok * x_strides[1] + hv * K
    gates = gates_ptr + unit * (64 * GATES)
    p = p_ptr + unit * 4096
    kept = kept_ptr + unit * STEP
    x_stride = K if RAW else x_strides[1]
    if part < 4:
        _store_diagonal(
            q, k, x, gates, p, kept, q_strides[1], k_strides[1], x_stride, part * 16, left, scale,
            K, RAW, BLOCK, STAGES, DOT, PREC,
        )  # fmt: skip
    elif part < 6:
        _store_below(
            q, k, x, gates, p, kept, q_strides[1], k_strides[1], x_stride, (part - 4) * 32, left,
            scale, 16, K, RAW, BLOCK, STAGES, DOT, PREC,
        )  # fmt: skip
    else:
        _store_below(
            q, k, x, gates, p, kept, q_strides[1], k_strides[1], x_stride, 0, left, scale, 32, K,
            RAW, BLOCK, STAGES, DOT, PREC,
        )  # fmt: skip
