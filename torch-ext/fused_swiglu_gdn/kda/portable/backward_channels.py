"""The gradient of queries, keys and gates, some channels of a chunk a program (docs/kda.md).

With dP and N of backward_pairs.py as symmetric matrices, the state S before the chunk, the gradient
dS of the state after it, and E_s as in levels.py:

    q_row = e^G (dO S^T)    k_row = -e^G (dV S^T)    k_col = e^(G_C - G) (vt dS^T)
    U = E_s (dP|_s (E_s Y)), Y = Q behind the middles and K before them        W = E_s (N|_s (E_s K))
    dQ = q_row + diag(dP) K + sum of U behind
    dK = k_row + k_col + diag(dP) Q + sum of W behind and of U + W before

Of a level, rows behind the middles are what their pairs' later tokens get, and rows before them
what the earlier ones get: one product for both. The decays' gradient sums what crosses a token:

    dg_u = sum of Q q_row + K k_row over i >= u, of K k_col over i < u, gam_C <S, dS>,
           and at each level of Q U + K W behind from u on, or of K (U + W) before u

Sizes as in backward_pairs.py.
"""

import torch
import triton
import triton.language as tl

from ...gdn.portable.backward_query import tile
from ...gdn.portable.gates import channel_log_decay, to_log2
from ...gdn.portable.primitives import chunk_numbers, level, locate, precision
from ...runtime.launch import Launch, steps
from ..call import KdaCall
from .tokens import as_blocks, as_tokens, crossing, earlier, factors, is_behind, later, of_blocks
from .tokens import since, until


@triton.jit
def _load_scaled(ptr, stride, gates, t, d, mask):
    """Normalised rows t [16, 4, 1] and columns d [1, 1, BLOCK], fp32."""
    return tl.load(ptr + t * stride + d, mask=mask, other=0.0).to(tl.float32) * tl.load(gates + t)


