"""The chunk-parallel half of the gated delta rule's gradient (docs/gdn_backward.md).

From the state S before a chunk, the gradient dS of the state after it, vt and dV, with keys and
queries normalised if asked and Gam_ij = exp(G_i - G_j) for i >= j:

    dP = scale lower(Gam dO vt^T)      N = -strict_lower(Gam dV vt^T)      dbeta = (dV . vt) / beta^2
    dQ = F2 (dO S^T) + dP K            dK = -F0 (dV S^T) + F1 (vt dS^T) + (N + N^T) K + dP^T Q

and dG from the row and column sums of the same products, dg = its reverse cumulative sum.
Products that are needed transposed are computed transposed: Triton below 3.7.1 miscompiles a dot of
a transposed accumulator on Hopper (flash-linear-attention#640).

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; R = HV / H; rows = chunk rows of the call.
"""

import torch
import triton
import triton.language as tl

from ..common.gdn_prepare import _log2_decay as log2_decay
from ..common.gdn_prepare import locate_chunk


@triton.jit
def _tile(ptr, tok, stride, d, mask):
    """Rows `tok` and columns `d` of a matrix of dense rows, in its own dtype; zeros outside."""
    return tl.load(ptr + tok[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def _gate_gradient(dg, raw, g2, A_log_ptr, dt_bias_ptr, hv):
    """da [C] and the sums of dA_log and ddt_bias, from dg; g2 = g log2(e)."""
    x = raw.to(tl.float32)
    if dt_bias_ptr is not None:
        x += tl.load(dt_bias_ptr + hv).to(tl.float32)
    da = dg * -tl.exp(tl.load(A_log_ptr + hv).to(tl.float32)) * tl.sigmoid(x)
    return da, tl.sum(dg * g2 * 0.6931471805599453), tl.sum(da)


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _gradients_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, HV]
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    cu_ptr,  # [N + 1] int32 | int64, or None
    f_ptr,  # [rows, HV, 4, C] fp32
    do_ptr,  # [B, T, HV, V]
    vt_ptr,  # [B, T, HV, V]
    dv_ptr,  # [B, T, HV, V]
    h_ptr,  # [rows, HV, K, V]
    dh_ptr,  # [rows, HV, K, V]
    dq_ptr,  # [B, T, H, K]
    dk_ptr,  # [B, T, H, K]
    dg_ptr,  # [B, T, HV]
    dbeta_ptr,  # [B, T, HV]
    gate_ptr,  # [2, rows, HV] fp32, or None: the chunk's share of dA_log and ddt_bias
    q_strides,  # of B, T, H
    k_strides,
    g_strides,  # of B, T, HV
    beta_strides,
    do_strides,
    T,
    N,
    NT,  # ceil(T / C), equal length
    scale,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    BETA_MAX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """All gradients but dV of one chunk and the R value heads of one key head."""
    HV: tl.constexpr = H * R
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(0) // H
    h = (tl.program_id(0) % H).to(tl.int64)
    n, c, start, length = locate_chunk(row, cu_ptr, T, N, NT, cu_ptr is not None)
    if c * 64 >= length:
        if gate_ptr is not None:
            for r in range(R):  # a row that no chunk uses adds nothing
                unit = row.to(tl.int64) * HV + h * R + r
                tl.store(gate_ptr + unit, 0.0)
                tl.store(gate_ptr + tl.num_programs(0) // H * HV + unit, 0.0)
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    d = tl.arange(0, BLOCK_K)
    tok = start + c * 64 + t  # [C] int64
    ok = c * 64 + t < length
    in_k = ok[:, None] & (d < K)[None, :]
    q_at = q_ptr + b * q_strides[0] + h * q_strides[2]
    k_at = k_ptr + b * k_strides[0] + h * k_strides[2]
    q = _tile(q_at, tok, q_strides[1], d, in_k)  # [C, K]
    k = _tile(k_at, tok, k_strides[1], d, in_k)  # [C, K]
    rq = tl.full((64,), 1.0, tl.float32)
    rk = tl.full((64,), 1.0, tl.float32)
    if L2NORM:
        rq = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + 1e-6)
        rk = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + 1e-6)
    kk = tl.dot(k, tl.trans(k), input_precision=PREC) * rk[:, None] * rk[None, :]
    qk = tl.dot(q, tl.trans(k), input_precision=PREC) * (scale * rq)[:, None] * rk[None, :]

    dq = tl.zeros((64, BLOCK_K), tl.float32)  # times rq: of the raw q, before the norm's own part
    dk = tl.zeros((64, BLOCK_K), tl.float32)
    dp = tl.zeros((64, 64), tl.float32)  # of the group's heads, without scale
    dp_t = tl.zeros((64, 64), tl.float32)  # its transpose
    dn = tl.zeros((64, 64), tl.float32)  # N + N^T
    # of one head, summed over its columns: dG of rows, of columns, of the chunk's end; dV . vt
    by_row = tl.zeros((64,), tl.float32)
    by_col = tl.zeros((64,), tl.float32)
    by_end = 0.0
    dots = tl.zeros((64,), tl.float32)
    for step in tl.range(0, R * NV, num_stages=STAGES):
        hv = h * R + step // NV
        e = (step % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
        unit = row.to(tl.int64) * HV + hv
        in_v = ok[:, None] & (e < V)[None, :]
        made = (b * T * HV + hv) * V
        do_at = do_ptr + b * do_strides[0] + hv * do_strides[2]
        do = _tile(do_at, tok, do_strides[1], e, in_v)  # [C, BLOCK_V]
        vt = _tile(vt_ptr + made, tok, HV * V, e, in_v)  # [C, BLOCK_V]
        dv = _tile(dv_ptr + made, tok, HV * V, e, in_v)  # [C, BLOCK_V]
        in_state = (d < K)[:, None] & (e < V)[None, :]
        at = unit * (K * V) + d[:, None] * V + e[None, :]
        s = tl.load(h_ptr + at, mask=in_state, other=0.0)  # [K, BLOCK_V]
        ds = tl.load(dh_ptr + at, mask=in_state, other=0.0)  # [K, BLOCK_V]
        f_at = f_ptr + unit * 256
        f0 = tl.load(f_at + t)  # [C] fp32
        f1 = tl.load(f_at + 64 + t)
        f2 = tl.load(f_at + 128 + t)
        raw = tl.load(
            g_ptr + b * g_strides[0] + tok * g_strides[1] + hv * g_strides[2], mask=ok, other=0.0
        )  # [C]
        g2 = log2_decay(raw.to(tl.float32), A_log_ptr, dt_bias_ptr, hv)
        g2 = tl.where(ok, g2, 0.0)
        G = tl.cumsum(g2, axis=0)  # [C] fp32, log2
        span = G[:, None] - G[None, :]
        gam = tl.exp2(tl.where(i >= j, span, -span))  # [C, C] fp32, both triangles

        # Within the chunk: pairs of tokens.
        own = tl.where(i >= j, tl.dot(do, tl.trans(vt), input_precision=PREC) * gam, 0.0)
        dp += own
        pairs = own * qk
        own = tl.dot(vt, tl.trans(do), input_precision=PREC)
        dp_t += tl.where(i <= j, own * gam, 0.0)
        own = tl.dot(dv, tl.trans(vt), input_precision=PREC)
        dots += tl.sum(tl.where(i == j, own, 0.0), 1)
        own = tl.where(i > j, -own * gam, 0.0)
        pairs = tl.where(i > j, pairs + own * kk, 0.0)
        dn += own
        own = tl.dot(vt, tl.trans(dv), input_precision=PREC)
        dn += tl.where(i < j, -own * gam, 0.0)
        from_rows = tl.sum(pairs, 1)
        from_cols = tl.sum(pairs, 0)

        # Across chunks: through the states.
        wide = f2[:, None] * tl.dot(do, tl.trans(s), input_precision=PREC)  # [C, K] fp32
        dq += wide
        from_rows += tl.sum(wide * q.to(tl.float32), 1)
        wide = f0[:, None] * tl.dot(dv, tl.trans(s), input_precision=PREC)
        dk -= wide
        from_rows -= tl.sum(wide * k.to(tl.float32), 1)
        wide = f1[:, None] * tl.dot(vt, tl.trans(ds), input_precision=PREC)
        dk += wide
        to_end = tl.sum(wide * k.to(tl.float32), 1)
        by_row += from_rows - from_cols
        by_col += to_end
        by_end += tl.sum(s.to(tl.float32) * ds.to(tl.float32))

        if step % NV == NV - 1:
            # dg_u = sum of by_row over i >= u and of by_col over i < u, and gam_C <S, dS>
            later = tl.sum(tl.where(i >= j, by_row[:, None], 0.0), 0)  # [C]
            sooner = tl.sum(tl.where(i < j, by_col[:, None], 0.0), 0)  # [C]
            dg = later + sooner + tl.load(f_at + 192) * by_end
            raw_at = g_ptr + b * g_strides[0] + tok * g_strides[1] + hv * g_strides[2]
            at_gate = (b * T + tok) * HV + hv
            if A_log_ptr is not None:
                raw = tl.load(raw_at, mask=ok, other=0.0)
                g2 = log2_decay(raw.to(tl.float32), A_log_ptr, dt_bias_ptr, hv)
                dg = tl.where(ok, dg, 0.0)
                dg, dA, ddt = _gate_gradient(dg, raw, g2, A_log_ptr, dt_bias_ptr, hv)
                tl.store(gate_ptr + unit, dA)
                tl.store(gate_ptr + tl.num_programs(0) // H * HV + unit, ddt)
            tl.store(dg_ptr + at_gate, dg.to(dg_ptr.dtype.element_ty), mask=ok)
            beta_at = beta_ptr + b * beta_strides[0] + tok * beta_strides[1] + hv * beta_strides[2]
            beta = tl.load(beta_at, mask=ok, other=1.0).to(tl.float32)
            slope = tl.full((64,), 1.0, tl.float32)
            if SIGMOID:
                slope = BETA_MAX * tl.sigmoid(beta) * tl.sigmoid(-beta)
                beta = BETA_MAX * tl.sigmoid(beta)
            dbeta = dots / beta / beta * slope  # beta near 0: gdn_backward_beta.py writes it
            tl.store(dbeta_ptr + at_gate, dbeta.to(dbeta_ptr.dtype.element_ty), mask=ok)
            by_row = tl.zeros((64,), tl.float32)
            by_col = tl.zeros((64,), tl.float32)
            dots = tl.zeros((64,), tl.float32)
            by_end = 0.0

    dp = (dp * (scale * rq)[:, None] * rk[None, :]).to(k.dtype)
    dq = tl.dot(dp, k, dq, input_precision=PREC)
    dp_t = (dp_t * (scale * rk)[:, None] * rq[None, :]).to(k.dtype)
    dk = tl.dot(dp_t, q, dk, input_precision=PREC)
    dn = (dn * rk[:, None] * rk[None, :]).to(k.dtype)
    dk = tl.dot(dn, k, dk, input_precision=PREC)
    if L2NORM:
        dq -= q.to(tl.float32) * (rq * rq * tl.sum(dq * q.to(tl.float32), 1))[:, None]
        dk -= k.to(tl.float32) * (rk * rk * tl.sum(dk * k.to(tl.float32), 1))[:, None]
    at = ((b * T + tok) * H + h)[:, None] * K + d[None, :]
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=in_k)
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=in_k)


