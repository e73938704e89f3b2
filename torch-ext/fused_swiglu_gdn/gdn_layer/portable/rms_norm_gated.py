"""RMSNorm with a gate: y = weight * x / sqrt(mean(x^2) + eps) * act(gate), in fp32.

Sizes: M rows (G groups of R rows at one stride each), D channels.
"""

from typing import Callable, Optional

import triton
import triton.language as tl

from ...norm.portable.rows import lie_in_rows, readable, two_strides
from ...runtime import tuning
from ...runtime.dtypes import served
from ...runtime.launch import Launch, named
from ...runtime.operation import contiguous_like, on_copies
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import GatedNorm

MAX_CHANNELS = 16384


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


def prepare_rms_norm_gated_fwd(call: GatedNorm) -> Optional[Callable]:
    """(x, gate, weight) -> y: one launch; views whose rows have two strides (heads of tokens) are
    not copied."""
    x, gate, weight, (eps, activation) = call
    D, where = x.shape[-1], x.device
    if not served(x, gate, weight) or not 0 < D <= MAX_CHANNELS:
        return None
    if not lie_in_rows(x, gate) or not weight.is_contiguous():
        return on_copies(prepare_rms_norm_gated_fwd, call, copied)
    M, config = x.numel() // D, tuning.lookup("portable_rms_norm_gated_fwd", where, D=D)
    constexprs, options = named(
        _rms_norm_gated_fwd_kernel, D=D, SILU=activation == "silu",
        BLOCK_D=next_power_of_2(D), **config,
    )  # fmt: skip
    kernel = Launch(
        _rms_norm_gated_fwd_kernel, cdiv(M, config["BLOCK_M"]), where,
        numbers=(two_strides(x), two_strides(gate), M, rows_of_a_group(x), eps),
        constexprs=constexprs, options=options, guarded=True,
    )  # fmt: skip
    make_y = contiguous_like(x)

    def run(x, gate, weight):
        y = make_y(x)
        kernel(x, gate, weight, y)
        return y

    return run


def rows_of_a_group(x) -> int:
    return x.shape[-2] if x.ndim > 1 else 1


def copied(x, gate, weight, *dy) -> tuple:
    """The tensors of a call, those that kernels cannot read as contiguous copies."""
    return readable(x), readable(gate), weight.contiguous(), *map(readable, dy)