@triton.jit
def _through_states(
    do, vt, dv, h, dh, do_stride, vt_stride, d, t, ok, V: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dO S^T, dV S^T, vt dS^T [C, BLOCK] and <S, dS> of each channel [BLOCK]."""
    BLOCK: tl.constexpr = d.shape[0]
    q_row = tl.zeros((64, BLOCK), tl.float32)
    k_row = tl.zeros((64, BLOCK), tl.float32)
    k_col = tl.zeros((64, BLOCK), tl.float32)
    ends = tl.zeros((BLOCK,), tl.float32)
    for v0 in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        e = v0 + tl.arange(0, BLOCK_V)
        s = tl.load(h + d[:, None] * V + e[None, :])  # [BLOCK, BLOCK_V]
        ds = tl.load(dh + d[:, None] * V + e[None, :])
        x = tile(do, t, do_stride, e, ok)  # [C, BLOCK_V]
        q_row = tl.dot(x, tl.trans(s), q_row, input_precision=PREC)
        x = tile(dv, t, vt_stride, e, ok)
        k_row = tl.dot(x, tl.trans(s), k_row, input_precision=PREC)
        x = tile(vt, t, vt_stride, e, ok)
        k_col = tl.dot(x, tl.trans(ds), k_col, input_precision=PREC)
        ends += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    return as_blocks(q_row), as_blocks(k_row), as_blocks(k_col), ends


@triton.jit
def _through_level(x, q, k, dq, dk, dg, dp, dn, S: tl.constexpr, PREC: tl.constexpr):
    """dQ, dK and dg with the terms of level S."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    mine = level(i, j, S) | level(j, i, S)
    behind = is_behind(S)
    e = factors(x, S)
    ek = e * k
    y = as_tokens(tl.where(behind, e * q, ek)).to(dp.dtype)
    u = tl.dot(tl.where(mine, dp, 0.0), y, input_precision=PREC)
    w = tl.dot(tl.where(mine, dn, 0.0), as_tokens(ek).to(dp.dtype), input_precision=PREC)
    u = e * as_blocks(u)
    w = e * as_blocks(w)
    both = u + w
    dq += tl.where(behind, u, 0.0)
    dk += tl.where(behind, w, both)
    dg += crossing(tl.where(behind, q * u + k * w, k * both), S)
    return dq, dk, dg


@triton.jit
def _through_gate(a, dg, A_log_ptr, dt_bias_ptr, hv, at, LOWER: tl.constexpr):
    """The gradient of raw gates a from that of the decays, and the terms of A_log's."""
    if A_log_ptr is None and LOWER is None:
        return dg, dg
    a = a.to(tl.float32)
    if dt_bias_ptr is not None:
        a += tl.load(dt_bias_ptr + at).to(tl.float32)
    rate = 1.0
    if A_log_ptr is not None:
        rate = tl.exp(tl.load(A_log_ptr + hv).to(tl.float32))
    if LOWER is None:
        by_rate = dg * channel_log_decay(a, A_log_ptr, None, hv, at, None, LOWER)
        return dg * -rate * tl.sigmoid(a), by_rate
    dg *= LOWER * rate * tl.sigmoid(rate * a) * tl.sigmoid(-rate * a)
    return dg, dg * a


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _channels_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, HV, K], heads side by side
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV, K] or None
    cu_ptr,  # [N + 1] int32 | int64, or None
    gates_ptr,  # [rows, HV, GATES, C] fp32: factors of k and of q, the diagonal of dP
    do_ptr,  # [B, T, HV, V]
    vt_ptr,  # [B, T, HV, V]
    dv_ptr,  # [B, T, HV, V]
    h_ptr,  # [rows, HV, K, V]
    dh_ptr,  # [rows, HV, K, V]
    pairs_ptr,  # [rows, HV, 2, C, C]
    dq_ptr,  # [B, T, HV, K] fp32, written: of q and k as they are in the rule
    dk_ptr,  # [B, T, HV, K] fp32, written
    dg_ptr,  # [B, T, HV, K], written
    sums_ptr,  # [2, rows, HV, K] fp32, or None: the chunk's share of dA_log and ddt_bias
    q_strides,  # of B, T, H
    k_strides,
    g_strides,  # of B, T, HV
    do_strides,
    T,
    N,
    NT,  # ceil(T / C), equal length
    scale,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LOWER: tl.constexpr,  # of a bounded gate, or None
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """BLOCK channels of one chunk and value head."""
    HV: tl.constexpr = H * R
    pid = tl.program_id(0)
    channel = pid % (K // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    row = pid // (K // BLOCK * HV)
    hv = (pid // (K // BLOCK) % HV).to(tl.int64)
    unit = row.to(tl.int64) * HV + hv
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        if sums_ptr is not None:  # a row that no chunk uses adds nothing
            at = tl.num_programs(0).to(tl.int64) * BLOCK
            tl.store(sums_ptr + unit * K + channel, tl.zeros((BLOCK,), tl.float32))
            tl.store(sums_ptr + at + unit * K + channel, tl.zeros((BLOCK,), tl.float32))
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0
    first = start + c * 64
    left = (length - c * 64).to(tl.int32)
    made = (b * T + first) * HV + hv  # of what is contiguous
    gates_ptr += unit * (64 * GATES)
    tok = tl.arange(0, 64)
    q_in, k_in, k_out, ends = _through_states(
        do_ptr + b * do_strides[0] + first * do_strides[1] + hv * do_strides[2], vt_ptr + made * V,
        dv_ptr + made * V, h_ptr + unit * (K * V), dh_ptr + unit * (K * V), do_strides[1], HV * V,
        channel, tok, tok < left, V, BLOCK_V, STAGES, PREC,
    )  # fmt: skip
    t = 16 * tl.arange(0, 4)[None, :, None] + tl.arange(0, 16)[:, None, None]  # [16, 4, 1]
    d = channel[None, None, :]
    mask = (t < left) & (d < K)  # [16, 4, BLOCK]
    g_ptr += b * g_strides[0] + first * g_strides[1] + hv * K
    a = tl.load(g_ptr + t * g_strides[1] + d, mask=mask, other=0.0)
    x = channel_log_decay(a, A_log_ptr, dt_bias_ptr, hv, hv * K + d, None, LOWER)
    x = tl.where(mask, to_log2(x), 0.0)  # [16, 4, BLOCK] fp32
    k_ptr += b * k_strides[0] + first * k_strides[1] + (hv // R) * k_strides[2]
    q_ptr += b * q_strides[0] + first * q_strides[1] + (hv // R) * q_strides[2]
    k = _load_scaled(k_ptr, k_strides[1], gates_ptr, t, d, mask)
    q = _load_scaled(q_ptr, q_strides[1], gates_ptr + 64, t, d, mask) * scale

    e = tl.exp2(since(x) + of_blocks(x, earlier()))
    dq = e * q_in
    dk = -e * k_in
    z = q * dq + k * dk
    dg = tl.cumsum(z, axis=0, reverse=True) + of_blocks(z, later())
    k_out = tl.exp2(until(x) + of_blocks(x, later())) * k_out
    dk += k_out
    z = k * k_out
    dg += tl.cumsum(z, axis=0) - z + of_blocks(z, earlier())
    dg += (ends * tl.exp2(tl.sum(tl.sum(x, 0), 0)))[None, None, :]
    own = tl.load(gates_ptr + 128 + t)
    dq += own * k
    dk += own * q
    pairs_ptr += unit * 8192 + tok[:, None] * 64 + tok[None, :]
    dp = tl.load(pairs_ptr)  # [C, C]
    dn = tl.load(pairs_ptr + 4096)
    for s in tl.static_range(6):
        dq, dk, dg = _through_level(x, q, k, dq, dk, dg, dp, dn, 2**s, PREC)

    out = made * K + t * (HV * K) + d
    tl.store(dq_ptr + out, dq, mask=mask)
    tl.store(dk_ptr + out, dk, mask=mask)
    dg, by_rate = _through_gate(a, dg, A_log_ptr, dt_bias_ptr, hv, hv * K + d, LOWER)
    tl.store(dg_ptr + out, dg.to(dg_ptr.dtype.element_ty), mask=mask)
    if sums_ptr is not None:
        sums_ptr += unit * K + channel
        tl.store(sums_ptr, tl.sum(tl.sum(tl.where(mask, by_rate, 0.0), 0), 0))
        sums_ptr += tl.num_programs(0).to(tl.int64) * BLOCK
        tl.store(sums_ptr, tl.sum(tl.sum(tl.where(mask, dg, 0.0), 0), 0))


def kda_backward_channels(
    call: KdaCall, gates, do, vt, dv, h, dh, pairs, config: dict
) -> tuple:
    """The gradients of q and k as they are in the rule, for each value head [B, T, HV, K] fp32; dg
    (of the raw gates if they are); and sums [2, rows, HV, K] fp32 for A_log and dt_bias, or None.
    """
    q, k, g, H, HV, K, options = call.q, call.k, call.g, call.H, call.HV, call.K, call.options
    rows, dg, sums = h.shape[0], g.new_empty(g.shape), None
    dq, dk = (gates.new_empty(call.B, call.T, HV, K) for _ in "qk")
    if call.A_log is not None or call.dt_bias is not None:
        sums = gates.new_empty(2, rows, HV, K)
    kernel = Launch(
        _channels_bwd_kernel, rows * HV * (K // config["BLOCK"]), q.device,
        numbers=(*map(steps, (q, k, g, do)), *chunk_numbers(call), options.scale),
        constexprs=(
            H, HV // H, K, call.V, options.lower_bound, gates.shape[2], config["BLOCK"],
            min(config["BLOCK_V"], call.V), config["STAGES"], precision(q.dtype),
        ),
        options=(("num_warps", config["num_warps"]),),
    )  # fmt: skip
    inputs = (q, k, g, call.A_log, call.dt_bias, call.cu_seqlens, gates, do, vt, dv, h, dh, pairs)
    kernel(*inputs, dq, dk, dg, sums)
    return dq, dk, dg, sums
