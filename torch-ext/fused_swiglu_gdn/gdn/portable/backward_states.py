"""The two sequential passes of the gated delta rule's gradient, concurrently in one launch.

Forward over the chunks, the state S [K, V] before each chunk and its deltas vt:

    X = V - F0 (K S)      vt = Tb X       S <- gam_C S + K^T (F1 vt)

Backward over them, the gradient dS of the state after each chunk and that of V:

    dvt = F1 (K dS) + P^T dO      dV = Tb^T dvt      dS <- gam_C dS + Q^T (F2 dO) - K^T (F0 dV)

The passes are independent, so half of the programs run one and half the other. Tb, P and the row
factors F come from gdn/portable/prepare.py; docs/gdn_backward.md derives both. With Ke, of Kimi
Delta Attention (kda/portable/prepare.py), the row factors are in the operands, K and Q are its Kd
and Qd, and gam_C scales the rows of S:

    X = V - Kd S      S <- gam S + Ke^T vt      dvt = Ke dS + P^T dO
    dS <- gam dS + Qd^T dO - Kd^T dV

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; R = HV / H; rows = chunk rows of the call.
K and V are powers of two.
"""

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ...runtime.primitives import sequence_bounds
from .primitives import kv_strides, precision
from .state import load_factors, times


@triton.jit
def _tile(ptr, first, stride, d, mask):
    """Loads 64 rows from `first` on and columns `d` of a matrix with contiguous rows; zeros if
    masked."""
    at = tl.arange(0, 64)[:, None] * stride + d[None, :]
    return tl.load(ptr + first * stride + at, mask=mask, other=0.0)


@triton.jit
def _solve(matrix, diagonal_ptr, x, PREC: tl.constexpr):
    """Tb x or Tb^T x [C, BLOCK_V] fp32.

    The rounding error of x is multiplied by the diagonal, its largest factor, and added.
    """
    low = x.to(matrix.dtype)
    if low.dtype == tl.float32:
        return tl.dot(matrix, low, input_precision=PREC)
    else:
        beta = tl.load(diagonal_ptr + tl.arange(0, 64) * 65).to(tl.float32)  # [C]
        return tl.dot(matrix, low, beta[:, None] * (x - low.to(tl.float32)), input_precision=PREC)


