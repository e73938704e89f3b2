"""RMSNorm with a gate: y = weight * x / sqrt(mean(x^2) + eps) * act(gate), in fp32.

Sizes: M rows (G groups of R rows at one stride each), D channels.
"""

import functools

import torch
import triton
import triton.language as tl

from ...norm.portable.rows import readable, two_strides
from ...runtime import tuning
from ...runtime.dtypes import served
from ...runtime.launch import Launch, named

MAX_CHANNELS = 16384


def supports_rms_norm_gated_fwd(x, gate, weight, eps, activation) -> bool:
    return served(x, gate, weight) and 0 < x.shape[-1] <= MAX_CHANNELS


@triton.jit
def gate_activation(gate, SILU: tl.constexpr):
    """silu(gate) or sigmoid(gate), fp32."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return gate * sigmoid if SILU else sigmoid


@triton.jit
def _rms_norm_gated_fwd_kernel(
    x_ptr,  # [M, D]
    gate_ptr,  # [M, D]
    weight_ptr,  # [D]
    y_ptr,  # [M, D]
    x_strides,  # of a group, a row
    gate_strides,  # of a group, a row
    M,
    R,
    eps,
    D: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program computes BLOCK_M rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < M)[:, None] & (offs_d < D)
    group = (rows // R).to(tl.int64)
    member = (rows % R).to(tl.int64)
    x_rows = x_ptr + group * x_strides[0] + member * x_strides[1]
    gate_rows = gate_ptr + group * gate_strides[0] + member * gate_strides[1]
    x = tl.load(x_rows[:, None] + offs_d, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_rows[:, None] + offs_d, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)  # [BLOCK_M] fp32
    y = x * rstd[:, None] * weight * gate_activation(gate, SILU)
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * D + offs_d
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=1024, typed=True)
def _plan(where: torch.device, D: int, silu: bool, *numbers) -> Launch:
    """numbers: scalars of the kernel."""
    config = tuning.lookup("portable_rms_norm_gated_fwd", where, D=D)
    constexprs, options = named(
        _rms_norm_gated_fwd_kernel, D=D, SILU=silu, BLOCK_D=triton.next_power_of_2(D), **config
    )
    return Launch(
        _rms_norm_gated_fwd_kernel,
        triton.cdiv(numbers[2], config["BLOCK_M"]),
        where,
        numbers=numbers,
        constexprs=constexprs,
        options=options,
    )


def rms_norm_gated_fwd(
    x: torch.Tensor,  # [..., D]
    gate: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D]
    eps: float,
    activation: str,
) -> torch.Tensor:  # [..., D]
    """One launch; views whose rows have two strides (heads of tokens) are not copied."""
    D = x.shape[-1]
    M = x.numel() // D
    R = x.shape[-2] if x.ndim > 1 else 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # [..., D]
    if M == 0:
        return y
    x, gate = readable(x), readable(gate)
    strides = (two_strides(x), two_strides(gate))
    kernel = _plan(x.device, D, activation == "silu", *strides, M, R, eps)
    kernel(x, gate, weight.contiguous(), y)
    return y
