"""The gradient of the keys, chunk by chunk (docs/gdn_backward.md).

From the state S before a chunk, the gradient dS of the state after it, vt, dV, and the dP of
backward_query.py:

    N = -strict_lower(Gam dV vt^T)
    dK = -F0 (dV S^T) + F1 (vt dS^T) + (N + N^T) K + dP^T Q      then through the norm of k

and the keys' terms of dG: rows of N * KK^T, its columns, rows of F0 (dV S^T) * K and of F1 (vt
dS^T) * K, and <S, dS>; and the rows' dV . vt, from which dbeta is computed. N^T and dP^T are read
transposed from memory: Triton below 3.7.1 miscompiles a dot of a transposed accumulator on Hopper
(flash-linear-attention#640).

Sizes as in backward_query.py.
"""

import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ..call import GdnBackward
from .backward_query import at, inverse_norm, place, tile
from .primitives import chunk_numbers, precision


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _key_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    cu_ptr,  # [N + 1] int32 | int64, or None
    f_ptr,  # [rows, HV, 4, C] fp32
    cumulative_ptr,  # [rows, HV, C] fp32
    dp_ptr,  # [rows, H, 2, C, C]: dP; N goes to the second
    vt_ptr,  # [B, T, HV, V]
    dv_ptr,  # [B, T, HV, V]
    h_ptr,  # [rows, HV, K, V]
    dh_ptr,  # [rows, HV, K, V]
    dk_ptr,  # [B, T, H, K]
    parts_ptr,  # [rows, HV, NV, 8, C] fp32
    ends_ptr,  # [rows, HV, NV] fp32: <S, dS>
    q_strides,  # of B, T, H
    k_strides,
    T, N,
    NT,  # ceil(T / C), equal length
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    HALVES: tl.constexpr,  # of K, one after another, in the keys' own products
    PREC: tl.constexpr,
):  # fmt: skip
    """dK of one chunk and key head, over its R value heads; the keys' terms of dG."""
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
    made = ((b * T + first) * HV + h * R) * V  # of vt and dv, which are contiguous
    dp_ptr += (unit // R) * 8192
    vt_ptr += made
    dv_ptr += made
    h_ptr += unit * (K * V)
    dh_ptr += unit * (K * V)
    f_ptr += unit * 256
    cumulative_ptr += unit * 64
    parts_ptr += unit * (NV * 512)
    ends_ptr += unit * NV
    k = tile(k_ptr, t, k_strides[1], d, ok)  # [C, K]
    rk = inverse_norm(k, NORM)
    if HALVES:  # the operands of the whole product do not fit into some chips' shared memory
        kk = tl.zeros((64, 64), tl.float32)
        for half in tl.static_range(2):
            own_d = half * (K // 2) + tl.arange(0, K // 2)
            near = tile(k_ptr, t, k_strides[1], own_d, ok)  # [C, K / 2]
            kk = tl.dot(near, tl.trans(near), kk, input_precision=PREC)
        kk = kk * rk[:, None] * rk[None, :]
    else:
        kk = tl.dot(k, tl.trans(k), input_precision=PREC) * rk[:, None] * rk[None, :]  # [C, C]
    dk = tl.zeros((64, K), tl.float32)  # rk times the gradient of the normalised k
    dn = tl.zeros((64, 64), tl.float32)  # -N summed over the group, without norms
    for step in tl.range(0, R * NV, num_stages=STAGES):
        r = step // NV
        e = (step % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
        vt = tile(vt_ptr + r * V, t, HV * V, e, ok)  # [C, BLOCK_V]
        dv = tile(dv_ptr + r * V, t, HV * V, e, ok)  # [C, BLOCK_V]
        cells = r * (K * V) + d[:, None] * V + e[None, :]
        s = tl.load(h_ptr + cells)  # [K, BLOCK_V]
        ds = tl.load(dh_ptr + cells)  # [K, BLOCK_V]
        f0 = tl.load(f_ptr + r * 256 + t)  # [C] fp32
        f1 = tl.load(f_ptr + r * 256 + 64 + t)
        G = tl.load(cumulative_ptr + r * 64 + t)[:, None]
        G -= tl.load(cumulative_ptr + r * 64 + t)[None, :]
        part = parts_ptr + step * 512 + t
        tl.store(ends_ptr + step, tl.sum(s.to(tl.float32) * ds.to(tl.float32)))

        own = tl.dot(dv, tl.trans(vt), input_precision=PREC)  # [C, C] fp32
        tl.store(part + 192, tl.sum(tl.where(i == j, own, 0.0), 1))
        own = tl.where(i > j, own * tl.exp2(tl.minimum(G, 100.0)), 0.0)
        dn += own
        own *= kk
        tl.store(part + 256, tl.sum(own, 1))
        tl.store(part + 320, tl.sum(own, 0))
        wide = f0[:, None] * tl.dot(dv, tl.trans(s), input_precision=PREC)  # [C, K] fp32
        dk -= wide
        tl.store(part + 384, tl.sum(wide * k.to(tl.float32), 1))
        wide = f1[:, None] * tl.dot(vt, tl.trans(ds), input_precision=PREC)
        dk += wide
        tl.store(part + 448, tl.sum(wide * k.to(tl.float32), 1))
    n = (dn * -rk[:, None] * rk[None, :]).to(k.dtype)  # [C, C]
    tl.store(dp_ptr + 4096 + i * 64 + j, n)
    tl.debug_barrier()  # the threads of this program read what others of it wrote
    n += tl.load(dp_ptr + 4096 + j * 64 + i)  # exact: one of the two is zero
    dk = tl.dot(n, k, dk, input_precision=PREC)
    q = tile(q_ptr, t, q_strides[1], d, ok)  # [C, K]
    dk = tl.dot(tl.load(dp_ptr + j * 64 + i), q, dk, input_precision=PREC)
    if NORM:
        dk -= k.to(tl.float32) * (rk * rk * tl.sum(dk * k.to(tl.float32), 1))[:, None]
    dk_ptr += ((b * T + first) * H + h) * K
    cells = t[:, None] * (H * K) + d[None, :]
    tl.store(dk_ptr + cells, dk.to(dk_ptr.dtype.element_ty), mask=ok[:, None])


def key_launch(call: GdnBackward, config: dict) -> Launch:
    """The launch of the kernel above for all calls with the same facts."""
    H, HV, K = call.H, call.HV, call.K
    halves = config.get("HALVES", False) and K > 128
    loops = (config["BLOCK_V"], config["STAGES"], halves, precision(call.q.dtype))
    return Launch(
        _key_bwd_kernel, call.rows * H, call.device,
        numbers=(steps(call.q), steps(call.k), *chunk_numbers(call)),
        constexprs=(H, HV // H, K, call.V, call.options.use_qk_l2norm, *loops),
        options=(("num_warps", config["num_warps"]),), guarded=True,
    )  # fmt: skip
