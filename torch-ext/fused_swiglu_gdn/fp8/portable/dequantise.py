"""Weights in FP8 with a scale for 128 x 128 values, in bf16: for gradients of tokens.

A program takes a few rows of one block of scales. Sizes: N rows, K columns.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.launch import Launch
from ..call import BLOCK, Dequantise, blocks_of, is_scaled

_BLOCK = tl.constexpr(BLOCK)
ROWS = 32  # of a program


@triton.jit
def weight_scale(ptr):
    """Scales of a weight in fp32, or in e8m0 as bytes: 2^(byte - 127), NaN for 255."""
    scale = tl.load(ptr)
    if ptr.dtype.element_ty == tl.uint8:
        bits = scale.to(tl.int32) << 23
        bits = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, bits))
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _dequantise_kernel(
    weight_ptr,  # [N, K] e4m3
    scale_ptr,  # [ceil(N / 128), ceil(K / 128)] fp32
    y_ptr,  # [N, K] bf16
    N,
    K,
    ROWS: tl.constexpr,
):
    """y = weight * scale, rounded once."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1)
    columns = column * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    offs = rows[:, None] * K + columns
    mask = (rows < N)[:, None] & (columns < K)
    blocks = tl.cdiv(K, _BLOCK)
    scale = tl.load(scale_ptr + tl.program_id(0) * ROWS // _BLOCK * blocks + column)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (weight * scale).to(tl.bfloat16), mask=mask)


def prepare_dequantise_fwd(call: Dequantise) -> Optional[Callable]:
    """(weight, scale) -> [N, K] bf16."""
    weight, scale, _ = call
    where = weight.device
    if not is_scaled(weight, scale) or scale.dtype is not torch.float32:
        return None
    if not device.has_e4m3(where):
        return None
    N, K = weight.shape
    kernel = Launch(
        _dequantise_kernel, (-(-N // ROWS), blocks_of(K)), where, numbers=(N, K),
        constexprs=(ROWS,), guarded=True,
    )  # fmt: skip

    def run(weight, scale) -> torch.Tensor:
        y = torch.empty((N, K), dtype=torch.bfloat16, device=where)
        kernel(weight, scale, y)
        return y

    return run
