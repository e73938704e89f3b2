"""The gradient of the queries, chunk by chunk (docs/gdn_backward.md).

From the state S before a chunk, its deltas vt and dO, with Gam_ij = exp(G_i - G_j) for i >= j:

    dP = scale lower(Gam dO vt^T)      dQ = F2 (dO S^T) + dP K      then through the norm of q

and the queries' terms of dG, the gradient of cumsum(g): rows of dP * QK^T, its columns, and rows of
F2 (dO S^T) * Q.

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; R = HV / H; rows = chunk rows of the call;
NV blocks of V. K and V are powers of two. `parts` [rows, HV, NV, 8, C] receives the vectors that
backward_gates.py combines.
"""

import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ...runtime.sizes import next_power_of_2
from ..call import GdnBackward
from .gates import log2_decay
from .primitives import chunk_numbers, locate, precision


@triton.jit
def tile(ptr, tok, stride, d, ok):
    """Loads rows `tok` and columns `d` of a matrix with contiguous rows; zeros in rows that are not
    ok."""
    return tl.load(ptr + tok[:, None] * stride + d[None, :], mask=ok[:, None], other=0.0)


@triton.jit
def place(cu_ptr, T, N, NT, H: tl.constexpr, R: tl.constexpr):
    """A program's chunk and key head: (batch, head, first token, tokens left in the sequence,
    unit).

    unit: index of its first value head among all chunk rows and value heads.
    """
    row = tl.program_id(0) // H
    h = (tl.program_id(0) % H).to(tl.int64)
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    b = n.to(tl.int64) if cu_ptr is None else start * 0
    return b, h, start + c * 64, length - c * 64, (row.to(tl.int64) * H + h) * R


@triton.jit
def at(ptr, strides, b, tok, head):
    """The pointer to one token and head, by strides of B, T, heads."""
    return ptr + b * strides[0] + tok * strides[1] + head * strides[2]


@triton.jit
def inverse_norm(x, NORM: tl.constexpr):
    """1 / sqrt(sum(x^2) + 1e-6) of each row, or 1; fp32."""
    if NORM:
        return tl.rsqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) + 1e-6)
    return tl.full((x.shape[0],), 1.0, tl.float32)