def gdn_backward_gradients(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, f, do, vt, dv, h, dh, scale, use_qk_l2norm,
    use_beta_sigmoid, allow_neg_eigval, config,
):  # fmt: skip
    """dq, dk, dg (of the raw gate with A_log), dbeta, and dA_log, ddt_bias [HV] or None."""
    B, T, H, K = q.shape
    HV, V = do.shape[2:]
    rows = h.shape[0]
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    dg, dbeta = g.new_empty(g.shape), beta.new_empty(beta.shape)
    gate = None if A_log is None else f.new_empty(2, rows, HV)
    if rows * HV > 0:
        _gradients_bwd_kernel[(rows * H,)](
            q, k, g, beta, A_log, dt_bias, cu_seqlens, f, do, vt, dv, h, dh, dq, dk, dg, dbeta,
            gate,
            q.stride()[:3], k.stride()[:3], g.stride(), beta.stride(), do.stride()[:3],
            T, 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, -(-T // 64), scale,
            H=H, R=HV // H, K=K, V=V,
            L2NORM=use_qk_l2norm,
            SIGMOID=use_beta_sigmoid,
            BETA_MAX=2.0 if allow_neg_eigval else 1.0,
            BLOCK_K=triton.next_power_of_2(max(K, 16)),
            PREC="tf32x3" if q.dtype == torch.float32 else "tf32",
            **config,
        )  # fmt: skip
    dA_log, ddt_bias = (None, None) if gate is None else gate.sum(1)
    return dq, dk, dg, dbeta, dA_log, ddt_bias
