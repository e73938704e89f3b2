"""The chunk-parallel half of the chunked gated delta rule (docs/gdn.md).

Per chunk of C = 64 tokens and value head, with q and k normalised if requested, G = cumsum(g) and
Gam_ij = exp(G_i - G_j) for i >= j:

    L  = strict_lower(beta_i Gam_ij k_i.k_j)      Tb = (I + L)^-1 diag(beta)
    P  = scale lower(Gam_ij q_i.k_j)              F  = row factors of the scan

Sizes: B T H HV K V; N sequences; C chunk; R = HV / H; rows = chunk rows of the call.
"""

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ...runtime.primitives import exact_exp2
from ...runtime.sizes import next_power_of_2
from ...runtime.tuning import lookup
from ..call import GdnCall
from ..chunks import CHUNK
from .gates import log2_decay, write_strength
from .inverse import keep_blocks, kept_blocks, minus_abs, store_inverse
from .primitives import chunk_numbers, locate, precision

UNITS = 4  # value heads of a program that are inverted at once: a warp each


@triton.jit
def _diagonal(x, i, j):
    return tl.sum(tl.where(i == j, x, 0.0), axis=1)


@triton.jit
def _product(x, y):
    return x * y


@triton.jit
def _store_factors(
    g_ptr,  # [C, heads]
    beta_ptr,  # [C, heads]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    f_ptr,  # [heads, 4, C] fp32
    gates_ptr,  # [heads, GATES, C] fp32: read again in the layouts of the [C, C] tiles
    decay_ptr,  # [heads] fp32
    g_strides,  # of B, T, HV
    beta_strides,
    ok,  # [C]
    hv0,
    k2,  # [C] fp32, |k|^2 as used
    rk,  # [C] fp32
    rq,  # [C] fp32, with the scale
    heads,
    UNITS: tl.constexpr, BETA_MAX: tl.constexpr, GATES: tl.constexpr,
    LOW: tl.constexpr,  # of Tb
):  # fmt: skip
    """Stores F, the gates and log2 of a bound of the norm of the chunk's transition, for all heads.

    Gates: G; exp2(-|G - G_r|) for r the last token before the middle of the token's half; the same
    for the chunk's middle; beta. The second or third make Gam_ij for tokens on two sides of an r.
    """
    i = tl.arange(0, 64)[:, None]
    r = tl.arange(0, UNITS)[None, :]
    has = r < heads
    mask = ok[:, None] & has
    g = tl.load(g_ptr + i * g_strides[1] + r * g_strides[2], mask=mask, other=0.0)
    g = log2_decay(g, A_log_ptr, dt_bias_ptr, hv0 + r, has)
    g = tl.where(mask, g, 0.0)  # [C, heads] fp32
    beta = tl.load(beta_ptr + i * beta_strides[1] + r * beta_strides[2], mask=mask, other=0.0)
    beta = tl.where(mask, write_strength(beta, BETA_MAX), 0.0)
    if LOW == tl.bfloat16:  # so that a token's write and what later ones take back of it agree
        beta = beta.to(LOW).to(tl.float32)
    G = tl.cumsum(g, axis=0)
    G_end = tl.sum(g.to(tl.float64), axis=0)[None, :]  # [1, heads]
    at = gates_ptr + r * (64 * GATES)
    all_has = tl.broadcast_to(has, (64, UNITS))
    tl.store(at + i, G, mask=all_has)
    tl.store(at + 192 + i, beta, mask=all_has)
    tl.debug_barrier()  # G_r of other threads
    quarter = tl.where(i < 32, tl.load(at + 15, mask=has), tl.load(at + 47, mask=has))
    tl.store(at + 64 + i, tl.exp2(minus_abs(G - quarter)), mask=all_has)
    tl.store(at + 128 + i, tl.exp2(minus_abs(G - tl.load(at + 31, mask=has))), mask=all_has)
    at = f_ptr + r * 256 + i
    tl.store(at, tl.exp2(G) * rk[:, None], mask=all_has)
    # the decay still to come is a sum of its own: G_end - G has the rounding errors of both
    later = tl.cumsum(g, axis=0, reverse=True) - g
    tl.store(at + 64, tl.exp2(minus_abs(later)) * rk[:, None], mask=all_has)
    tl.store(at + 128, tl.exp2(G) * rq[:, None], mask=all_has)
    tl.store(at + 192, tl.broadcast_to(exact_exp2(G_end), (64, UNITS)), mask=all_has)
    # a token's a (I - beta k k^T) stretches nothing by more than a max(1, |1 - beta |k|^2|)
    stretch = tl.reduce(tl.maximum(tl.abs(1.0 - beta * k2[:, None]), 1.0), 0, _product)
    tl.store(decay_ptr + r, G_end.to(tl.float32) + tl.log2(stretch)[None, :], mask=has)


