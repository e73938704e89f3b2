"""The chunk-parallel half of Kimi Delta Attention (docs/kda.md).

Per chunk of C = 64 tokens and value head, with q and k normalised if asked, q scaled, and
G = cumsum(g):

    A_ij = sum_d k_id k_jd exp(G_id - G_jd), i > j      Tb = (I + diag(beta) A)^-1 diag(beta)
    P_ij = sum_d q_id k_jd exp(G_id - G_jd), i >= j     Kd, Qd = exp(G) K, exp(G) Q
    Ke = exp(G_C - G) K                                 gam = exp(G_C)

Three launches: the scan's operands, with norms and gates; A and P (levels.py); the inverse.

Sizes: B T H HV K V; N sequences; C chunk; R = HV / H; rows = chunk rows of the call.
"""

from typing import Union

import torch
import triton
import triton.language as tl

from ...gdn.chunks import CHUNK
from ...gdn.portable.gates import channel_log_decay, to_log2, write_strength
from ...gdn.portable.inverse import kept_blocks, store_inverse
from ...gdn.portable.primitives import chunk_numbers, locate, precision
from ...runtime.launch import Launch, steps
from ...runtime.primitives import exact_exp2
from ...runtime.sizes import next_power_of_2
from ...runtime.tuning import lookup
from ..call import KdaBackward, KdaCall
from .levels import pairs_kernel

UNITS = 4  # value heads of a program that are inverted at once: a warp each


