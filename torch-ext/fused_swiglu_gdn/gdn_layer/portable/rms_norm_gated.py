"""RMSNorm with a gate: y = weight * x / sqrt(mean(x^2) + eps) * act(gate), in fp32; in FP8 for an
output projection.

Sizes: M rows (G groups of R rows at one stride each), D channels; in FP8 rows are the HEADS of a
token, P tokens with padding.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...fp8.call import BLOCK, padded
from ...fp8.portable.quantise import codes_of, quantising, scale_of
from ...norm.portable.rows import lie_in_rows, readable, two_strides
from ...runtime import device, tuning
from ...runtime.copies import contiguous_like, on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
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
    y_ptr,  # [M, D], or None with the two below
    q_ptr,  # [P, HEADS D] e4m3, or None
    s_ptr,  # [HEADS, P] fp32, or None
    x_strides,  # of a group, a row
    gate_strides,  # of a group, a row
    M, R, P, eps,
    D: tl.constexpr, SILU: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_M rows, each of which has a scale of its own in FP8."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < M)[:, None] & (offs_d < D)
    group = (rows // R).to(tl.int64)
    member = (rows % R).to(tl.int64)
    x_rows = x_ptr + group * x_strides[0] + member * x_strides[1]
    gate_rows = gate_ptr + group * gate_strides[0] + member * gate_strides[1]
    x = tl.load(x_rows[:, None] + offs_d, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_rows[:, None] + offs_d, mask=mask, other=0.0).to(tl.float32)
    at_weight, mask_weight = offs_d, offs_d < D
    if q_ptr is not None:  # read by all rows, so that it lies as they do
        at_weight, mask_weight = offs_d + 0 * rows[:, None], mask
    weight = tl.load(weight_ptr + at_weight, mask=mask_weight, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)  # [BLOCK_M] fp32
    y = x * rstd[:, None] * weight * gate_activation(gate, SILU)
    at = rows.to(tl.int64)[:, None] * D + offs_d
    if q_ptr is None:
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        y = tl.where(mask, y.to(tl.bfloat16).to(tl.float32), 0.0)
        scale, token, head = scale_of(y, 1), rows // HEADS, rows % HEADS
        here = token < P
        # a thread stores as many as it loads of 16 bits, so that rows are summed up as above
        at = tl.max_contiguous(at, (1, 8))
        tl.store(q_ptr + at, codes_of(y, scale, 1), mask=here[:, None])
        tl.store(s_ptr + head.to(tl.int64) * P + token, scale, mask=here)


def prepare_rms_norm_gated_fwd(call: GatedNorm) -> Optional[Callable]:
    """(x, gate, weight) -> y: one launch; views whose rows have two strides (heads of tokens) are
    not copied."""
    x, gate, weight, _ = call
    D = x.shape[-1]
    if not served(x, gate, weight) or not 0 < D <= MAX_CHANNELS:
        return None
    if not lie_in_rows(x, gate) or not weight.is_contiguous():
        return on_copies(prepare_rms_norm_gated_fwd, call, copied)
    kernel, make_y = _launch(call, x.numel() // D), contiguous_like(x)

    def run(x, gate, weight):
        y = make_y(x)
        kernel(x, gate, weight, y, None, None)
        return y

    return run


def _launch(call: GatedNorm, rows: int, heads: int = 1, P: int = 0) -> Launch:
    """The launch for so many rows of which some may be padding; P tokens of heads in FP8."""
    x, gate, _, (eps, activation) = call
    D, where = x.shape[-1], x.device
    config = tuning.lookup("portable_rms_norm_gated_fwd", where, D=D)
    numbers = (two_strides(x), two_strides(gate), x.numel() // D, rows_of_a_group(x), P, eps)
    return Launch(
        _rms_norm_gated_fwd_kernel, cdiv(rows, config["BLOCK_M"]), where, numbers=numbers,
        guarded=True, D=D, SILU=activation == "silu", HEADS=heads, BLOCK_D=next_power_of_2(D),
        **config,
    )  # fmt: skip


def prepare_rms_norm_gated_quantise_fwd(call: GatedNorm) -> Optional[Callable]:
    """(x, gate, weight) -> y in FP8: one launch; of heads as wide as a block of scales."""
    x, gate, weight, _ = call
    where = x.device
    if not served(x, gate, weight) or x.dtype is not torch.bfloat16 or x.shape[-1] != BLOCK:
        return None
    if x.ndim < 3 or not lie_in_rows(x, gate) or not weight.is_contiguous():
        return None
    if gate.shape != x.shape or weight.shape != (BLOCK,) or not device.has_e4m3(where):
        return None
    if not x.numel():
        return None
    shape = (x.shape[0] * x.shape[1], x.shape[2:].numel())
    heads, P = shape[1] // BLOCK, padded(shape[0])
    run = quantising(_launch(call, P * heads, heads, P), where, shape)
    return lambda x, gate, weight: run(x, gate, weight, None)


def rows_of_a_group(x) -> int:
    return x.shape[-2] if x.ndim > 1 else 1


def copied(x, gate, weight, *dy) -> tuple:
    """The tensors of a call, those that kernels cannot read as contiguous copies."""
    return readable(x), readable(gate), weight.contiguous(), *map(readable, dy)