@triton.jit
def _forward(
    s,  # [K, BLOCK_V] fp32
    k_ptr, ke_ptr, v_ptr, vt_ptr, tb_ptr, f_ptr, h_ptr, k_stride, v_stride, vt_stride, length, d, e,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """S and vt of every chunk of one sequence and value head, for BLOCK_V of its columns."""
    t = tl.arange(0, 64)
    square = t[:, None] * 64 + t[None, :]
    at_state = d[:, None] * V + e[None, :]
    for c in tl.range(0, (length + 63) // 64, num_stages=STAGES):
        unit = c * tl.full((), HV, tl.int64)
        first = c * tl.full((), 64, tl.int64)
        ok = c * 64 + t < length
        k = _tile(k_ptr, first, k_stride, d, ok[:, None])  # [C, K]
        v = _tile(v_ptr, first, v_stride, e, ok[:, None])  # [C, BLOCK_V]
        tb = tl.load(tb_ptr + unit * 4096 + square)  # [C, C]
        if ke_ptr is None:
            f_at = f_ptr + unit * 256
            f0 = tl.load(f_at + t)  # [C] fp32
            f1 = tl.load(f_at + 64 + t)  # [C] fp32
            decay = tl.load(f_at + 192)
            ke = k
        else:
            f0, f1 = None, None
            decay = tl.load(f_ptr + unit * K + d)[:, None]
            ke = _tile(ke_ptr, first, k_stride, d, ok[:, None])  # [C, K]

        low = s.to(k.dtype)  # [K, BLOCK_V]
        tl.store(h_ptr + unit * (K * V) + at_state, low)
        x = v.to(tl.float32) - times(tl.dot(k, low, input_precision=PREC), f0)
        vt = _solve(tb, tb_ptr + unit * 4096, x, PREC)  # [C, BLOCK_V] fp32
        at_v = t[:, None] * vt_stride + e[None, :]
        tl.store(vt_ptr + first * vt_stride + at_v, vt.to(k.dtype), mask=ok[:, None])
        written = times(vt, f1).to(k.dtype)
        s = tl.dot(tl.trans(ke), written, s * decay, input_precision=PREC)


@triton.jit
def _reverse(
    ds,  # [K, BLOCK_V] fp32
    q_ptr, k_ptr, ke_ptr, do_ptr, dv_ptr, tb_ptr, p_ptr, f_ptr, dh_ptr, q_stride, k_stride,
    do_stride, dv_stride, length, d, e,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dS and dV of every chunk of one sequence and value head, last first; dS at the start."""
    t = tl.arange(0, 64)
    square = t[:, None] * 64 + t[None, :]
    at_state = d[:, None] * V + e[None, :]
    NT = (length + 63) // 64
    for step in tl.range(0, NT, num_stages=STAGES):
        c = NT - 1 - step
        unit = c * tl.full((), HV, tl.int64)
        first = c * tl.full((), 64, tl.int64)
        ok = c * 64 + t < length
        k = _tile(k_ptr, first, k_stride, d, ok[:, None])  # [C, K]
        q = _tile(q_ptr, first, q_stride, d, ok[:, None])  # [C, K]
        do = _tile(do_ptr, first, do_stride, e, ok[:, None])  # [C, BLOCK_V]
        tb = tl.load(tb_ptr + unit * 4096 + square)  # [C, C]
        p = tl.load(p_ptr + unit * 4096 + square)  # [C, C]
        if ke_ptr is None:
            f0, f1, f2, decay = load_factors(f_ptr + unit * 256)
            ke = k
        else:
            f0, f1, f2 = None, None, None
            decay = tl.load(f_ptr + unit * K + d)[:, None]
            ke = _tile(ke_ptr, first, k_stride, d, ok[:, None])  # [C, K]

        low = ds.to(k.dtype)  # [K, BLOCK_V]
        tl.store(dh_ptr + unit * (K * V) + at_state, low)
        dvt = tl.dot(tl.trans(p), do, input_precision=PREC)  # [C, BLOCK_V] fp32
        dvt += times(tl.dot(ke, low, input_precision=PREC), f1)
        read = times(do.to(tl.float32), f2).to(k.dtype)  # [C, BLOCK_V]
        ds = tl.dot(tl.trans(q), read, ds * decay, input_precision=PREC)
        dv = _solve(tl.trans(tb), tb_ptr + unit * 4096, dvt, PREC)  # [C, BLOCK_V] fp32
        at_v = t[:, None] * dv_stride + e[None, :]
        tl.store(dv_ptr + first * dv_stride + at_v, dv.to(k.dtype), mask=ok[:, None])
        forgot = (-dv if f0 is None else dv * -f0[:, None]).to(k.dtype)
        ds = tl.dot(tl.trans(k), forgot, ds, input_precision=PREC)
    return ds


@triton.jit(do_not_specialize=["T"])
def _states_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    do_ptr,  # [B, T, HV, V]
    tb_ptr,  # [rows, HV, C, C]
    p_ptr,  # [rows, HV, C, C]
    f_ptr,  # [rows, HV, 4, C] fp32; with Ke gam [rows, HV, K]
    cu_ptr,  # [N + 1] int32 | int64, or None
    ke_ptr,  # [B, T, HV, K] like k, or None
    s0_ptr,  # [N, HV, K, V], or None
    ds1_ptr,  # [N, HV, K, V], or None
    h_ptr,  # [rows, HV, K, V]
    dh_ptr,  # [rows, HV, K, V]
    vt_ptr,  # [B, T, HV, V]
    dv_ptr,  # [B, T, HV, V]
    ds0_ptr,  # [N, HV, K, V], or None
    q_strides,  # of B, T, H
    k_strides,
    v_strides,  # of B, T, HV
    do_strides,
    s0_strides,  # of N, HV, K, V
    ds1_strides, ds0_strides,
    T,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One of the two passes for BLOCK_V columns of one value head of one sequence."""
    HV: tl.constexpr = H * R
    NV: tl.constexpr = V // BLOCK_V
    pid = tl.program_id(0)
    e = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, K)
    hv = ((pid // NV) % HV).to(tl.int64)
    n = (pid // (NV * HV)).to(tl.int64) // 2
    h = hv // R
    if cu_ptr is None:
        b = n
        start = n * 0
        length = T
        row = n * ((T + 63) // 64)
    else:
        b = n * 0
        start, stop = sequence_bounds(cu_ptr, n, T)
        length = (stop - start).to(tl.int32)
        row = start // 64 + n
    q_ptr += b * q_strides[0] + start * q_strides[1] + h * q_strides[2]
    k_ptr += b * k_strides[0] + start * k_strides[1] + h * k_strides[2]
    v_ptr += b * v_strides[0] + start * v_strides[1] + hv * v_strides[2]
    do_ptr += b * do_strides[0] + start * do_strides[1] + hv * do_strides[2]
    made = ((b * T + start) * HV + hv) * V  # of vt and dv, which are contiguous
    unit = row * HV + hv
    tb_ptr += unit * 4096
    p_ptr += unit * 4096
    if ke_ptr is None:
        f_ptr += unit * 256
    else:
        f_ptr += unit * K
        ke_ptr += b * k_strides[0] + start * k_strides[1] + h * k_strides[2]
    s = tl.zeros((K, BLOCK_V), tl.float32)  # [K, V]
    if (pid // (NV * HV)) % 2 == 1:
        if s0_ptr is not None:
            s0_ptr += n * s0_strides[0] + hv * s0_strides[1]
            at = d[:, None] * s0_strides[2] + e[None, :] * s0_strides[3]
            s = tl.load(s0_ptr + at).to(tl.float32)
        _forward(
            s, k_ptr, ke_ptr, v_ptr, vt_ptr + made, tb_ptr, f_ptr, h_ptr + unit * (K * V),
            k_strides[1], v_strides[1], HV * V, length, d, e, K, V, HV, STAGES, PREC,
        )  # fmt: skip
    else:
        if ds1_ptr is not None:
            ds1_ptr += n * ds1_strides[0] + hv * ds1_strides[1]
            at = d[:, None] * ds1_strides[2] + e[None, :] * ds1_strides[3]
            s = tl.load(ds1_ptr + at).to(tl.float32)
        s = _reverse(
            s, q_ptr, k_ptr, ke_ptr, do_ptr, dv_ptr + made, tb_ptr, p_ptr, f_ptr,
            dh_ptr + unit * (K * V), q_strides[1], k_strides[1], do_strides[1], HV * V, length, d,
            e, K, V, HV, STAGES, PREC,
        )  # fmt: skip
        if ds0_ptr is not None:
            ds0_ptr += n * ds0_strides[0] + hv * ds0_strides[1]
            at = d[:, None] * ds0_strides[2] + e[None, :] * ds0_strides[3]
            tl.store(ds0_ptr + at, s.to(ds0_ptr.dtype.element_ty))


class States:
    """The launch of the kernel above for all calls with the same facts."""

    __slots__ = ("kernel", "shape")

    def __init__(self, call, do, d_final_state, config: dict):
        q, H, HV, K, V = call.q, call.H, call.HV, call.K, call.V
        initial = call.initial_state
        d_initial = None if initial is None else torch.empty_like(initial, device="meta")
        ends = (initial, d_final_state, d_initial)
        at_ends = (kv_strides(x, call.options.state_v_first) for x in ends)
        self.shape = (call.rows, HV, K, V)
        self.kernel = Launch(
            _states_bwd_kernel, 2 * call.N * HV * (V // config["BLOCK_V"]), q.device,
            numbers=(*map(steps, (q, call.k, call.v, do)), *at_ends, call.T),
            constexprs=(H, HV // H, K, V, config["BLOCK_V"], config["STAGES"], precision(q.dtype)),
            options=(("num_warps", config["num_warps"]),), guarded=True,
        )  # fmt: skip

    def __call__(self, q, k, v, do, tb, p, f, cu_seqlens, ke, initial, d_final_state) -> tuple:
        """h and dh [rows, HV, K, V], vt and dv [B, T, HV, V], and the initial state's gradient.

        h is the state before each chunk, dh the gradient of the state after it. With ke, q and k
        are Qd and Kd, and f is gam.
        """
        h, dh = q.new_empty(self.shape), q.new_empty(self.shape)
        vt, dv = v.new_empty(v.shape), v.new_empty(v.shape)
        d_initial = None if initial is None else torch.empty_like(initial)
        inputs = (q, k, v, do, tb, p, f, cu_seqlens, ke, initial, d_final_state)
        self.kernel(*inputs, h, dh, vt, dv, d_initial)
        return h, dh, vt, dv, d_initial


def gdn_backward_states(call, do, d_final_state, tb, p, f, config: dict, ke=None) -> tuple:
    """States of a call and its tensors."""
    tensors = (call.q, call.k, call.v, do, tb, p, f, call.cu_seqlens, ke)
    return States(call, do, d_final_state, config)(*tensors, call.initial_state, d_final_state)
