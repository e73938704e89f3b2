"""x sigmoid(gate) in FP8: gate.py has the gate, fp8/portable/quantise.py the formula of codes and
scales. A program takes a token's GROUPS times 128 columns.

Sizes: M tokens, P of them with padding, HQ heads of D channels, which are a token's columns.
"""

from typing import Callable, Optional, Tuple

import torch
import triton
import triton.language as tl

from ...fp8.call import BLOCK
from ...fp8.portable.quantise import columns_of_row, launch_of, quantising, store_codes
from ...runtime import device
from ..call import SigmoidGate


@triton.jit(do_not_specialize=["M"])
def _sigmoid_gate_quantise_kernel(
    x_ptr,  # [M, HQ, D]
    gate_ptr,  # [M, HQ, D]
    q_ptr,  # [P, HQ D] e4m3
    s_ptr,  # [HQ D / 128, P] fp32
    M, P,
    x_strides,  # of a token, a head
    gate_strides,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr,  # it may begin before what it follows has ended
    D: tl.constexpr,
):  # fmt: skip
    """x sigmoid(gate) in fp32, rounded to bf16 and quantised."""
    row, group, offs = columns_of_row(GROUPS, PDL)
    mask = (offs < COLUMNS) & (row < M)
    head, channel, token = offs // D, offs % D, row.to(tl.int64)
    x_ptrs = x_ptr + token * x_strides[0] + head * x_strides[1] + channel
    gate_ptrs = gate_ptr + token * gate_strides[0] + head * gate_strides[1] + channel
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * gate))
    y = (x * s).to(tl.bfloat16)
    store_codes(y.to(tl.float32), q_ptr, s_ptr, row, group, offs, P, COLUMNS)


def _strides(x: torch.Tensor) -> Optional[Tuple[int, int]]:
    """Strides of a token and a head of x [B, T, HQ, D], or None if they do not suffice."""
    B, T = x.shape[:2]
    batch, token, head, channel = x.stride()
    if channel != 1 or B > 1 and T > 1 and batch != T * token:
        return None
    return (token if T > 1 else batch if B > 1 else 0, head)


def prepare_sigmoid_gate_quantise_fwd(call: SigmoidGate) -> Optional[Callable]:
    """(x, gate) -> x sigmoid(gate) in FP8: one launch."""
    x, gate, _ = call
    if x.ndim != 4 or x.shape != gate.shape or not x.numel() or not device.has_e4m3(x.device):
        return None
    (B, T, HQ, D), strides = x.shape, (_strides(x), _strides(gate))
    if not (x.dtype is gate.dtype is torch.bfloat16 and x.device == gate.device):
        return None
    if None in strides or HQ * D % BLOCK:
        return None
    shape = (B * T, HQ * D)
    launch = launch_of(_sigmoid_gate_quantise_kernel, 8, strides, x.device, shape, D)
    return quantising(launch, x.device, shape)
