"""The gradient of beta where beta is too small to divide by (docs/gdn_backward.md).

    w = X - strict_lower(Gam K K^T) vt      u = dvt - strict_upper(Gam^T K K^T) dV      dbeta = u . w

holds for every beta; elsewhere u = dV / beta and w = vt / beta give (dV . vt) / beta^2, which
gdn_backward_gradients.py has for nothing. A chunk without such a token ends after one load.

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; R = HV / H; rows = chunk rows of the call.
"""

import torch
import triton
import triton.language as tl

from ..common.gdn_prepare import locate, log2_decay


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _beta_bwd_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV]
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    cu_ptr,  # [N + 1] int32 | int64, or None
    p_ptr,  # [rows, HV, C, C]
    f_ptr,  # [rows, HV, 4, C] fp32
    do_ptr,  # [B, T, HV, V]
    vt_ptr,  # [B, T, HV, V]
    dv_ptr,  # [B, T, HV, V]
    h_ptr,  # [rows, HV, K, V]
    dh_ptr,  # [rows, HV, K, V]
    dbeta_ptr,  # [B, T, HV]
    k_strides,  # of B, T, H
    v_strides,  # of B, T, HV
    g_strides,
    beta_strides,
    do_strides,
    T,
    N,
    NT,  # ceil(T / C), equal length
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    BETA_MAX: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PREC: tl.constexpr,
):
    """dbeta of the tokens of one chunk and value head with |beta| < SMALL."""
    HV: tl.constexpr = H * R
    row = tl.program_id(0) // HV
    hv = (tl.program_id(0) % HV).to(tl.int64)
    h = hv // R
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    b = n.to(tl.int64) if cu_ptr is None else start * 0
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    tok = start + c * 64 + t  # [C] int64
    ok = c * 64 + t < length
    beta_at = beta_ptr + b * beta_strides[0] + tok * beta_strides[1] + hv * beta_strides[2]
    beta = tl.load(beta_at, mask=ok, other=1.0).to(tl.float32)  # [C]
    slope = tl.full((64,), 1.0, tl.float32)
    if SIGMOID:
        slope = BETA_MAX * tl.sigmoid(beta) * tl.sigmoid(-beta)
        beta = tl.where(ok, BETA_MAX * tl.sigmoid(beta), 1.0)
    small = tl.abs(beta) < SMALL
    if tl.max(small.to(tl.int32)) == 0:
        return

    d = tl.arange(0, BLOCK_K)
    in_k = ok[:, None] & (d < K)[None, :]
    k_at = k_ptr + b * k_strides[0] + tok[:, None] * k_strides[1] + h * k_strides[2] + d[None, :]
    k = tl.load(k_at, mask=in_k, other=0.0)  # [C, K]
    kk = tl.dot(k, tl.trans(k), input_precision=PREC)  # [C, C] fp32
    if L2NORM:
        rk = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + 1e-6)
        kk = kk * rk[:, None] * rk[None, :]
    g_at = g_ptr + b * g_strides[0] + tok * g_strides[1] + hv * g_strides[2]
    g2 = tl.load(g_at, mask=ok, other=0.0).to(tl.float32)
    g2 = log2_decay(g2, A_log_ptr, dt_bias_ptr, hv, True)
    G = tl.cumsum(tl.where(ok, g2, 0.0), axis=0)  # [C] fp32, log2
    span = G[:, None] - G[None, :]
    kk *= tl.exp2(tl.where(i >= j, span, -span))
    below = tl.where(i > j, kk, 0.0).to(k.dtype)  # [C, C]
    above = tl.where(i < j, kk, 0.0).to(k.dtype)
    unit = row.to(tl.int64) * HV + hv
    p = tl.load(p_ptr + unit * 4096 + i * 64 + j)  # [C, C]
    f0 = tl.load(f_ptr + unit * 256 + t)  # [C] fp32
    f1 = tl.load(f_ptr + unit * 256 + 64 + t)

    dbeta = tl.zeros((64,), tl.float32)
    for v0 in range(0, V, BLOCK_V):
        e = v0 + tl.arange(0, BLOCK_V)
        in_v = ok[:, None] & (e < V)[None, :]
        v_at = v_ptr + b * v_strides[0] + hv * v_strides[2]
        v = tl.load(v_at + tok[:, None] * v_strides[1] + e[None, :], mask=in_v, other=0.0)
        do_at = do_ptr + b * do_strides[0] + hv * do_strides[2]
        do = tl.load(do_at + tok[:, None] * do_strides[1] + e[None, :], mask=in_v, other=0.0)
        made = (((b * T + tok) * HV + hv) * V)[:, None] + e[None, :]
        vt = tl.load(vt_ptr + made, mask=in_v, other=0.0)  # [C, BLOCK_V]
        dv = tl.load(dv_ptr + made, mask=in_v, other=0.0)
        in_state = (d < K)[:, None] & (e < V)[None, :]
        at = unit * (K * V) + d[:, None] * V + e[None, :]
        s = tl.load(h_ptr + at, mask=in_state, other=0.0)  # [K, BLOCK_V]
        ds = tl.load(dh_ptr + at, mask=in_state, other=0.0)
        w = v.to(tl.float32) - f0[:, None] * tl.dot(k, s, input_precision=PREC)
        w -= tl.dot(below, vt, input_precision=PREC)  # [C, BLOCK_V] fp32
        u = f1[:, None] * tl.dot(k, ds, input_precision=PREC)
        u = tl.dot(tl.trans(p), do, u, input_precision=PREC)
        u -= tl.dot(above, dv, input_precision=PREC)
        dbeta += tl.sum(u * w, 1)
    dbeta_at = dbeta_ptr + (b * T + tok) * HV + hv
    tl.store(dbeta_at, (dbeta * slope).to(dbeta_ptr.dtype.element_ty), mask=ok & small)


def gdn_backward_beta(
    k, v, g, beta, A_log, dt_bias, cu_seqlens, p, f, do, vt, dv, h, dh, dbeta, use_qk_l2norm,
    use_beta_sigmoid, allow_neg_eigval, config,
):  # fmt: skip
    """Overwrites dbeta where |beta| is so small that (dV . vt) / beta^2 is lost to rounding."""
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    rows = h.shape[0]
    if rows * HV == 0:
        return
    _beta_bwd_kernel[(rows * HV,)](
        k, v, g, beta, A_log, dt_bias, cu_seqlens, p, f, do, vt, dv, h, dh, dbeta,
        k.stride()[:3], v.stride()[:3], g.stride(), beta.stride(), do.stride()[:3],
        T, 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, -(-T // 64),
        H=H, R=HV // H, K=K, V=V,
        L2NORM=use_qk_l2norm,
        SIGMOID=use_beta_sigmoid,
        BETA_MAX=2.0 if allow_neg_eigval else 1.0,
        SMALL=2.0**-6 if k.dtype == torch.float16 else 1e-12,
        BLOCK_K=triton.next_power_of_2(max(K, 16)),
        PREC="tf32x3" if k.dtype == torch.float32 else "tf32",
        **config,
    )  # fmt: skip
