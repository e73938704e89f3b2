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

from ..common.gdn_prepare import locate, log2_decay


@triton.jit
def _tile(ptr, tok, stride, d, mask):
    """Rows `tok` and columns `d` of a matrix of dense rows, in its own dtype; zeros outside."""
    return tl.load(ptr + tok[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def _decays(g_ptr, tok_stride, tok, ok, A_log_ptr, dt_bias_ptr, hv):
    """Gam [C, C] fp32, in both triangles, of one head whose gates are at g_ptr."""
    t = tl.arange(0, 64)
    g2 = tl.load(g_ptr + tok * tok_stride, mask=ok, other=0.0).to(tl.float32)  # [C]
    g2 = tl.where(ok, log2_decay(g2, A_log_ptr, dt_bias_ptr, hv, True), 0.0)
    G = tl.cumsum(g2, axis=0)  # [C] fp32
    span = G[:, None] - G[None, :]
    return tl.exp2(tl.where(t[:, None] >= t[None, :], span, -span))


@triton.jit
def _query_side(
    q, k, rq, rk, heads, tok, ok, h, do_ptr, vt_ptr, s_ptr, f_ptr, g_ptr, A_log_ptr,
    dt_bias_ptr, do_strides, g_strides, scale,
    R: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradient of rq^-1 q [C, K] and dG by rows [heads, C], from P and from the state read."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    d = tl.arange(0, BLOCK_K)
    qk = tl.dot(q, tl.trans(k), input_precision=PREC)  # [C, C] fp32
    qk = tl.where(i > j, qk * (scale * rq)[:, None] * rk[None, :], 0.0)
    dq = tl.zeros((64, BLOCK_K), tl.float32)
    dp = tl.zeros((64, 64), tl.float32)  # summed over the group, without scale
    rows = (heads * t[None, :]).to(tl.float32) * 0.0  # [HEADS, C]
    for step in tl.range(0, R * NV, num_stages=STAGES):
        r = step // NV
        e = (step % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = ok[:, None] & (e < V)[None, :]
        do = _tile(do_ptr + r * do_strides[2], tok, do_strides[1], e, in_v)  # [C, BLOCK_V]
        vt = _tile(vt_ptr + r * V, tok, HV * V, e, in_v)  # [C, BLOCK_V]
        in_state = (d < K)[:, None] & (e < V)[None, :]
        s_at = s_ptr + r * (K * V) + d[:, None] * V + e[None, :]
        s = tl.load(s_at, mask=in_state, other=0.0)  # [K, BLOCK_V]
        f2 = tl.load(f_ptr + r * 256 + 128 + t)  # [C] fp32
        gam = _decays(
            g_ptr + r * g_strides[2], g_strides[1], tok, ok, A_log_ptr, dt_bias_ptr, h + r
        )
        gam = tl.where(i >= j, gam, 0.0)
        gam *= tl.dot(do, tl.trans(vt), input_precision=PREC)  # [C, C] fp32
        dp += gam
        gam *= qk
        wide = f2[:, None] * tl.dot(do, tl.trans(s), input_precision=PREC)  # [C, K] fp32
        dq += wide
        x = tl.sum(gam, 1) - tl.sum(gam, 0) + tl.sum(wide * q.to(tl.float32), 1)  # [C]
        rows += tl.where(heads == r, x[None, :], 0.0)
    dp = (dp * (scale * rq)[:, None] * rk[None, :]).to(k.dtype)
    return tl.dot(dp, k, dq, input_precision=PREC), rows


@triton.jit
def _key_side(
    q, k, rq, rk, heads, tok, ok, h, do_ptr, vt_ptr, dv_ptr, s_ptr, ds_ptr, f_ptr, g_ptr,
    A_log_ptr, dt_bias_ptr, do_strides, g_strides, scale, rows,
    R: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradient of k [C, K] before its norm's; and by head [heads, C]: dG of rows, of columns
    and of the chunk's end, and dV . vt."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    d = tl.arange(0, BLOCK_K)
    kk = tl.dot(k, tl.trans(k), input_precision=PREC)  # [C, C] fp32
    kk = kk * rk[:, None] * rk[None, :]
    dk = tl.zeros((64, BLOCK_K), tl.float32)
    dp = tl.zeros((64, 64), tl.float32)  # dP^T summed over the group, without scale
    dn = tl.zeros((64, 64), tl.float32)  # N + N^T summed over the group
    cols = tl.zeros_like(rows)
    ends = tl.zeros_like(rows)
    dots = tl.zeros_like(rows)
    for step in tl.range(0, R * NV, num_stages=STAGES):
        r = step // NV
        e = (step % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = ok[:, None] & (e < V)[None, :]
        do = _tile(do_ptr + r * do_strides[2], tok, do_strides[1], e, in_v)  # [C, BLOCK_V]
        vt = _tile(vt_ptr + r * V, tok, HV * V, e, in_v)  # [C, BLOCK_V]
        dv = _tile(dv_ptr + r * V, tok, HV * V, e, in_v)  # [C, BLOCK_V]
        in_state = (d < K)[:, None] & (e < V)[None, :]
        at = r * (K * V) + d[:, None] * V + e[None, :]
        s = tl.load(s_ptr + at, mask=in_state, other=0.0)  # [K, BLOCK_V]
        ds = tl.load(ds_ptr + at, mask=in_state, other=0.0)  # [K, BLOCK_V]
        mine = heads == r
        ends += tl.where(mine, tl.sum(s.to(tl.float32) * ds.to(tl.float32)), 0.0)
        f0 = tl.load(f_ptr + r * 256 + t)  # [C] fp32
        f1 = tl.load(f_ptr + r * 256 + 64 + t)
        gam = _decays(
            g_ptr + r * g_strides[2], g_strides[1], tok, ok, A_log_ptr, dt_bias_ptr, h + r
        )

        own = tl.dot(vt, tl.trans(do), input_precision=PREC)  # [C, C] fp32
        dp += tl.where(i <= j, own * gam, 0.0)
        own = tl.dot(vt, tl.trans(dv), input_precision=PREC)
        dn -= tl.where(i < j, own * gam, 0.0)
        own = tl.dot(dv, tl.trans(vt), input_precision=PREC)
        dot = tl.sum(tl.where(i == j, own, 0.0), 1)  # [C]
        own = tl.where(i > j, own * gam, 0.0)
        dn -= own
        own *= kk
        row = tl.sum(own, 0) - tl.sum(own, 1)  # [C]
        wide = f0[:, None] * tl.dot(dv, tl.trans(s), input_precision=PREC)  # [C, K] fp32
        dk -= wide
        row -= tl.sum(wide * k.to(tl.float32), 1)
        wide = f1[:, None] * tl.dot(vt, tl.trans(ds), input_precision=PREC)
        dk += wide
        col = tl.sum(wide * k.to(tl.float32), 1)
        rows += tl.where(mine, row[None, :], 0.0)
        cols += tl.where(mine, col[None, :], 0.0)
        dots += tl.where(mine, dot[None, :], 0.0)
    dp = (dp * (scale * rk)[:, None] * rq[None, :]).to(k.dtype)
    dk = tl.dot(dp, q, dk, input_precision=PREC)
    dn = (dn * rk[:, None] * rk[None, :]).to(k.dtype)
    return tl.dot(dn, k, dk, input_precision=PREC), rows, cols, ends, dots


@triton.jit
def _gate_gradient(dg, g, A_log_ptr, dt_bias_ptr, hv):
    """da [C] and the sums of dA_log and ddt_bias, from dg [C] and the raw gates g [C]."""
    g2 = log2_decay(g, A_log_ptr, dt_bias_ptr, hv, True)
    if dt_bias_ptr is not None:
        g += tl.load(dt_bias_ptr + hv).to(tl.float32)
    da = dg * -tl.exp(tl.load(A_log_ptr + hv).to(tl.float32)) * tl.sigmoid(g)
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
    HEADS: tl.constexpr,  # R or the next power of two
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
    row = tl.program_id(0) // H
    h = (tl.program_id(0) % H).to(tl.int64)
    hv = h * R
    unit = row.to(tl.int64) * HV + hv
    other_gate = tl.num_programs(0).to(tl.int64) * R
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        if gate_ptr is not None:
            for r in range(R):  # a row that no chunk uses adds nothing
                tl.store(gate_ptr + unit + r, 0.0)
                tl.store(gate_ptr + other_gate + unit + r, 0.0)
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0
    t = tl.arange(0, 64)
    d = tl.arange(0, BLOCK_K)
    heads = tl.arange(0, HEADS)[:, None]
    tok = start + c * 64 + t  # [C] int64
    ok = c * 64 + t < length
    in_k = ok[:, None] & (d < K)[None, :]
    q = _tile(q_ptr + b * q_strides[0] + h * q_strides[2], tok, q_strides[1], d, in_k)  # [C, K]
    k = _tile(k_ptr + b * k_strides[0] + h * k_strides[2], tok, k_strides[1], d, in_k)  # [C, K]
    rq = tl.full((64,), 1.0, tl.float32)
    rk = tl.full((64,), 1.0, tl.float32)
    if L2NORM:
        rq = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + 1e-6)
        rk = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + 1e-6)
    do_ptr += b * do_strides[0] + hv * do_strides[2]
    g_ptr += b * g_strides[0] + hv * g_strides[2]
    beta_ptr += b * beta_strides[0] + hv * beta_strides[2]
    made = (b * T * HV + hv) * V
    f_ptr += unit * 256
    h_ptr += unit * (K * V)
    dh_ptr += unit * (K * V)

    dq, rows = _query_side(
        q, k, rq, rk, heads, tok, ok, hv, do_ptr, vt_ptr + made, h_ptr, f_ptr, g_ptr, A_log_ptr,
        dt_bias_ptr, do_strides, g_strides, scale, R, HV, K, V, BLOCK_K, BLOCK_V, STAGES, PREC,
    )  # fmt: skip
    if L2NORM:
        dq -= q.to(tl.float32) * (rq * rq * tl.sum(dq * q.to(tl.float32), 1))[:, None]
    at = ((b * T + tok) * H + h)[:, None] * K + d[None, :]
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=in_k)

    dk, rows, cols, ends, dots = _key_side(
        q, k, rq, rk, heads, tok, ok, hv, do_ptr, vt_ptr + made, dv_ptr + made, h_ptr, dh_ptr,
        f_ptr, g_ptr, A_log_ptr, dt_bias_ptr, do_strides, g_strides, scale, rows,
        R, HV, K, V, BLOCK_K, BLOCK_V, STAGES, PREC,
    )  # fmt: skip
    if L2NORM:
        dk -= k.to(tl.float32) * (rk * rk * tl.sum(dk * k.to(tl.float32), 1))[:, None]
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=in_k)

    i = t[:, None]
    j = t[None, :]
    for r in range(R):
        # dg_u = sum of dG by rows over i >= u and by columns over i < u, and gam_C <S, dS>
        by_row = tl.sum(tl.where(heads == r, rows, 0.0), 0)  # [C]
        by_col = tl.sum(tl.where(heads == r, cols, 0.0), 0)
        by_end = tl.sum(tl.where(heads == r, ends, 0.0), 0)
        dg = tl.sum(tl.where(i >= j, by_row[:, None], 0.0), 0)
        dg += tl.sum(tl.where(i < j, by_col[:, None], 0.0), 0)
        dg = tl.where(ok, dg + by_end * tl.load(f_ptr + r * 256 + 192), 0.0)
        if A_log_ptr is not None:
            g_at = g_ptr + tok * g_strides[1] + r * g_strides[2]
            g = tl.load(g_at, mask=ok, other=0.0).to(tl.float32)
            dg, dA_log, ddt_bias = _gate_gradient(dg, g, A_log_ptr, dt_bias_ptr, hv + r)
            tl.store(gate_ptr + unit + r, dA_log)
            tl.store(gate_ptr + other_gate + unit + r, ddt_bias)
        out = (b * T + tok) * HV + hv + r
        tl.store(dg_ptr + out, dg.to(dg_ptr.dtype.element_ty), mask=ok)
        beta_at = beta_ptr + tok * beta_strides[1] + r * beta_strides[2]
        beta = tl.load(beta_at, mask=ok, other=1.0).to(tl.float32)
        slope = tl.full((64,), 1.0, tl.float32)
        if SIGMOID:
            slope = BETA_MAX * tl.sigmoid(beta) * tl.sigmoid(-beta)
            beta = BETA_MAX * tl.sigmoid(beta)
        # where beta is next to nothing, gdn_backward_beta.py writes over this
        dbeta = tl.sum(tl.where(heads == r, dots, 0.0), 0) / beta / beta * slope
        tl.store(dbeta_ptr + out, dbeta.to(dbeta_ptr.dtype.element_ty), mask=ok)


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
            H=H, R=HV // H, HEADS=triton.next_power_of_2(HV // H), K=K, V=V,
            L2NORM=use_qk_l2norm,
            SIGMOID=use_beta_sigmoid,
            BETA_MAX=2.0 if allow_neg_eigval else 1.0,
            BLOCK_K=triton.next_power_of_2(max(K, 16)),
            PREC="tf32x3" if q.dtype == torch.float32 else "tf32",
            **config,
        )  # fmt: skip
    dA_log, ddt_bias = (None, None) if gate is None else gate.sum(1)
    return dq, dk, dg, dbeta, dA_log, ddt_bias
