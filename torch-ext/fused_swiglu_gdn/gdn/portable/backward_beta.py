"""The gradient of beta if beta is too small to divide by, or a chunk has few tokens
(docs/gdn_backward.md).

    w = X - strict_lower(Gam K K^T) vt
    u = dvt - strict_upper(Gam^T K K^T) dV      dbeta = u . w

holds for every beta (of Kimi Delta Attention, kda/portable/backward.py, Gam K K^T is A, which its
prepare has kept); otherwise u = dV / beta and w = vt / beta give (dV . vt) / beta^2, which
backward_key.py computes at no cost. In that formula dV and vt are rounded once more than here,
which is negligible beside the error of many tokens, but not of a few. The programs of other chunks
end after one load.

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; R = HV / H; rows = chunk rows of the call.
K and V are powers of two.
"""

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ...runtime.sizes import next_power_of_2
from ..call import GdnCall
from .backward_query import tile
from .gates import write_strength
from .inverse import kept_at
from .primitives import chunk_numbers, locate, precision
from .state import times

FEW = 8  # tokens


@triton.jit
def _kept_products(kept_ptr, low):
    """A below the diagonal and its transpose above it, [C, C]."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    below = -tl.load(kept_ptr + kept_at(j, i), mask=i > j, other=0.0)
    above = -tl.load(kept_ptr + kept_at(i, j), mask=i < j, other=0.0)
    return below.to(low), above.to(low)


@triton.jit
def _products(
    k_ptr, cumulative_ptr, k_stride, tok, ok, low, K: tl.constexpr, NORM: tl.constexpr,
    BLOCK_K: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gam K K^T below the diagonal and its transpose above it, [C, C]."""
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    kk = tl.zeros((64, 64), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = tile(k_ptr, tok, k_stride, k0 + tl.arange(0, BLOCK_K), ok)  # [C, BLOCK_K]
        kk = tl.dot(k, tl.trans(k), kk, input_precision=PREC)
    if NORM:
        rk = tl.rsqrt(tl.sum(tl.where(i == j, kk, 0.0), 1) + 1e-6)
        kk *= rk[:, None] * rk[None, :]
    G = tl.load(cumulative_ptr + t)[:, None] - tl.load(cumulative_ptr + t)[None, :]
    kk *= tl.exp2(tl.minimum(tl.where(i >= j, G, -G), 100.0))
    return tl.where(i > j, kk, 0.0).to(low), tl.where(i < j, kk, 0.0).to(low)


@triton.jit
def _slow_dbeta(
    below, above, k_ptr, ke_ptr, v_ptr, p_ptr, f_ptr, do_ptr, vt_ptr, dv_ptr, h_ptr, dh_ptr,
    k_stride, v_stride, do_stride, vt_stride, tok, ok,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """u . w [C] fp32 of one chunk and value head."""
    t = tl.arange(0, 64)
    p = tl.load(p_ptr + t[None, :] * 64 + t[:, None])  # [C, C], transposed
    f0, f1 = None, None
    if ke_ptr is None:
        f0 = tl.load(f_ptr + t)  # [C] fp32
        f1 = tl.load(f_ptr + 64 + t)
    dbeta = tl.zeros((64,), tl.float32)
    for v0 in range(0, V, BLOCK_V):
        e = v0 + tl.arange(0, BLOCK_V)
        do = tile(do_ptr, tok, do_stride, e, ok)  # [C, BLOCK_V]
        vt = tile(vt_ptr, tok, vt_stride, e, ok)
        dv = tile(dv_ptr, tok, vt_stride, e, ok)
        w = tile(v_ptr, tok, v_stride, e, ok).to(tl.float32)
        w -= tl.dot(below, vt, input_precision=PREC)  # [C, BLOCK_V] fp32
        u = tl.dot(p, do, input_precision=PREC) - tl.dot(above, dv, input_precision=PREC)
        for k0 in range(0, K, BLOCK_K):
            d = k0 + tl.arange(0, BLOCK_K)
            k = tile(k_ptr, tok, k_stride, d, ok)  # [C, BLOCK_K]
            s = tl.load(h_ptr + d[:, None] * V + e[None, :])  # [BLOCK_K, BLOCK_V]
            ds = tl.load(dh_ptr + d[:, None] * V + e[None, :])
            ke = k if ke_ptr is None else tile(ke_ptr, tok, k_stride, d, ok)
            w -= times(tl.dot(k, s, input_precision=PREC), f0)
            u += times(tl.dot(ke, ds, input_precision=PREC), f1)
        dbeta += tl.sum(u * w, 1)
    return dbeta


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _beta_bwd_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    cu_ptr,  # [N + 1] int32 | int64, or None
    p_ptr,  # [rows, HV, C, C]
    f_ptr,  # [rows, HV, 4, C] fp32, or None with Ke
    cumulative_ptr,  # [rows, HV, C] fp32, or None with Ke
    kept_ptr,  # [rows, HV, STEP]: -A as keep_blocks of inverse.py has it; or None
    ke_ptr,  # [B, T, HV, K] like k; or None
    do_ptr,  # [B, T, HV, V]
    vt_ptr,  # [B, T, HV, V]
    dv_ptr,  # [B, T, HV, V]
    h_ptr,  # [rows, HV, K, V]
    dh_ptr,  # [rows, HV, K, V]
    dbeta_ptr,  # [B, T, HV]
    k_strides,  # of B, T, H
    v_strides,  # of B, T, HV
    beta_strides, do_strides,
    T, N,
    NT,  # ceil(T / C), equal length
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HEADS: tl.constexpr,  # HV or the next power of two
    STEP: tl.constexpr, NORM: tl.constexpr,
    BETA_MAX: tl.constexpr,  # 0: beta as given
    SMALL: tl.constexpr, FEW_TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """dbeta of a chunk's tokens with |beta| < SMALL in any value head, or of all if they are at
    most FEW."""
    HV: tl.constexpr = H * R
    row = tl.program_id(0)
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    b = n.to(tl.int64) if cu_ptr is None else start * 0
    t = tl.arange(0, 64)
    tok = start + c * 64 + t  # [C] int64
    ok = c * 64 + t < length
    heads = tl.arange(0, HEADS)
    at = tok[:, None] * beta_strides[1] + heads[None, :] * beta_strides[2]
    inside = ok[:, None] & (heads < HV)[None, :]
    beta = tl.load(beta_ptr + b * beta_strides[0] + at, mask=inside, other=1.0)
    beta = write_strength(beta, BETA_MAX)
    small = inside & ((tl.abs(beta) < SMALL) | (length - c * 64 < FEW_TOKENS))  # [C, HEADS]
    if tl.max(tl.max(small.to(tl.int32), 1), 0) == 0:
        return
    for head in range(HV):
        mine = tl.max((small & (heads == head)[None, :]).to(tl.int32), 1) > 0  # [C]
        if tl.max(mine.to(tl.int32), 0) > 0:
            hv = head + start * 0
            h = hv // R
            unit = row.to(tl.int64) * HV + hv
            low = do_ptr.dtype.element_ty
            k_at = k_ptr + b * k_strides[0] + h * k_strides[2]
            f_at = f_ptr
            ke_at = ke_ptr
            if ke_ptr is None:
                f_at += unit * 256
                below, above = _products(
                    k_at, cumulative_ptr + unit * 64, k_strides[1], tok, ok, low, K, NORM, BLOCK_K,
                    PREC,
                )  # fmt: skip
            else:
                ke_at += b * k_strides[0] + h * k_strides[2]
                below, above = _kept_products(kept_ptr + unit * STEP, low)
            dbeta = _slow_dbeta(
                below, above, k_at, ke_at, v_ptr + b * v_strides[0] + hv * v_strides[2],
                p_ptr + unit * 4096, f_at, do_ptr + b * do_strides[0] + hv * do_strides[2],
                vt_ptr + (b * T * HV + hv) * V, dv_ptr + (b * T * HV + hv) * V,
                h_ptr + unit * (K * V), dh_ptr + unit * (K * V),
                k_strides[1], v_strides[1], do_strides[1], HV * V, tok, ok, K, V, BLOCK_K, BLOCK_V,
                PREC,
            )  # fmt: skip
            if BETA_MAX > 0.0:
                beta_at = beta_ptr + b * beta_strides[0] + hv * beta_strides[2]
                x = tl.load(beta_at + tok * beta_strides[1], mask=ok, other=0.0).to(tl.float32)
                dbeta *= write_strength(x, BETA_MAX) * tl.sigmoid(-x)
            dbeta_at = dbeta_ptr + (b * T + tok) * HV + hv
            tl.store(dbeta_at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=mine)


def small_betas(call: GdnCall, do, config: dict, step: int = 0) -> Launch:
    """The launch of the kernel above for all calls with the same facts.

    It takes k (with ke, Kd of Kimi Delta Attention), v, beta, cu_seqlens, P, F, cumsum(g), what was
    kept and ke, both None in the gated delta rule, do, vt, dV, S, dS and dbeta, which it overwrites
    where rounding would lose too much of (dV . vt) / beta^2: where |beta| is small, or a chunk has
    few tokens.
    """
    k, v, K, HV = call.k, call.v, call.K, call.HV
    small = 2.0**-6 if k.dtype == torch.float16 else 1e-12
    sizes = (call.H, HV // call.H, K, call.V, next_power_of_2(HV), step)
    gates = (call.options.use_qk_l2norm, call.options.beta_max, small, FEW)
    block_k = config.get("BLOCK_K", 64)
    return Launch(
        _beta_bwd_kernel,
        call.rows if HV else 0,
        k.device,
        numbers=(*map(steps, (k, v, call.beta, do)), *chunk_numbers(call)),
        constexprs=(*sizes, *gates, min(K, block_k), config["BLOCK_V"], precision(k.dtype)),
        options=tuple(x for x in config.items() if x[0] in ("num_warps", "num_stages")),
        guarded=True,
    )
