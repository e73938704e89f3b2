"""The gradient of queries and keys through their norms, summed over the value heads of a key head.

    x^ = r x, r = 1 / sqrt(x . x + 1e-6)        dx = r (dx^ - x^ (x^ . dx^))

Sizes: B T H HV K; R = HV / H. K is a power of two.
"""

import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ..call import KdaCall

TOKENS = 16  # of a program


@triton.jit
def _through_norm(
    x_ptr, dx_ptr, out_ptr, b, h, t, stride, T, H: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, K)[None, :]
    ok = (t < T)[:, None]
    t = t[:, None].to(tl.int64)
    at = ((b * T + t) * (H * R) + h * R) * K + d
    dx = tl.load(dx_ptr + at, mask=ok, other=0.0)
    for r in tl.static_range(1, R):
        dx += tl.load(dx_ptr + at + r * K, mask=ok, other=0.0)
    if NORM:
        x = tl.load(x_ptr + t * stride + d, mask=ok, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        x *= r
        dx = r * (dx - x * tl.sum(x * dx, 1)[:, None])
    tl.store(out_ptr + ((b * T + t) * H + h) * K + d, dx.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T"])
def _norms_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    to_q_ptr,  # [B, T, HV, K] fp32
    to_k_ptr,  # [B, T, HV, K] fp32
    dq_ptr,  # [B, T, H, K], written
    dk_ptr,  # [B, T, H, K], written
    q_strides,  # of B, T, H
    k_strides,
    T,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """dQ and dK of some tokens of one key head."""
    h = (tl.program_id(0) % H).to(tl.int64)
    parts = (T + TOKENS - 1) // TOKENS
    b = (tl.program_id(0) // H // parts).to(tl.int64)
    t = tl.program_id(0) // H % parts * TOKENS + tl.arange(0, TOKENS)
    q_ptr += b * q_strides[0] + h * q_strides[2]
    k_ptr += b * k_strides[0] + h * k_strides[2]
    _through_norm(q_ptr, to_q_ptr, dq_ptr, b, h, t, q_strides[1], T, H, R, K, NORM)
    _through_norm(k_ptr, to_k_ptr, dk_ptr, b, h, t, k_strides[1], T, H, R, K, NORM)


def kda_backward_norms(call: KdaCall, to_q, to_k, config: dict) -> tuple:
    """dq and dk [B, T, H, K] from those of each value head."""
    q, k, H = call.q, call.k, call.H
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    kernel = Launch(
        _norms_bwd_kernel, call.B * H * -(-call.T // TOKENS), q.device,
        numbers=(steps(q), steps(k), call.T),
        constexprs=(H, call.HV // H, call.K, call.options.use_qk_l2norm, TOKENS),
        options=(("num_warps", config["num_warps"]),),
    )  # fmt: skip
    kernel(q, k, to_q, to_k, dq, dk)
    return dq, dk
