"""The gradient of queries, keys and gates, some channels of a chunk a program (docs/kda.md).

With dP and N of backward_pairs.py as symmetric matrices, the state S before the chunk, the gradient
dS of the state after it, and E_s as in levels.py:

    q_row = scale e^G (dO S^T)    k_row = -e^G (dV S^T)    k_col = e^(G_C - G) (vt dS^T)
    U_s = scale dP|_s (E_s Y), Y = Q behind the middles, K before them     W_s = N|_s (E_s K)
    dQ = q_row + scale diag(dP) K + sum over s of E_s U_s behind
    dK = k_row + k_col + scale diag(dP) Q + sum over s of E_s W_s, and of E_s U_s before

with Q as its norm leaves it: in fp16 there may be no number for the scaled one.
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
from .prepare import launched_with
from .sums import as_blocks, as_tokens, in_parts, of_blocks, running, summed


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
def _with_level(e, dq, dk, dg, behind, y, ek, u, w):
    """dQ, dK and dG with a level's products U and W.

    dG is computed from the rounded operands: a pair's term is then the same number at both of its
    tokens, and cancels where both are added.
    """
    one = tl.where(behind, 1.0, 0.0)  # a factor, once for all channels
    dg += (2.0 * one - 1.0) * (y.to(tl.float32) * u + ek.to(tl.float32) * w)
    u *= e
    dq += one * u
    dk += (1.0 - one) * u + e * w
    return dq, dk, dg


@triton.jit
def _through_blocks(parts, q, k, dq, dk, dg, pairs, scale, S, PREC: tl.constexpr):
    """dQ, dK and dG with the terms of level S of 8, 4, 2, 1: inside blocks of 16 tokens."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    behind = ((j & S) != 0)[None, :, :]  # [1, 1, 16]
    e = tl.exp2(summed(parts, ((i ^ j) < S) & ((i <= j) == ((j & S) != 0))))
    dp, dn = pairs
    ek = (e * k).to(dp.dtype)
    y = tl.where(behind, (e * q).to(dp.dtype), ek)
    mine = (((i ^ j) >= S) & ((i ^ j) < 2 * S))[None, :, :]
    u = tl.dot(y, tl.where(mine, dp, 0.0), input_precision=PREC) * scale
    w = tl.dot(ek, tl.where(mine, dn, 0.0), input_precision=PREC)
    return _with_level(e, dq, dk, dg, behind, y, ek, u, w)


@triton.jit
def _product_of_tokens(x, pairs, S: tl.constexpr, PREC: tl.constexpr):
    """x [4, BLOCK, 16] times [C, C] at pairs of tokens whose lowest common block has level S."""
    BLOCK: tl.constexpr = x.shape[1]
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    # by blocks of S, along which Triton sees that 16 bytes have one mask
    mine = (i // S != j // S) & (i // (2 * S) == j // (2 * S))
    y = tl.reshape(tl.permute(x, (1, 0, 2)), (BLOCK, 64))
    y = tl.dot(y, tl.load(pairs + i * 64 + j, mask=mine, other=0.0), input_precision=PREC)
    return tl.permute(tl.reshape(y, (BLOCK, 4, 16)), (1, 0, 2))


@triton.jit
def _through_level(
    since, until, beyond, q, k, dq, dk, dg, pairs, scale, S: tl.constexpr, PREC: tl.constexpr
):
    """dQ, dK and dG with the terms of level S of 32 and 16, between blocks of 16 tokens."""
    behind = ((16 * tl.arange(0, 4) & S) != 0)[:, None, None]
    e = tl.where(behind, since, until)
    e = tl.exp2(e + beyond if S == 32 else e)
    low = pairs.dtype.element_ty
    ek = (e * k).to(low)
    y = tl.where(behind, (e * q).to(low), ek)
    u = _product_of_tokens(y, pairs, S, PREC) * scale
    w = _product_of_tokens(ek, pairs + 4096, S, PREC)
    return _with_level(e, dq, dk, dg, behind, y, ek, u, w)


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
    T, N,
    NT,  # ceil(T / C), equal length
    scale,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LOWER: tl.constexpr,  # of a bounded gate, or None
    GATES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one chunk and value head."""
    HV: tl.constexpr = H * R
    SUM: tl.constexpr = "ieee" if PREC == "ieee" else "tf32x3"  # of products of fp32
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
    x = as_blocks(tl.where(ok[:, None], to_log2(x), 0.0))  # [4, BLOCK, 16] fp32
    parts = in_parts(x, PARTS)
    k_ptr += b * k_strides[0] + first * k_strides[1] + (hv // R) * k_strides[2]
    q_ptr += b * q_strides[0] + first * q_strides[1] + (hv // R) * q_strides[2]
    k = as_blocks(_load_scaled(k_ptr, k_strides[1], gates_ptr, channel, ok))
    q = as_blocks(_load_scaled(q_ptr, q_strides[1], gates_ptr + 64, channel, ok))
    pairs_ptr += unit * 8192

    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    since = summed(parts, i <= j)
    until = summed(parts, i > j)
    total = tl.sum(x, 2)  # [4, BLOCK]
    i = tl.arange(0, 4)[:, None]
    j = tl.arange(0, 4)[None, :]
    ends *= tl.exp2(tl.sum(total, 0))
    dq = tl.exp2(since + of_blocks(total, i < j)[:, :, None]) * as_blocks(q_row * scale)
    dk = tl.exp2(since + of_blocks(total, i < j)[:, :, None]) * as_blocks(-k_row)
    dg = q * dq + k * dk
    k_col = tl.exp2(until + of_blocks(total, i > j)[:, :, None]) * as_blocks(k_col)
    dk += k_col
    later = k * k_col  # of a token: crosses those behind it
    own = tl.load(gates_ptr + 128 + 16 * tl.arange(0, 4)[:, None] + tl.arange(0, 16)[None, :])
    own *= scale
    dq += own[:, None, :] * k
    dk += own[:, None, :] * q
    beyond = of_blocks(total, ((i == 2) & (j == 3)) | ((i == 1) & (j == 0)))[:, :, None]
    for s in tl.static_range(2):
        dq, dk, dg = _through_level(
            since, until, beyond, q, k, dq, dk, dg, pairs_ptr, scale, 16 * 2**s, PREC
        )
    i = tl.arange(0, 16)
    square = tl.arange(0, 4)[:, None, None] * 1040 + i[None, :, None] * 64 + i[None, None, :]
    pairs = (tl.load(pairs_ptr + square), tl.load(pairs_ptr + 4096 + square))  # [4, 16, 16]
    for s in tl.range(0, 4, num_stages=1):
        dq, dk, dg = _through_blocks(parts, q, k, dq, dk, dg, pairs, scale, 1 << s, PREC)

    dg = running(dg, True, SUM) + running(later, False, SUM)
    dq, dk, dg = as_tokens(dq), as_tokens(dk), as_tokens(dg) + ends[None, :]
    i = t[:, None]
    out = made * K + i * (HV * K) + channel[None, :]
    tl.store(dq_ptr + out, dq, mask=ok[:, None])
    tl.store(dk_ptr + out, dk, mask=ok[:, None])
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
        options=launched_with(config),
    )  # fmt: skip
    inputs = (q, k, g, call.A_log, call.dt_bias, call.cu_seqlens, gates, do, vt, dv, h, dh, pairs)
    kernel(*inputs, dq, dk, dg, sums)
    return dq, dk, dg, sums
