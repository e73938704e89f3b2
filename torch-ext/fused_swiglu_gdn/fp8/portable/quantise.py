"""Tokens in FP8, alone and from the gate of an MLP, in one launch (reference.py has the formula).

A program takes one row of GROUPS times 128 columns, of which the last may be fewer. The largest
magnitude is found among the bits of the values as integers, of which those of NaN are the largest.

Sizes: M tokens, P of them with padding, K or N columns.
"""

import functools
from typing import Callable

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.launch import Launch
from ...runtime.maps import RawPointer
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import BLOCK, INVERSE, LEAST, MOST, ROWS, Quantised, blocks_of, padded

_BLOCK, _LEAST, _INVERSE = tl.constexpr(BLOCK), tl.constexpr(LEAST), tl.constexpr(INVERSE)


def is_quantised_here(x: torch.Tensor) -> bool:
    """True if these kernels take the values x [M, K]."""
    if x.dtype is not torch.bfloat16 or not x.numel() or x.shape[1] % ROWS or x.stride(1) != 1:
        return False
    return device.has_e4m3(x.device)


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
def columns_of_row(GROUPS: tl.constexpr, PDL: tl.constexpr):
    """A program's row, its GROUPS blocks of columns and their offsets [GROUPS, 128]. PDL: it may
    begin before what it follows has ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offs = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    return row, group, offs


@triton.jit
def store_codes(x, q_ptr, s_ptr, row, group, offs, P, COLUMNS: tl.constexpr):
    """x [GROUPS, 128] fp32 of a row, as codes and scales."""
    s = scale_of(x, 1)  # [GROUPS]
    here = group < (COLUMNS + _BLOCK - 1) // _BLOCK
    mask = here[:, None] if COLUMNS // _BLOCK * _BLOCK == COLUMNS else offs < COLUMNS
    at = row.to(tl.int64) * COLUMNS + offs
    tl.store(q_ptr + at, codes_of(x, s, 1), mask=mask)
    tl.store(s_ptr + group.to(tl.int64) * P + row, s, mask=here)


@triton.jit(do_not_specialize=["M"])
def _quantise_kernel(
    x_ptr,  # [M, K]
    q_ptr,  # [P, K] e4m3
    s_ptr,  # [ceil(K / 128), P] fp32
    M,
    P,
    stride_x,  # of a row
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,  # it may begin before what it follows has ended
):
    row, group, offs = columns_of_row(GROUPS, PDL)
    mask = (offs < K) & (row < M)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x + offs, mask=mask, other=0.0)
    store_codes(x.to(tl.float32), q_ptr, s_ptr, row, group, offs, P, K)


@triton.jit(do_not_specialize=["M"])
def _silu_mul_quantise_kernel(
    gate_ptr,  # [M, N]
    up_ptr,  # [M, N]
    q_ptr,  # [P, N] e4m3
    s_ptr,  # [ceil(N / 128), P] fp32
    M, P,
    stride_gate,  # of a row
    stride_up,
    N: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr,  # as above
):  # fmt: skip
    """silu(gate) * up, rounded to bf16 twice as torch's two operations do, quantised."""
    row, group, offs = columns_of_row(GROUPS, PDL)
    mask = (offs < N) & (row < M)
    gate = tl.load(gate_ptr + row.to(tl.int64) * stride_gate + offs, mask=mask, other=0.0)
    up = tl.load(up_ptr + row.to(tl.int64) * stride_up + offs, mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    gate = (gate / (1.0 + tl.exp2(-1.4426950408889634 * gate))).to(tl.bfloat16)
    z = (gate.to(tl.float32) * up.to(tl.float32)).to(tl.bfloat16)
    store_codes(z.to(tl.float32), q_ptr, s_ptr, row, group, offs, P, N)


def launch_of(
    kernel, most: int, numbers: tuple, where: torch.device, shape: tuple, *more
) -> Launch:
    """A launch of a kernel for values of a shape, a program for a row and at most `most` blocks of
    its columns; more: further constexprs."""
    M, columns = shape
    P, groups = padded(M), min(most, next_power_of_2(blocks_of(columns)))
    pdl = device.overlaps_launches(where)
    return Launch(
        kernel, (P, -(-columns // (BLOCK * groups))), where, numbers=(M, P, *numbers),
        constexprs=(columns, groups, pdl, *more), guarded=True, early=pdl,
    )  # fmt: skip


def quantise_launch(rows: torch.Tensor) -> Launch:
    """A launch of (x, codes, scales) for x like `rows` [M, K]."""
    return launch_of(_quantise_kernel, 32, (rows.stride(0),), rows.device, rows.shape)


def gate_launch(where: torch.device, shape: tuple, strides: tuple) -> Launch:
    """A launch of (gate, up, codes, scales), of silu(gate) * up for values of this shape with these
    strides of rows."""
    return launch_of(_silu_mul_quantise_kernel, 8, strides, where, shape)


def making(where: torch.device, tokens: int, columns: int, floats: int = 0) -> tuple:
    """A function that makes codes of tokens, which are to be written, and one that gives their
    scales, as kernels take them.

    Scales of up to MOST tokens are behind the codes, in the same memory, and behind them `floats`
    of fp32: an allocation takes the host 2 us. Those of more are a tensor of their own, as torch's
    product takes them.
    """
    P, blocks = padded(tokens), blocks_of(columns)
    fp8 = {"dtype": torch.float8_e4m3fn, "device": where}
    empty = torch.empty_strided  # torch.empty is slower by half
    if tokens > MOST:
        shape, fp32 = (P, blocks), {"dtype": torch.float32, "device": where}
        make = functools.partial(empty, (P, columns), (columns, 1), **fp8)
        return make, lambda codes: empty(shape, (1, P), **fp32)
    rows = P + cdiv(4 * (P * blocks + floats), columns)
    make = functools.partial(empty, (rows, columns), (columns, 1), **fp8)
    return make, behind(where, P * columns)


def behind(where: torch.device, end: int) -> Callable:
    """A function of codes that gives the fp32 behind the first `end` of them, as kernels take
    them."""
    if not device.is_gpu(where):  # the interpreter takes tensors alone
        return lambda codes: codes.view(-1)[end:].view(torch.float32)
    fp32 = torch.float32
    return lambda codes: RawPointer(codes.data_ptr() + end, fp32)


def quantising(launch: Launch, where: torch.device, shape: tuple) -> Callable:
    """A function of the tensors before codes and scales of a launch, which returns these."""
    (make, scales_of), few = making(where, *shape), shape[0] <= MOST

    def run(*tensors: torch.Tensor) -> Quantised:
        codes = make()
        scales = scales_of(codes)
        launch(*tensors, codes, scales)
        return Quantised(codes, None if few else scales)

    return run


def quantiser(x: torch.Tensor) -> Callable:
    """x -> x in FP8, for values like x [M, K] that is_quantised_here()."""
    return quantising(quantise_launch(x), x.device, x.shape)
