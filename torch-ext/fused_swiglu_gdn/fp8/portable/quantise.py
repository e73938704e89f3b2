"""Tokens in FP8, alone and from the gate of an MLP, in one launch (reference.py has the formula).

A program takes one row of GROUPS times 128 columns. The largest magnitude is found among the bits
of the values as integers, of which those of NaN are the largest.

Sizes: M tokens, P of them with padding, K or N columns.
"""

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.launch import Launch
from ..call import BLOCK, INVERSE, LEAST, Quantised, padded

_BLOCK, _LEAST, _INVERSE = tl.constexpr(BLOCK), tl.constexpr(LEAST), tl.constexpr(INVERSE)


def supports_quantise_fwd(x) -> bool:
    if x.dtype is not torch.bfloat16 or not x.numel() or x.shape[1] % BLOCK or x.stride(1) != 1:
        return False
    if not device.is_gpu(x.device):
        return True  # the interpreter
    found = device.capability(x.device.index)
    return found is not None and found >= (8, 9)


def supports_silu_mul_quantise_fwd(gate, up) -> bool:
    return gate.shape == up.shape and supports_quantise_fwd(gate) and supports_quantise_fwd(up)


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """The scale of x fp32 along an axis."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(bits, AXIS).to(tl.float32, bitcast=True)
    return tl.maximum(amax, _LEAST, propagate_nan=tl.PropagateNan.ALL) * _INVERSE


@triton.jit
def codes_of(x, scale, AXIS: tl.constexpr):
    """x in e4m3, of which scale_of(x, AXIS) is the scale."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return (x * tl.expand_dims(inverse, AXIS)).to(tl.float8e4nv)


@triton.jit
def _store(x, q_ptr, s_ptr, row, group, offs, P, COLUMNS: tl.constexpr):
    """x [GROUPS, 128] fp32 of a row, as codes and scales."""
    s = scale_of(x, 1)  # [GROUPS]
    here = group < COLUMNS // _BLOCK
    at = row.to(tl.int64) * COLUMNS + offs
    tl.store(q_ptr + at, codes_of(x, s, 1), mask=here[:, None])
    tl.store(s_ptr + group.to(tl.int64) * P + row, s, mask=here)


@triton.jit(do_not_specialize=["M"])
def _quantise_kernel(
    x_ptr,  # [M, K]
    q_ptr,  # [P, K] e4m3
    s_ptr,  # [K / 128, P] fp32
    M,
    P,
    stride_x,  # of a row
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,  # it may begin before what it follows has ended
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offs = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (offs < K) & (row < M)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x + offs, mask=mask, other=0.0)
    _store(x.to(tl.float32), q_ptr, s_ptr, row, group, offs, P, K)


@triton.jit(do_not_specialize=["M"])
def _silu_mul_quantise_kernel(
    gate_ptr,  # [M, N]
    up_ptr,  # [M, N]
    q_ptr,  # [P, N] e4m3
    s_ptr,  # [N / 128, P] fp32
    M,
    P,
    stride_gate,  # of a row
    stride_up,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,  # as above
):
    """silu(gate) * up, rounded to bf16 twice as torch's two operations do, quantised."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offs = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (offs < N) & (row < M)
    gate = tl.load(gate_ptr + row.to(tl.int64) * stride_gate + offs, mask=mask, other=0.0)
    up = tl.load(up_ptr + row.to(tl.int64) * stride_up + offs, mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    gate = (gate / (1.0 + tl.exp2(-1.4426950408889634 * gate))).to(tl.bfloat16)
    z = (gate.to(tl.float32) * up.to(tl.float32)).to(tl.bfloat16)
    _store(z.to(tl.float32), q_ptr, s_ptr, row, group, offs, P, N)


class _Plan:
    """The launch of all calls of a kind: the facts of the tensors, which have `columns` each."""

    __slots__ = ("kernel", "device", "P", "columns")

    def __init__(self, kernel, most: int, numbers: tuple, x: torch.Tensor):
        self.device, self.columns, self.P = x.device, x.shape[1], padded(x.shape[0])
        groups = min(most, triton.next_power_of_2(self.columns // BLOCK))
        pdl = device.overlaps_launches(x.device)
        self.kernel = Launch(
            kernel, (self.P, -(-self.columns // (BLOCK * groups))), x.device, numbers=numbers,
            constexprs=(self.columns, groups, pdl), options=(("launch_pdl", True),) if pdl else (),
            guarded=True,
        )  # fmt: skip

    def __call__(self, *tensors: torch.Tensor) -> Quantised:
        P, columns, where = self.P, self.columns, self.device
        codes = torch.empty((P, columns), dtype=torch.float8_e4m3fn, device=where)
        scales = torch.empty((columns // BLOCK, P), dtype=torch.float32, device=where)
        self.kernel(*tensors, codes, scales)
        return Quantised(codes, scales.t())


def plan_quantise_fwd(x: torch.Tensor) -> _Plan:
    """Returns the launcher of all calls like this one, which takes their tensors."""
    return _Plan(_quantise_kernel, 32, (x.shape[0], padded(x.shape[0]), x.stride(0)), x)


def plan_silu_mul_quantise_fwd(gate: torch.Tensor, up: torch.Tensor) -> _Plan:
    """Returns the launcher of all calls like this one, which takes their tensors."""
    M = gate.shape[0]
    numbers = (M, padded(M), gate.stride(0), up.stride(0))
    return _Plan(_silu_mul_quantise_kernel, 8, numbers, gate)


def quantise_fwd(x: torch.Tensor) -> Quantised:  # x [M, K]
    return plan_quantise_fwd(x)(x)


def silu_mul_quantise_fwd(gate: torch.Tensor, up: torch.Tensor) -> Quantised:  # [M, N] each
    return plan_silu_mul_quantise_fwd(gate, up)(gate, up)
