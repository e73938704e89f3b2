"""The two kernels of decode.py.

Sizes: B rows, H and HV heads, R = HV / H, K and V head dims, D = 2 H K + HV V channels, W taps,
S columns of the convolution's state, P rows with padding in FP8.
"""

import triton
import triton.language as tl

from ...fp8.portable.quantise import codes_of, scale_of
from ...gdn.portable.delta import key_norms, load, read_step, store, write_step
from ...gdn.portable.gates import log_decay, write_strength
from ...runtime.primitives import activate
from .prologue import head_row
from .rms_norm_gated import gate_activation


@triton.jit
def _before(
    held_ptrs,  # [N] pointers to column 0 of the channels' states
    held_step,
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    channel,  # [N]
    mask,
    S: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The contribution of earlier inputs and the bias to the convolution at a token: [N] fp32."""
    acc = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    for w in tl.static_range(W - 1):
        seen = tl.load(held_ptrs + (S - W + 1 + w) * held_step, mask=mask, other=0.0)
        tap = tl.load(weight_ptr + channel * W + w, mask=mask, other=0.0)
        acc += seen.to(tl.float32) * tap.to(tl.float32)
    return acc


@triton.jit
def _convolved(before, x_ptrs, weight_ptr, channel, mask, W: tl.constexpr, SILU: tl.constexpr):
    """The convolution at a token, [N] fp32."""
    tap = tl.load(weight_ptr + channel * W + W - 1, mask=mask, other=0.0).to(tl.float32)
    y = before + tap * tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    return activate(y, "silu") if SILU else y


@triton.jit
def layer_step_kernel(
    q_ptr,  # [B, H, K]
    k_ptr,  # [B, H, K]
    v_ptr,  # [B, H, R, V]
    a_ptr,  # [B, H, R]
    b_ptr,  # [B, H, R]
    held_ptr,  # [B, D, S]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    A_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV] or None
    state_ptr,  # [B, HV, K, V]
    o_ptr,  # [B, HV, V] fp32
    strides,  # of a row and a head in q, k; a row, a group, a head in v; a row, a group in a and b
    held_strides,  # of B, D, S
    state_row, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S: tl.constexpr,
    W: tl.constexpr, SILU: tl.constexpr, BETA_MAX: tl.constexpr, PDL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The convolution and the rule's step: a program takes BLOCK_V columns of one head's state.

    Every program computes the q and k that it needs: that costs less than a launch for them. The
    convolution's state is not updated here, because other programs may still read it.
    """
    if PDL:  # layer_finish_kernel, which waits. That one must not: the next step reads early
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    R: tl.constexpr = HV // H
    pid = tl.program_id(0)
    row = (pid // (PARTS * HV)).to(tl.int64)
    hv = (pid // PARTS) % HV
    group = hv // R
    member = hv % R
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = (pid % PARTS) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < K
    mask_v = offs_v < V
    mask = None
    if BLOCK_K != K or V % BLOCK_V != 0:
        mask = mask_k[:, None] & mask_v[None, :]
    state_ptrs = state_ptr + row * state_row + hv * (K * V) + offs_k[:, None] * V + offs_v[None, :]
    # what was there before the projections began
    state = load(state_ptrs, mask)  # [BLOCK_K, BLOCK_V] fp32
    at_q = group * K + offs_k
    at_k = H * K + at_q
    at_v = 2 * H * K + hv * V + offs_v
    held = held_ptr + row * held_strides[0]
    step = held_strides[2]
    q = _before(held + at_q * held_strides[1], step, weight_ptr, bias_ptr, at_q, mask_k, S, W)
    k = _before(held + at_k * held_strides[1], step, weight_ptr, bias_ptr, at_k, mask_k, S, W)
    v = _before(held + at_v * held_strides[1], step, weight_ptr, bias_ptr, at_v, mask_v, S, W)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_ptrs = q_ptr + row * strides[0] + group * strides[1] + offs_k
    q = _convolved(q, q_ptrs, weight_ptr, at_q, mask_k, W, SILU)
    k_ptrs = k_ptr + row * strides[2] + group * strides[3] + offs_k
    k = _convolved(k, k_ptrs, weight_ptr, at_k, mask_k, W, SILU)
    v_ptrs = v_ptr + row * strides[4] + group * strides[5] + member * strides[6] + offs_v
    v = _convolved(v, v_ptrs, weight_ptr, at_v, mask_v, W, SILU)
    a = tl.load(a_ptr + row * strides[7] + group * strides[8] + member)
    g = log_decay(a, A_log_ptr, dt_bias_ptr, hv)
    b = tl.load(b_ptr + row * strides[9] + group * strides[10] + member)
    beta = write_strength(b, BETA_MAX)
    rstd_k, scale, kq = key_norms(q, k, scale, True)
    delta, o = read_step(state, q, k, v, g, beta, rstd_k, scale, kq, 0)
    tl.store(o_ptr + (row * HV + hv) * V + offs_v, o, mask=mask_v)
    store(state_ptrs, write_step(state, k, delta, g, 0), mask)


@triton.jit
def layer_finish_kernel(
    o_ptr,  # [B, HV, V] fp32
    z_ptr,  # [B, H, R, V]
    norm_ptr,  # [V]
    y_ptr,  # [B, HV, V], or None with the two below
    codes_ptr,  # [B, HV, V] e4m3, or None
    scales_ptr,  # [HV, P] fp32, or None
    q_ptr,  # [B, H, K]
    k_ptr,  # [B, H, K]
    v_ptr,  # [B, H, R * V] or [B, HV, V]
    held_ptr,  # [B, D, S]
    z_strides,  # of a row, a group, a head
    strides,  # of B, T and a head in q, k, v
    held_strides,  # of B, D, S
    heads,  # B * HV
    P, eps,
    H: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    WIDE: tl.constexpr,  # channels of v that lie side by side
    D: tl.constexpr, S: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program normalises and gates one head, which is a block of scales in FP8; programs past the
    heads update the convolution's state.

    Each of those shifts BLOCK_D channels by a token.
    """
    pid = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if pid < heads:
        row = (pid // HV).to(tl.int64)
        hv = pid % HV
        offs_v = tl.arange(0, BLOCK_V)
        mask_v = offs_v < V
        z_row = z_ptr + row * z_strides[0] + (hv // (HV // H)) * z_strides[1]
        z = tl.load(z_row + (hv % (HV // H)) * z_strides[2] + offs_v, mask=mask_v, other=0.0)
        o = tl.load(o_ptr + pid.to(tl.int64) * V + offs_v, mask=mask_v, other=0.0)
        norm = tl.load(norm_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(o * o, 0) / V + eps)
        y = norm * (o * rstd) * gate_activation(z.to(tl.float32), SILU)
        at = pid.to(tl.int64) * V + offs_v
        if codes_ptr is None:
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask_v)
        else:  # a head has a scale of its own
            y = tl.expand_dims(y.to(tl.bfloat16).to(tl.float32), 0)
            scale = scale_of(y, 1)  # [1]
            tl.store(codes_ptr + tl.expand_dims(at, 0), codes_of(y, scale, 1))
            tl.store(scales_ptr + hv * P + row + tl.arange(0, 1), scale)
    else:
        pid -= heads
        row = (pid // (D // BLOCK_D)).to(tl.int64)
        d0 = (pid % (D // BLOCK_D)) * BLOCK_D
        local = tl.arange(0, BLOCK_D)
        x_row, _ = head_row(q_ptr, k_ptr, v_ptr, strides, row, d0, HK, K, WIDE)
        x = tl.load(x_row + local).to(held_ptr.dtype.element_ty)  # [BLOCK_D]
        offs_s = tl.arange(0, BLOCK_S)[None, :]
        held_row = held_ptr + row * held_strides[0] + (d0 + local)[:, None] * held_strides[1]
        held_ptrs = held_row + offs_s * held_strides[2]  # [BLOCK_D, BLOCK_S]
        held = tl.load(held_ptrs + held_strides[2], mask=offs_s + 1 < S, other=0.0)
        moved = tl.where(offs_s + 1 < S, held, x[:, None])
        tl.debug_barrier()  # every thread has read before any writes
        tl.store(held_ptrs, moved, mask=tl.broadcast_to(offs_s < S, (BLOCK_D, BLOCK_S)))