@triton.jit
def _prepare_key(
    q_ptr,  # [C, K]
    k_ptr,  # [C, K]
    g_ptr,  # [C, heads]
    beta_ptr,  # [C, heads]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    tb_ptr,  # [heads, C, C]
    p_ptr,  # [heads, C, C]
    f_ptr,  # [heads, 4, C] fp32
    gates_ptr,  # [heads, GATES, C] fp32
    decay_ptr,  # [heads] fp32
    kept_ptr,  # [C, C]
    q_stride,  # of T
    k_stride,
    g_strides,  # of B, T, HV
    beta_strides,
    ok,  # [C]
    hv0, heads, scale,
    K: tl.constexpr, L2NORM: tl.constexpr, BETA_MAX: tl.constexpr, BLOCK_K: tl.constexpr,
    UNITS: tl.constexpr, GATES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """P, F and the gates of one chunk and key head; stores K K^T at kept_ptr."""
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    kk = tl.zeros((64, 64), tl.float32)
    qk = tl.zeros((64, 64), tl.float32)
    # the tensor cores sum squares with fewer instructions than a reduction, but not to fp32
    qq = tl.zeros((64, BLOCK_K if EXACT else 64), tl.float32)
    for k0 in range(0, K, BLOCK_K):  # a loop in the code too: unrolled it spills on sm_80
        d = k0 + tl.arange(0, BLOCK_K)[None, :]
        mask = ok[:, None] & (d < K)
        q = tl.load(q_ptr + i * q_stride + d, mask=mask, other=0.0)  # [C, BLOCK_K]
        k = tl.load(k_ptr + i * k_stride + d, mask=mask, other=0.0)  # [C, BLOCK_K]
        kk = tl.dot(k, tl.trans(k), kk, input_precision=PREC)
        qk = tl.dot(q, tl.trans(k), qk, input_precision=PREC)
        if L2NORM and EXACT:
            qq += q * q
        elif L2NORM:
            qq = tl.dot(q, tl.trans(q), qq, input_precision=PREC)
    k2 = _diagonal(kk, i, j)  # [C] fp32, |k|^2
    one = tl.where(ok, 1.0, 0.0)  # [C] fp32
    unit = one * tl.rsqrt(k2 + 1e-6)  # [C] fp32, makes keys of length 1
    keep_blocks(kept_ptr, (kk * -unit[:, None] * unit[None, :]).to(kept_ptr.dtype.element_ty))
    rq = one * scale  # [C] fp32
    rk = one  # [C] fp32
    if L2NORM:
        rq *= tl.rsqrt((tl.sum(qq, axis=1) if EXACT else _diagonal(qq, i, j)) + 1e-6)
        rk = unit
        k2 *= rk * rk
    else:
        for head in range(heads):
            tl.store(gates_ptr + (head * GATES + 4) * 64 + t, tl.sqrt(k2 + 1e-6))
    qk = tl.where(i >= j, qk * rq[:, None] * rk[None, :], 0.0)
    _store_factors(
        g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, f_ptr, gates_ptr, decay_ptr, g_strides,
        beta_strides, ok, hv0, k2, rk, rq, heads, UNITS, BETA_MAX, GATES, p_ptr.dtype.element_ty,
    )  # fmt: skip
    for head in range(heads):
        G = gates_ptr + head * (64 * GATES)
        gam = tl.exp2(minus_abs(tl.load(G + i) - tl.load(G + j)))  # [C, C] fp32
        tl.store(p_ptr + head * 4096 + i * 64 + j, (qk * gam).to(p_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "N", "NT"])
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
    gates_ptr,  # [rows, HV, GATES, C] fp32, scratch
    decay_ptr,  # [rows, HV] fp32
    q_strides,  # of B, T, H
    k_strides,
    g_strides,  # of B, T, HV
    beta_strides,
    T, N,
    NT,  # ceil(T / C), equal length
    scale,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, L2NORM: tl.constexpr,
    BETA_MAX: tl.constexpr,  # beta is a logit, and BETA_MAX * sigmoid(beta) is meant; 0: as given
    KEYS: tl.constexpr,  # key heads of a program
    UNITS: tl.constexpr,  # value heads of a program, at most
    BLOCK_K: tl.constexpr, GATES: tl.constexpr, LATER: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Tb, P and F of a chunk and up to UNITS value heads.

    They are the heads of KEYS key heads, or a part of the heads of one.
    """
    PARTS: tl.constexpr = (R + UNITS - 1) // UNITS
    row = tl.program_id(0) // (H // KEYS * PARTS)
    h = (tl.program_id(0) // PARTS % (H // KEYS) * KEYS).to(tl.int64)
    part = tl.program_id(0) % PARTS * UNITS
    hv0 = h * R + part
    heads = R if R <= UNITS else tl.minimum(R - part, UNITS)  # of each key head
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0  # packed: a batch of one
    tok = start + c * 64  # first token, int64; offsets inside a chunk are 32-bit
    ok = tl.arange(0, 64) < length - c * 64
    q_ptr += b * q_strides[0] + tok * q_strides[1] + h * q_strides[2]
    k_ptr += b * k_strides[0] + tok * k_strides[1] + h * k_strides[2]
    g_ptr += b * g_strides[0] + tok * g_strides[1] + hv0 * g_strides[2]
    beta_ptr += b * beta_strides[0] + tok * beta_strides[1] + hv0 * beta_strides[2]
    unit = row.to(tl.int64) * (H * R) + hv0
    tb_ptr += unit * 4096
    p_ptr += unit * 4096
    f_ptr += unit * 256
    gates_ptr += unit * (64 * GATES)
    decay_ptr += unit
    # K K^T lies where Tb will, and is read before; or behind the gates, and is read as it is needed
    STEP: tl.constexpr = 64 * GATES if LATER else 4096
    kept_ptr = gates_ptr + 320 if LATER else tb_ptr.to(tl.pointer_type(tl.float16))
    for key in tl.range(KEYS, disable_licm=True):
        u = key * heads
        _prepare_key(
            q_ptr + key * q_strides[2], k_ptr + key * k_strides[2], g_ptr + u * g_strides[2],
            beta_ptr + u * beta_strides[2], A_log_ptr, dt_bias_ptr, tb_ptr + u * 4096,
            p_ptr + u * 4096, f_ptr + u * 256, gates_ptr + u * (64 * GATES), decay_ptr + u,
            kept_ptr + u * STEP, q_strides[1], k_strides[1], g_strides, beta_strides, ok, hv0 + u,
            heads, scale, K, L2NORM, BETA_MAX, BLOCK_K, UNITS, GATES, PREC,
        )  # fmt: skip
    tl.debug_barrier()  # what follows was written by other threads
    u = tl.minimum(tl.arange(0, UNITS), KEYS * heads - 1)  # warps left over repeat the last unit
    m = (kept_ptr + (u // heads * heads)[None, :, None] * STEP,)
    if not LATER:
        m = kept_blocks(m[0])
        tl.debug_barrier()  # Tb overwrites it
    tb = tb_ptr + u[None, :, None] * 4096
    store_inverse(tb, gates_ptr + u * (64 * GATES), m, L2NORM, DOT, PREC)


def keys_together(H: int, R: int) -> int:
    """Key heads of a program, so that their value heads fill its warps, if that number divides
    H."""
    return next(n for n in (4, 2, 1) if n * R <= UNITS and H % n == 0 or n == 1)


class Prepare:
    """The launch of the kernel above for all calls with the same shapes, strides, dtypes and
    options."""

    __slots__ = ("kernel", "rows", "heads", "scratch")

    def __init__(self, call: GdnCall):
        q, K, H, R = call.q, call.K, call.H, call.HV // call.H
        l2norm, wide = call.options.use_qk_l2norm, q.dtype == torch.float32
        self.rows, self.heads = call.rows, call.HV
        # gates; the keys' lengths without l2norm; K K^T for fp32 inputs
        self.scratch = 5 + CHUNK if wide else 4 if l2norm else 5
        # The inverse's products are in fp16 where its range is sure to do: with unit keys nothing
        # exceeds 2, and fp16 has the mantissa of tf32 at twice its rate.
        dot = tl.float16 if l2norm and not wide else tl.float32
        exactness = precision(torch.float32 if wide else torch.float16)
        block_k = min(next_power_of_2(max(K, 16)), 16 if wide else 32 if K > 128 else 64)
        keys = keys_together(H, R)
        name = "portable_gdn_prepare_wide" if wide or K > 128 else "portable_gdn_prepare"
        self.kernel = Launch(
            _prepare_kernel,
            self.rows * H // keys * -(-R // UNITS),
            q.device,
            numbers=(
                *map(steps, (q, call.k, call.g, call.beta)), *chunk_numbers(call),
                call.options.scale,
            ),
            constexprs=(
                H, R, K, l2norm, call.options.beta_max, keys, UNITS, block_k, self.scratch, wide,
                dot, exactness,
            ),
            options=tuple(lookup(name, q.device, R=R).items()), guarded=True,
        )  # fmt: skip

    def __call__(self, q, k, g, beta, A_log, dt_bias, cu_seqlens) -> tuple:
        """Tb, P [rows, HV, C, C]; F [rows, HV, 4, C] and decay [rows, HV], both fp32."""
        rows, HV = self.rows, self.heads
        tb = q.new_empty((rows, HV, CHUNK, CHUNK))
        p = torch.empty_like(tb)
        # one allocation: an allocation costs the host as much as a third of a launch
        n = rows * HV
        small = q.new_empty(n * (4 * CHUNK + 1), dtype=torch.float32)
        f = small.as_strided((rows, HV, 4, CHUNK), (HV * 4 * CHUNK, 4 * CHUNK, CHUNK, 1))
        decay = small.as_strided((rows, HV), (HV, 1), n * 4 * CHUNK)
        # scratch, apart: free again for o
        gates = small.new_empty((rows, HV, self.scratch, CHUNK))
        self.kernel(q, k, g, beta, A_log, dt_bias, cu_seqlens, tb, p, f, gates, decay)
        return tb, p, f, decay
