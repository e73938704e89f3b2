"""The chunk-parallel half of the chunked gated delta rule (docs/gdn.md).

Per chunk of C = 64 tokens and value head, with q and k normalised if asked, G = cumsum(g) and
Gam_ij = exp(G_i - G_j) for i >= j:

    L  = strict_lower(beta_i Gam_ij k_i.k_j)      Tb = (I + L)^-1 diag(beta)
    P  = scale lower(Gam_ij q_i.k_j)              F  = row factors of the scan

Sizes: B T H HV K V; N sequences; C chunk; R = HV / H; rows = chunk rows of the call.
"""

import functools
from typing import Optional

import torch
import triton
import triton.language as tl

from ..device import multiprocessor_count, overlaps_launches
from ..tuning import lookup
from .launch import prepare, specialized_on, steps

CHUNK = 64
# fp32 products to fp32's accuracy: three products of tf32 each on NVIDIA's tensor cores
EXACT_FP32 = "ieee" if torch.version.hip else "tf32x3"

# Programs of a grid that runs at once: there a scan that begins early costs prepare nothing (H200:
# 2 us less a call; on grids of several waves it takes their place, 2 % more).
SMALL_GRID = tl.constexpr(1024)


@triton.jit
def locate(row, cu_ptr, T, N, ROWS, SPAN):
    """Row of SPAN tokens -> (sequence, span within it, first token, length of the sequence).

    Sequence n owns the rows from cu[n] // SPAN + n (n * ROWS at equal length) on. That is enough
    for its tokens and costs no prefix sum; the caller leaves rows behind a sequence's end alone.
    """
    if cu_ptr is None:
        n = row // ROWS
        span = row % ROWS
        start = tl.cast(0, tl.int64)
        length = T
    else:
        n = 0
        end = N
        while end - n > 1:
            mid = (n + end) // 2
            left = (tl.load(cu_ptr + mid) // SPAN + mid) > row
            end = tl.where(left, mid, end)
            n = tl.where(left, n, mid)
        # clamped, so that wrong values cannot read or write out of bounds
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), T).to(tl.int64)
        stop = tl.minimum(tl.load(cu_ptr + n + 1), T).to(tl.int64)
        length = tl.maximum(stop - start, 0).to(tl.int32)
        span = (row - (start // SPAN + n)).to(tl.int32)
    return n, span, start, length


@triton.jit
def _diagonal(x, i, j):
    return tl.sum(tl.where(i == j, x, 0.0), axis=1)


@triton.jit
def log2_decay(g, A_log_ptr, dt_bias_ptr, hv, mask=True):
    """g as given (natural-log decay; the raw a with A_log) -> log2 of the decay, fp32.

    Cut at 2^-200, which is 0 in fp32, so that one reset does not cost its chunk all precision.
    """
    if A_log_ptr is not None:
        x = g
        if dt_bias_ptr is not None:
            x += tl.load(dt_bias_ptr + hv, mask=mask, other=0.0).to(tl.float32)
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        g = -tl.exp(tl.load(A_log_ptr + hv, mask=mask, other=0.0).to(tl.float32)) * softplus
    return tl.maximum(g * 1.4426950408889634, -200.0)


@triton.jit
def write_strength(beta, mask, BETA_MAX: tl.constexpr):
    """beta as given, or BETA_MAX * sigmoid of it, fp32; 0 outside the mask."""
    beta = beta.to(tl.float32)
    if BETA_MAX > 0.0:
        beta = BETA_MAX * tl.sigmoid(beta)
    return tl.where(mask, beta, 0.0)


@triton.jit
def _sum_and_keep(g, beta, next_g, next_beta):
    """Cumulative sum of g. That beta goes through the scan keeps Triton from loading it once more
    for each layout in which it is needed: 16 scattered loads a thread where 4 from shared do."""
    return g + next_g, next_beta


@triton.jit
def _store_factors(
    g_ptr,  # [C, heads]
    beta_ptr,  # [C, heads]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    f_ptr,  # [heads, 4, C] fp32
    gates_ptr,  # [heads, 2, C] fp32: g and beta, read again in the layouts of the [C, C] tiles
    decay_ptr,  # [heads] fp32
    g_strides,  # of B, T, HV
    beta_strides,
    ok,  # [C]
    hv0,
    k2,  # [C] fp32, |k|^2 as used
    rk,  # [C] fp32
    rq,  # [C] fp32, with the scale
    heads,
    BLOCK_R: tl.constexpr,
    BETA_MAX: tl.constexpr,
):
    """F, and log2 of a bound of the norm of the chunk's transition, for all heads at once."""
    i = tl.arange(0, 64)[:, None]
    r = tl.arange(0, BLOCK_R)[None, :]
    has = r < heads
    mask = ok[:, None] & has
    g = tl.load(g_ptr + i * g_strides[1] + r * g_strides[2], mask=mask, other=0.0)
    g = log2_decay(g.to(tl.float32), A_log_ptr, dt_bias_ptr, hv0 + r, has)
    g = tl.where(mask, g, 0.0)  # [C, heads] fp32
    beta = tl.load(beta_ptr + i * beta_strides[1] + r * beta_strides[2], mask=mask, other=0.0)
    beta = write_strength(beta, mask, BETA_MAX)
    G = tl.cumsum(g, axis=0)
    G_end = tl.sum(g, axis=0)[None, :]  # [1, heads]
    tl.store(gates_ptr + r * 128 + i, g, mask=tl.broadcast_to(has, (64, BLOCK_R)))
    tl.store(gates_ptr + r * 128 + 64 + i, beta, mask=tl.broadcast_to(has, (64, BLOCK_R)))
    at = f_ptr + r * 256 + i
    has = tl.broadcast_to(has, (64, BLOCK_R))
    tl.store(at, tl.exp2(G) * rk[:, None], mask=has)
    tl.store(at + 64, tl.exp2(tl.minimum(G_end - G, 0.0)) * rk[:, None], mask=has)
    tl.store(at + 128, tl.exp2(G) * rq[:, None], mask=has)
    tl.store(at + 192, tl.broadcast_to(tl.exp2(G_end), (64, BLOCK_R)), mask=has)
    # a token's a (I - beta k k^T) stretches nothing by more than a max(1, |1 - beta |k|^2|)
    stretch = tl.sum(tl.log2(tl.maximum(tl.abs(1.0 - beta * k2[:, None]), 1.0)), axis=0)
    tl.store(decay_ptr + r, G_end + stretch[None, :], mask=r < heads)


@triton.jit
def _level(i, j, S: tl.constexpr):
    """Where the blocks below the diagonal lie that join two S x S blocks into one of 2S x 2S."""
    return (i // S == j // S + 1) & ((j // S) % 2 == 0)


@triton.jit
def _join_pairs(x, m, S: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """From the inverses x of the S x S blocks of the diagonal to those of 2S x 2S.

    Below the diagonal of [[A, 0], [-M, D]]^-1 stands D^-1 M A^-1.
    """
    low = m * _level(tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :], S).to(DOT)
    y = tl.dot(x.to(DOT), low, input_precision=PREC).to(DOT)
    return tl.dot(y, x.to(DOT), x, input_precision=PREC)


@triton.jit
def unit_lower_inverse(m, DOT: tl.constexpr, PREC: tl.constexpr):
    """(I - m)^-1 of a strictly lower [C, C] fp32 tile: blocks of 16 first, then pairs of blocks.

    For unit keys every product on the way stays within 1, so nothing is lost to cancellation.
    """
    a = tl.arange(0, 16)[None, :, None]
    b = tl.arange(0, 16)[None, None, :]
    own = tl.arange(0, 4)[:, None, None, None] == tl.arange(0, 4)[None, None, :, None]
    own = own.to(tl.float32)
    diag = tl.sum(tl.reshape(m, (4, 16, 4, 16)) * own, axis=2)  # [4, 16, 16] fp32
    x = tl.where(a == b, 1.0, tl.where(_level(a, b, 1), diag, 0.0))
    d = diag.to(DOT)
    for s in tl.static_range(1, 4):
        y = tl.dot(x.to(DOT), d, input_precision=PREC).to(DOT)
        z = tl.dot(y, x.to(DOT), input_precision=PREC)
        x = tl.where(_level(a, b, 2**s), z, x)
    x = tl.reshape(x[:, :, None, :] * own, (64, 64))
    x = _join_pairs(x, m.to(DOT), 16, DOT, PREC)
    return _join_pairs(x, m.to(DOT), 32, DOT, PREC)


@triton.jit(do_not_specialize=["T", "N", "NT", "heads"])
def _prepare_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, HV]
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    cu_ptr,  # [N + 1] int32 | int64 or None
    tb_ptr,  # [rows, HV, C, C]
    p_ptr,  # [rows, HV, C, C]
    f_ptr,  # [rows, HV, 4, C] fp32
    gates_ptr,  # [rows, HV, 2, C] fp32, scratch
    decay_ptr,  # [rows, HV] fp32
    q_strides,  # of B, T, H
    k_strides,
    g_strides,  # of B, T, HV
    beta_strides,
    T,
    N,
    NT,  # ceil(T / C), equal length
    heads,
    scale,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_MAX: tl.constexpr,  # beta is a logit, and BETA_MAX * sigmoid(beta) is meant; 0: as given
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
    OVERLAPS: tl.constexpr,  # the next launch may begin before this one has ended
):
    """Tb, P and F of one chunk and `heads` of the R value heads of one key head."""
    if OVERLAPS:
        if tl.num_programs(0) <= SMALL_GRID:
            tl.extra.cuda.gdc_launch_dependents()
    parts = H * R // heads
    row = tl.program_id(0) // parts
    hv0 = (tl.program_id(0) % parts).to(tl.int64) * heads
    h = hv0 // R
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0  # packed: a batch of one
    t = tl.arange(0, 64)
    tok = start + c * 64  # first token, int64; offsets inside a chunk are 32-bit
    ok = t < length - c * 64
    q_ptr += b * q_strides[0] + tok * q_strides[1] + h * q_strides[2]
    k_ptr += b * k_strides[0] + tok * k_strides[1] + h * k_strides[2]
    g_ptr += b * g_strides[0] + tok * g_strides[1]
    beta_ptr += b * beta_strides[0] + tok * beta_strides[1]
    i = t[:, None]
    j = t[None, :]

    kk = tl.zeros((64, 64), tl.float32)
    qk = tl.zeros((64, 64), tl.float32)
    qq = tl.zeros((64, 64), tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        d = k0 + tl.arange(0, BLOCK_K)[None, :]
        mask = ok[:, None] & (d < K)
        q = tl.load(q_ptr + i * q_strides[1] + d, mask=mask, other=0.0)  # [C, BLOCK_K]
        k = tl.load(k_ptr + i * k_strides[1] + d, mask=mask, other=0.0)  # [C, BLOCK_K]
        kk = tl.dot(k, tl.trans(k), kk, input_precision=PREC)
        qk = tl.dot(q, tl.trans(k), qk, input_precision=PREC)
        if L2NORM:  # the tensor cores sum squares with fewer instructions than a reduction
            qq = tl.dot(q, tl.trans(q), qq, input_precision=PREC)
    rq = tl.where(ok, 1.0, 0.0)  # [C] fp32
    rk = rq
    k2 = _diagonal(kk, i, j)  # [C] fp32, |k|^2
    if L2NORM:
        rq *= tl.rsqrt(_diagonal(qq, i, j) + 1e-6)
        rk *= tl.rsqrt(k2 + 1e-6)
        k2 *= rk * rk
    kk = tl.where(i > j, kk * -rk[:, None] * rk[None, :], 0.0)  # negative: see the inverse
    qk = tl.where(i >= j, qk * (scale * rq)[:, None] * rk[None, :], 0.0)

    g_ptr += hv0 * g_strides[2]
    beta_ptr += hv0 * beta_strides[2]
    unit = row.to(tl.int64) * (H * R) + hv0
    gates_ptr += unit * 128
    _store_factors(
        g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, f_ptr + unit * 256, gates_ptr, decay_ptr + unit,
        g_strides, beta_strides, ok, hv0, k2, rk, rq * scale, heads, BLOCK_R, BETA_MAX,
    )  # fmt: skip
    tl.debug_barrier()  # the gates are read by other threads than wrote them
    tb_ptr += unit * 4096
    p_ptr += unit * 4096
    for head in range(heads):
        g = tl.load(gates_ptr + head * 128 + t)  # [C] fp32, log2
        beta = tl.load(gates_ptr + head * 128 + 64 + t)  # [C] fp32
        G, beta = tl.associative_scan((g, beta), 0, _sum_and_keep)
        gam = tl.exp2(tl.minimum(G[:, None] - G[None, :], 100.0))  # finite above the diagonal too
        p = qk * gam
        tl.store(p_ptr + head * 4096 + i * 64 + j, p.to(p_ptr.dtype.element_ty))
        m = kk * gam * beta[:, None]
        tb = unit_lower_inverse(m, DOT, PREC) * beta[None, :]
        tl.store(tb_ptr + head * 4096 + i * 64 + j, tb.to(tb_ptr.dtype.element_ty))


def precision(dtype: torch.dtype) -> str:
    """input_precision of products of tensors of the dtype; only fp32 depends on it."""
    if dtype == torch.float32 or torch.version.hip is not None:
        return EXACT_FP32
    return "tf32"


def chunk_rows(T: int, B: int, cu_seqlens: Optional[torch.Tensor]) -> int:
    """Rows of the prepared blocks: no prefix sum, no device value is needed; gaps are harmless."""
    if cu_seqlens is None:
        return B * -(-T // CHUNK)
    return T // CHUNK + cu_seqlens.shape[0] - 1


@functools.cache
def constexprs(
    wide: bool, H: int, R: int, K: int, use_qk_l2norm: bool, use_beta_sigmoid: bool,
    allow_neg_eigval: bool, overlaps: bool,
) -> tuple:  # fmt: skip
    """The kernel's constexprs in their order; wide for fp32 inputs.

    The inverse's products are in fp16 where its range is sure to do: with unit keys nothing exceeds
    2, and fp16 has the mantissa of tf32 at twice its rate.
    """
    beta_max = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid else 0.0
    block_k = min(triton.next_power_of_2(max(K, 16)), 128)
    dot = tl.float16 if use_qk_l2norm and not wide else tl.float32
    exactness = precision(torch.float32 if wide else torch.float16)
    block_r = triton.next_power_of_2(R)
    return (H, R, K, use_qk_l2norm, beta_max, block_k, block_r, dot, exactness, overlaps)


def _processors(device: torch.device) -> int:
    return multiprocessor_count(device.index) if device.type == "cuda" else 1


def gdn_prepare(
    q: torch.Tensor,  # [B, T, H, K]
    k: torch.Tensor,  # [B, T, H, K]
    g: torch.Tensor,  # [B, T, HV]
    beta: torch.Tensor,  # [B, T, HV]
    A_log: Optional[torch.Tensor],  # [HV]
    dt_bias: Optional[torch.Tensor],  # [HV]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
):
    """Tb, P, F and decay of every chunk row and value head: the boundary of docs/gdn.md."""
    B, T, H, K = q.shape
    HV = g.shape[2]
    rows = chunk_rows(T, B, cu_seqlens)
    tb = q.new_empty((rows, HV, CHUNK, CHUNK))
    p = torch.empty_like(tb)
    # one allocation: an allocation costs the host as much as a third of a launch
    n = rows * HV
    small = q.new_empty(n * (6 * CHUNK + 1), dtype=torch.float32)
    f = small.as_strided((rows, HV, 4, CHUNK), (HV * 4 * CHUNK, 4 * CHUNK, CHUNK, 1))
    gates = small[n * 4 * CHUNK :]  # [rows, HV, 2, C] fp32, scratch
    decay = small.as_strided((rows, HV), (HV, 1), n * 6 * CHUNK)
    if rows * HV == 0:
        return tb, p, f, decay
    N = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    inputs = (q, k, g, beta, A_log, dt_bias, cu_seqlens)
    strides = (steps(q), steps(k), steps(g), steps(beta))
    flags = (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, overlaps_launches(q.device))
    fixed = constexprs(q.dtype == torch.float32, H, HV // H, K, *flags)
    # all heads of a key head in one program share its products, if that leaves programs enough
    heads = HV // H if rows * H >= 2 * _processors(q.device) else 1
    options = tuple(lookup("common_gdn_prepare", q.device, R=HV // H).items())
    kind = (q.device, *map(specialized_on, inputs), strides)
    prepare(_prepare_kernel, fixed, options, *kind).launch_at(
        (rows * HV // heads, 1, 1),
        (*inputs, tb, p, f, gates, decay),
        *strides, T, N, -(-T // CHUNK), heads, scale,
    )  # fmt: skip
    return tb, p, f, decay