@triton.jit
def _store_cumulative_gates(
    cumulative_ptr, g_ptr, A_log_ptr, dt_bias_ptr, g_strides, ok, hv, R: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Stores G [R, C] of the group's heads, in log2, for both gradient kernels."""
    t = tl.arange(0, 64)
    r = tl.arange(0, HEADS)
    mask = (r < R)[:, None] & ok[None, :]
    g = tl.load(g_ptr + r[:, None] * g_strides[2] + t[None, :] * g_strides[1], mask=mask, other=0.0)
    g = log2_decay(g, A_log_ptr, dt_bias_ptr, (hv + r)[:, None], mask)
    G = tl.cumsum(tl.where(mask, g, 0.0), axis=1)  # [HEADS, C] fp32
    tl.store(cumulative_ptr + r[:, None] * 64 + t[None, :], G, mask=(r < R)[:, None])
    tl.debug_barrier()  # the threads of this program read what others of it wrote


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _query_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    cu_ptr,  # [N + 1] int32 | int64, or None
    f_ptr,  # [rows, HV, 4, C] fp32
    do_ptr,  # [B, T, HV, V]
    vt_ptr,  # [B, T, HV, V]
    h_ptr,  # [rows, HV, K, V]
    dq_ptr,  # [B, T, H, K]
    dp_ptr,  # [rows, H, 2, C, C]: dP goes to the first
    cumulative_ptr,  # [rows, HV, C] fp32
    parts_ptr,  # [rows, HV, NV, 8, C] fp32
    q_strides,  # of B, T, H
    k_strides,
    g_strides,  # of B, T, HV
    do_strides,
    T, N,
    NT,  # ceil(T / C), equal length
    scale,
    H: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr,  # R or the next power of two
    K: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dQ of one chunk and key head, over its R value heads; the queries' terms of dG."""
    HV: tl.constexpr = H * R
    NV: tl.constexpr = V // BLOCK_V
    b, h, first, left, unit = place(cu_ptr, T, N, NT, H, R)
    if left <= 0:
        return
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    d = tl.arange(0, K)
    ok = t < left
    q_ptr = at(q_ptr, q_strides, b, first, h)
    k_ptr = at(k_ptr, k_strides, b, first, h)
    g_ptr = at(g_ptr, g_strides, b, first, h * R)
    do_ptr = at(do_ptr, do_strides, b, first, h * R)
    made = ((b * T + first) * HV + h * R) * V  # of vt and dv, which are contiguous
    vt_ptr += made
    h_ptr += unit * (K * V)
    f_ptr += unit * 256
    cumulative_ptr += unit * 64
    parts_ptr += unit * (NV * 512)
    _store_cumulative_gates(
        cumulative_ptr, g_ptr, A_log_ptr, dt_bias_ptr, g_strides, ok, h * R, R, HEADS
    )
    q = tile(q_ptr, t, q_strides[1], d, ok)  # [C, K]
    k = tile(k_ptr, t, k_strides[1], d, ok)  # [C, K]
    rq = inverse_norm(q, NORM)
    rk = inverse_norm(k, NORM)
    qk = tl.dot(q, tl.trans(k), input_precision=PREC)  # [C, C] fp32
    qk *= (scale * rq)[:, None] * rk[None, :]
    dq = tl.zeros((64, K), tl.float32)  # rq times the gradient of the normalised q
    dp = tl.zeros((64, 64), tl.float32)  # summed over the group, without scale and norms
    for step in tl.range(0, R * NV, num_stages=STAGES):
        r = step // NV
        e = (step % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
        do = tile(do_ptr + r * do_strides[2], t, do_strides[1], e, ok)  # [C, BLOCK_V]
        vt = tile(vt_ptr + r * V, t, HV * V, e, ok)  # [C, BLOCK_V]
        s = tl.load(h_ptr + r * (K * V) + d[:, None] * V + e[None, :])  # [K, BLOCK_V]
        f2 = tl.load(f_ptr + r * 256 + 128 + t)  # [C] fp32
        G = tl.load(cumulative_ptr + r * 64 + t)[:, None]
        G -= tl.load(cumulative_ptr + r * 64 + t)[None, :]
        own = tl.dot(do, tl.trans(vt), input_precision=PREC)  # [C, C] fp32
        own = tl.where(i >= j, own * tl.exp2(tl.minimum(G, 100.0)), 0.0)
        dp += own
        part = parts_ptr + step * 512 + t
        own = tl.where(i > j, own * qk, 0.0)
        tl.store(part, tl.sum(own, 1))
        tl.store(part + 64, tl.sum(own, 0))
        wide = f2[:, None] * tl.dot(do, tl.trans(s), input_precision=PREC)  # [C, K] fp32
        tl.store(part + 128, tl.sum(wide * q.to(tl.float32), 1))
        dq += wide
    dp = (dp * (scale * rq)[:, None] * rk[None, :]).to(k.dtype)
    tl.store(dp_ptr + (unit // R) * 8192 + i * 64 + j, dp)
    dq = tl.dot(dp, k, dq, input_precision=PREC)
    if NORM:
        dq -= q.to(tl.float32) * (rq * rq * tl.sum(dq * q.to(tl.float32), 1))[:, None]
    dq_ptr += ((b * T + first) * H + h) * K
    cells = t[:, None] * (H * K) + d[None, :]
    tl.store(dq_ptr + cells, dq.to(dq_ptr.dtype.element_ty), mask=ok[:, None])


def query_launch(call: GdnBackward, config: dict) -> Launch:
    """The launch of the kernel above for all calls with the same facts."""
    H, HV = call.H, call.HV
    sizes = (H, HV // H, next_power_of_2(HV // H), call.K, call.V, call.options.use_qk_l2norm)
    tokens = (call.q, call.k, call.g, call.do)
    return Launch(
        _query_bwd_kernel, call.rows * H, call.device,
        numbers=(*map(steps, tokens), *chunk_numbers(call), call.options.scale),
        constexprs=(*sizes, config["BLOCK_V"], config["STAGES"], precision(call.q.dtype)),
        options=(("num_warps", config["num_warps"]),), guarded=True,
    )  # fmt: skip