@triton.jit
def _load_rows(ptr, stride, t, d, ok, K: tl.constexpr):
    """Columns d of a chunk's rows t of [C, K] fp32; zeros outside."""
    at = t[:, None] * stride + d[None, :]
    return tl.load(ptr + at, mask=ok[:, None] & (d < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store_lengths(
    q, k, beta, gates, q_stride, k_stride, beta_stride, ok, scale, LOW: tl.constexpr,
    K: tl.constexpr, L2NORM: tl.constexpr, BETA_MAX: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """1 / |k|, scale / |q| [C] where there is a token. 1 / |k|, 1 / |q| and beta are rows 0, 1, 3
    of gates: the scale would take fp16 beyond its range."""
    t = tl.arange(0, 64)
    rk = tl.where(ok, 1.0, 0.0)
    rq = rk
    if L2NORM:
        k2 = tl.zeros((64,), tl.float32)
        q2 = tl.zeros((64,), tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
            d = k0 + tl.arange(0, BLOCK_K)
            y = _load_rows(k, k_stride, t, d, ok, K)
            k2 += tl.sum(y * y, axis=1)
            y = _load_rows(q, q_stride, t, d, ok, K)
            q2 += tl.sum(y * y, axis=1)
        rk *= tl.rsqrt(k2 + 1e-6)
        rq *= tl.rsqrt(q2 + 1e-6)
    b = write_strength(tl.load(beta + t * beta_stride, mask=ok, other=0.0), BETA_MAX)
    b = tl.where(ok, b, 0.0)
    if LOW == tl.bfloat16:  # so that a token's write and what later ones take back of it agree
        b = b.to(LOW).to(tl.float32)
    tl.store(gates + t, rk)
    tl.store(gates + 64 + t, rq)
    tl.store(gates + 192 + t, b)
    return rk, rq * scale


@triton.jit
def _store_operands(
    q, k, g, A_log_ptr, dt_bias_ptr, kd, qd, ke, gam, work, rk, rq, q_stride, k_stride, g_stride,
    ok, hv, OUT: tl.constexpr, K: tl.constexpr, LOWER: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Kd, Qd, Ke and gam; where there is room for them in `work` [C, K], log2 of the decays."""
    t = tl.arange(0, 64)
    for k0 in tl.range(0, K, BLOCK_K, disable_licm=True):
        d = k0 + tl.arange(0, BLOCK_K)
        mask = ok[:, None] & (d < K)[None, :]
        x = tl.load(g + t[:, None] * g_stride + d[None, :], mask=mask, other=0.0)
        at = hv * K + d[None, :]
        x = channel_log_decay(x, A_log_ptr, dt_bias_ptr, hv, at, (d < K)[None, :], LOWER)
        x = tl.where(mask, to_log2(x), 0.0)  # [C, BLOCK_K] fp32
        if work is not None:
            tl.store(work + t[:, None] * K + d[None, :], x, mask=(d < K)[None, :])
        kn = _load_rows(k, k_stride, t, d, ok, K) * rk[:, None]
        qn = _load_rows(q, q_stride, t, d, ok, K) * rq[:, None]
        out = t[:, None] * OUT + d[None, :]
        e = tl.exp2(tl.cumsum(x, axis=0))
        tl.store(kd + out, (kn * e).to(kd.dtype.element_ty), mask=mask)
        tl.store(qd + out, (qn * e).to(kd.dtype.element_ty), mask=mask)
        # the decay still to come is a sum of its own: G_C - G has the rounding errors of both
        e = tl.exp2(tl.cumsum(x, axis=0, reverse=True) - x)
        tl.store(ke + out, (kn * e).to(kd.dtype.element_ty), mask=mask)
        end = exact_exp2(tl.sum(x.to(tl.float64), axis=0))
        tl.store(gam + d, end, mask=d < K)


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _operands_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, HV, K], heads side by side
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV, K] or None
    cu_ptr,  # [N + 1] int32 | int64 or None
    p_ptr,  # [rows, HV, C, C]: zeros above the diagonal blocks
    kd_ptr,  # [B, T, HV, K]
    qd_ptr,  # [B, T, HV, K]
    ke_ptr,  # [B, T, HV, K]
    gam_ptr,  # [rows, HV, K] fp32
    gates_ptr,  # [rows, HV, GATES, C] fp32, scratch
    work_ptr,  # [rows, HV, C, K] fp32, scratch: log2 of decays whose gates are raw; or None
    q_strides,  # of B, T, H
    k_strides,
    g_strides,  # of B, T, HV
    beta_strides,
    T, N,
    NT,  # ceil(T / C), equal length
    scale,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L2NORM: tl.constexpr,
    BETA_MAX: tl.constexpr,  # beta is a logit, and BETA_MAX * sigmoid(beta) is meant; 0: as given
    LOWER: tl.constexpr,  # of a bounded gate, or None
    GATES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Stores the operands of one chunk and value head, and factors of k, q and beta."""
    HV: tl.constexpr = H * R
    hv = tl.program_id(0) % HV
    row = tl.program_id(0) // HV
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0  # packed: a batch of one
    tok = start + c * 64  # first token, int64; offsets inside a chunk are 32-bit
    t = tl.arange(0, 64)
    ok = t < length - c * 64
    q_ptr += b * q_strides[0] + tok * q_strides[1] + (hv // R) * q_strides[2]
    k_ptr += b * k_strides[0] + tok * k_strides[1] + (hv // R) * k_strides[2]
    g_ptr += b * g_strides[0] + tok * g_strides[1] + hv * K
    beta_ptr += b * beta_strides[0] + tok * beta_strides[1] + hv * beta_strides[2]
    unit = row.to(tl.int64) * HV + hv
    work = None if work_ptr is None else work_ptr + unit * (64 * K)
    out = ((b * T + tok) * HV + hv) * K
    rk, rq = _store_lengths(
        q_ptr, k_ptr, beta_ptr, gates_ptr + unit * (64 * GATES), q_strides[1], k_strides[1],
        beta_strides[1], ok, scale, kd_ptr.dtype.element_ty, K, L2NORM, BETA_MAX, BLOCK_K,
    )  # fmt: skip
    _store_operands(
        q_ptr, k_ptr, g_ptr, A_log_ptr, dt_bias_ptr, kd_ptr + out, qd_ptr + out, ke_ptr + out,
        gam_ptr + unit * K, work, rk, rq, q_strides[1], k_strides[1], g_strides[1], ok, hv, HV * K,
        K, LOWER, BLOCK_K,
    )  # fmt: skip
    zero = tl.zeros((64, 64), p_ptr.dtype.element_ty)
    r, c = t[:, None], t[None, :]
    tl.store(p_ptr + unit * 4096 + r * 64 + c, zero, mask=r // 16 < c // 16)


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _inverse_kernel(
    cu_ptr,  # [N + 1] int32 | int64 or None
    kept_ptr,  # [rows, HV, C, C]: -A in fp16, which may be where Tb is; None if GATES is not 4
    tb_ptr,  # [rows, HV, C, C], written
    gates_ptr,  # [rows, HV, GATES, C] fp32: beta in row 3, -A from row 4 on if there are more
    T, N, NT,
    HV: tl.constexpr, UNITS: tl.constexpr, GATES: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Tb of a chunk and up to UNITS value heads, a warp each."""
    PARTS: tl.constexpr = (HV + UNITS - 1) // UNITS
    row = tl.program_id(0) // PARTS
    first = tl.program_id(0) % PARTS * UNITS
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        return
    # warps left over repeat the last unit
    u = row.to(tl.int64) * HV + tl.minimum(first + tl.arange(0, UNITS), HV - 1)
    tb = tb_ptr + u[None, :, None] * 4096
    gates = gates_ptr + u * (64 * GATES)
    if GATES > 4:
        m = (gates[None, :, None] + 256,)
    else:
        m = kept_blocks(kept_ptr + u[None, :, None] * 4096)
        tl.debug_barrier()  # Tb may overwrite it
    store_inverse(tb, gates, m, True, DOT, PREC, True)


def launched_with(config: dict) -> tuple:
    """Options of a launch; AMD's compiler knows no bound on registers."""
    known = ("num_warps", "num_stages") + (() if torch.version.hip is not None else ("maxnreg",))
    return tuple((name, value) for name, value in config.items() if name in known)


class Prepare:
    """The kernels above for calls of one kind: shapes, strides, dtypes and options are known."""

    __slots__ = ("operands", "pairs", "inverse", "rows", "shape", "scratch", "works", "keep")

    def __init__(self, call: Union[KdaCall, KdaBackward], keep: bool = False):
        """keep: for the gradient."""
        q, H, K, HV, options = call.q, call.H, call.K, call.HV, call.options
        wide, self.keep = q.dtype == torch.float32, keep
        self.rows, self.shape = call.rows, (call.B, call.T, HV, K)
        # with unit keys nothing of A and P exceeds 1 and nothing of the inverse 2, and fp16 has
        # the mantissa of tf32 at twice its rate
        narrow = options.use_qk_l2norm and not wide
        self.scratch = 4 if narrow else 4 + CHUNK
        self.works = call.A_log is not None or options.lower_bound is not None
        dot = (tl.float16 if narrow else tl.float32, precision(torch.float32 if wide else q.dtype))
        config = lookup("portable_kda_prepare_wide" if wide else "portable_kda_prepare", q.device)
        widest = next_power_of_2(max(K, 16))
        (in_operands, operands), (in_pairs, pairs) = (
            (min(widest, config[name]["BLOCK"]), launched_with(config[name]))
            for name in ("operands", "pairs")
        )
        stages = config["pairs"]["num_stages"]
        numbers, heads = chunk_numbers(call), (H, HV // H, K)
        strides = tuple(map(steps, (q, call.k, call.g, call.beta)))
        self.operands = Launch(
            _operands_kernel, self.rows * HV, q.device,
            numbers=(*strides, *numbers, options.scale),
            constexprs=(
                *heads, options.use_qk_l2norm, options.beta_max, options.lower_bound, self.scratch,
                in_operands,
            ),
            options=operands,
        )  # fmt: skip
        step = 4096 if narrow else 64 * self.scratch
        self.pairs = Launch(
            pairs_kernel, self.rows * HV * 7, q.device,
            numbers=(*strides[:3], *numbers, options.scale),
            constexprs=(*heads, self.works, self.scratch, step, in_pairs, stages, *dot),
            options=pairs,
        )  # fmt: skip
        self.inverse = Launch(
            _inverse_kernel, self.rows * -(-HV // UNITS), q.device, numbers=numbers,
            constexprs=(HV, UNITS, self.scratch, *dot),
            options=(("num_warps", UNITS), ("num_stages", 1)),
        )  # fmt: skip

    def __call__(self, q, k, g, beta, A_log, dt_bias, cu_seqlens) -> tuple:
        """Tb, P [rows, HV, C, C]; Kd, Qd, Ke [B, T, HV, K]; gam [rows, HV, K] fp32; and what is
        scratch but for the gradient: [rows, HV, .., C] fp32, of which the first two rows are
        factors of k and q and the third is free; and -A, which with `keep` outlives Tb."""
        rows, (*_, HV, K) = self.rows, self.shape
        tb = q.new_empty((rows, HV, CHUNK, CHUNK))
        p = torch.empty_like(tb)
        kd, qd, ke = q.new_empty((3, *self.shape)).unbind(0)
        gam = q.new_empty((rows, HV, K), dtype=torch.float32)
        # scratch, apart: free again for o
        gates = gam.new_empty((rows, HV, self.scratch, CHUNK))
        work = gam.new_empty((rows, HV, CHUNK, K)) if self.works else None
        self.operands(q, k, g, beta, A_log, dt_bias, cu_seqlens, p, kd, qd, ke, gam, gates, work)
        if self.scratch > 4:
            kept, narrow = gates[:, :, 4:], None
        else:  # -A lies where Tb will, if it may
            kept = narrow = (
                tb.new_empty(tb.shape, dtype=torch.float16) if self.keep else tb.view(torch.float16)
            )
        self.pairs(q, k, g if work is None else work, cu_seqlens, p, kept, gates)
        self.inverse(cu_seqlens, narrow, tb, gates)
        return tb, p, kd, qd, ke, gam, gates, kept
