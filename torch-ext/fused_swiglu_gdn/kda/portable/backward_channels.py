"""The gradient of queries, keys and gates, some channels of a chunk a program (docs/kda.md).

With dP and N of backward_pairs.py as symmetric matrices, the state S before the chunk, the gradient
dS of the state after it, and E_s as in levels.py:

    q_row = e^G (dO S^T)    k_row = -e^G (dV S^T)    k_col = e^(G_C - G) (vt dS^T)
    U_s = dP|_s (E_s Y), Y = Q behind the middles and K before them        W_s = N|_s (E_s K)
    dQ = q_row + diag(dP) K + sum over s of E_s U_s behind
    dK = k_row + k_col + diag(dP) Q + sum over s of E_s W_s, and of E_s U_s before

Of a level, rows behind the middles are what their pairs' later tokens get, and rows before them
what the earlier ones get: one product for both. The decays' gradient is the sum of what crosses a
token:

    dg_u = sum over i >= u of Q q_row + K k_row and the levels' dG, over i < u of K k_col, and
           gam_C <S, dS>;        dG = E_s Y U_s + E_s K W_s behind, minus that before

Sizes as in backward_pairs.py.
"""

import torch
import triton
import triton.language as tl

from ...gdn.portable.backward_query import tile
from ...gdn.portable.gates import channel_log_decay, to_log2
from ...gdn.portable.primitives import chunk_numbers, locate, precision
from ...runtime.launch import Launch, steps
from ..call import KdaCall
from .sums import factors, in_parts, is_behind, running, summed


@triton.jit
def _load_scaled(ptr, stride, gates, d, ok):
    """Normalised rows of a chunk, columns d, fp32."""
    t = tl.arange(0, 64)
    return tile(ptr, t, stride, d, ok).to(tl.float32) * tl.load(gates + t)[:, None]


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
    return q_row, k_row, k_col, ends


@triton.jit
def _through_level(parts, q, k, dq, dk, dg, dp, dn, S, PREC: tl.constexpr):
    """dQ, dK and dG with the terms of level S.

    In dG stand the rounded operands: a pair's term then is the same number at both its tokens, and
    is gone where both are added.
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    mine = ((i ^ j) >= S) & ((i ^ j) < 2 * S)
    behind = is_behind(S)
    e = factors(parts, S)
    ek = (e * k).to(dp.dtype)
    y = tl.where(behind, (e * q).to(dp.dtype), ek)
    u = tl.dot(tl.where(mine, dp, 0.0), y, input_precision=PREC)
    w = tl.dot(tl.where(mine, dn, 0.0), ek, input_precision=PREC)
    z = y.to(tl.float32) * u + ek.to(tl.float32) * w
    dg += tl.where(behind, z, -z)
    u *= e
    dq += tl.where(behind, u, 0.0)
    dk += tl.where(behind, 0.0, u) + e * w
    return dq, dk, dg


@triton.jit
def _through_gate(a, dg, A_log_ptr, dt_bias_ptr, hv, at, LOWER: tl.constexpr):
    """The gradient of raw gates a from that of the decays, and the terms of A_log's."""
    by_rate = dg
    if A_log_ptr is not None or LOWER is not None:
        a = a.to(tl.float32)
        if dt_bias_ptr is not None:
            a += tl.load(dt_bias_ptr + at).to(tl.float32)
        rate = 1.0
        if A_log_ptr is not None:
            rate = tl.exp(tl.load(A_log_ptr + hv).to(tl.float32))
        if LOWER is None:
            by_rate = dg * channel_log_decay(a, A_log_ptr, None, hv, at, None, LOWER)
            dg *= -rate * tl.sigmoid(a)
        else:
            dg *= LOWER * rate * tl.sigmoid(rate * a) * tl.sigmoid(-rate * a)
            by_rate = dg * a
    return dg, by_rate


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
    PARTS: tl.constexpr,
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
    t = tl.arange(0, 64)
    ok = t < left
    q_row, k_row, k_col, ends = _through_states(
        do_ptr + b * do_strides[0] + first * do_strides[1] + hv * do_strides[2], vt_ptr + made * V,
        dv_ptr + made * V, h_ptr + unit * (K * V), dh_ptr + unit * (K * V), do_strides[1], HV * V,
        channel, t, ok, V, BLOCK_V, STAGES, PREC,
    )  # fmt: skip
    at = hv * K + channel[None, :]
    g_ptr += b * g_strides[0] + first * g_strides[1] + hv * K
    x = channel_log_decay(
        tile(g_ptr, t, g_strides[1], channel, ok), A_log_ptr, dt_bias_ptr, hv, at, None, LOWER
    )
    x = tl.where(ok[:, None], to_log2(x), 0.0)  # [C, BLOCK] fp32
    ends *= tl.exp2(tl.sum(x, 0))
    parts = in_parts(x, PARTS)
    k_ptr += b * k_strides[0] + first * k_strides[1] + (hv // R) * k_strides[2]
    q_ptr += b * q_strides[0] + first * q_strides[1] + (hv // R) * q_strides[2]
    k = _load_scaled(k_ptr, k_strides[1], gates_ptr, channel, ok)
    q = _load_scaled(q_ptr, q_strides[1], gates_ptr + 64, channel, ok) * scale

    i = t[:, None]
    j = t[None, :]
    e = tl.exp2(summed(j <= i, parts))
    dq = e * q_row
    dk = -e * k_row
    dg = q * dq + k * dk
    k_col *= tl.exp2(summed(j > i, parts))
    dk += k_col
    later = k * k_col  # of a token: crosses those behind it
    own = tl.load(gates_ptr + 128 + t)[:, None]
    dq += own * k
    dk += own * q
    pairs_ptr += unit * 8192 + i * 64 + j
    dp = tl.load(pairs_ptr)  # [C, C]
    dn = tl.load(pairs_ptr + 4096)
    for s in tl.range(0, 6, num_stages=1):
        dq, dk, dg = _through_level(parts, q, k, dq, dk, dg, dp, dn, 1 << s, PREC)

    out = made * K + i * (HV * K) + channel[None, :]
    tl.store(dq_ptr + out, dq, mask=ok[:, None])
    tl.store(dk_ptr + out, dk, mask=ok[:, None])
    dg = running(dg, True) + (running(later, False) - later) + ends[None, :]
    a = tile(g_ptr, t, g_strides[1], channel, ok)  # again: raw, they would take registers
    dg, by_rate = _through_gate(a, dg, A_log_ptr, dt_bias_ptr, hv, at, LOWER)
    tl.store(dg_ptr + out, dg.to(dg_ptr.dtype.element_ty), mask=ok[:, None])
    if sums_ptr is not None:
        sums_ptr += unit * K + channel
        tl.store(sums_ptr, tl.sum(tl.where(ok[:, None], by_rate, 0.0), 0))
        sums_ptr += tl.num_programs(0).to(tl.int64) * BLOCK
        tl.store(sums_ptr, tl.sum(tl.where(ok[:, None], dg, 0.0), 0))


def kda_backward_channels(call: KdaCall, gates, do, vt, dv, h, dh, pairs, config: dict) -> tuple:
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
            min(config["BLOCK_V"], call.V), config["STAGES"],
            3 if q.dtype == torch.float32 else 2, precision(q.dtype),
        ),
        options=(("num_warps", config["num_warps"]),),
    )  # fmt: skip
    inputs = (q, k, g, call.A_log, call.dt_bias, call.cu_seqlens, gates, do, vt, dv, h, dh, pairs)
    kernel(*inputs, dq, dk, dg, sums)
    return dq, dk, dg, sums
