"""The gradient of the gated RMSNorm (rms_norm_gated.py), in one pass over its inputs.

With n = x rstd, rstd = 1 / sqrt(mean(x^2) + eps) and y = weight n act(gate):

    dgate = dy weight n act'(gate)        dweight = sum over rows of dy n act(gate)
    dn = dy weight act(gate)              dx = rstd (dn - n mean(dn n))

Sizes: M rows, D channels; P programs.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...norm.portable.rows import lie_in_rows, two_strides
from ...runtime import tuning
from ...runtime.copies import contiguous_like, on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import GatedNormGradient
from .rms_norm_gated import MAX_CHANNELS, copied, gate_activation, rows_of_a_group


@triton.jit
def _rms_norm_gated_bwd_kernel(
    x_ptr,  # [M, D]
    gate_ptr,  # [M, D]
    weight_ptr,  # [D]
    dy_ptr,  # [M, D]
    dx_ptr,  # [M, D]
    dgate_ptr,  # [M, D]
    dweight_ptr,  # [P, D] fp32
    x_strides,  # of a group, a row
    gate_strides, dy_strides,
    M, R, eps,
    D: tl.constexpr, SILU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """dx and dgate of TILES tiles of BLOCK_M rows, and their contribution to dweight."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = tl.program_id(0) * (TILES * BLOCK_M)
    for tile in range(0, TILES):
        rows = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None]
        mask = inside & (offs_d < D)
        group = (rows // R).to(tl.int64)
        member = (rows % R).to(tl.int64)
        x_rows = x_ptr + group * x_strides[0] + member * x_strides[1]
        gate_rows = gate_ptr + group * gate_strides[0] + member * gate_strides[1]
        dy_rows = dy_ptr + group * dy_strides[0] + member * dy_strides[1]
        x = tl.load(x_rows[:, None] + offs_d, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_rows[:, None] + offs_d, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_rows[:, None] + offs_d, mask=mask, other=0.0).to(tl.float32)
        square = tl.where(inside, (tl.sum(x * x, 1) / D + eps)[:, None], 1.0)
        rstd = tl.rsqrt(square)  # [BLOCK_M, 1] fp32; rows that are not there add 0 to dweight
        n = x * rstd
        act = gate_activation(gate, SILU)
        sigmoid = gate_activation(gate, False)
        slope = sigmoid * (1.0 - sigmoid)
        if SILU:
            slope = sigmoid + gate * slope
        dweight += dy * n * act
        dn = dy * weight * act
        dx = rstd * (dn - n * (tl.sum(dn * n, 1) / D)[:, None])
        at = rows.to(tl.int64)[:, None] * D + offs_d
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dgate = dy * weight * n * slope
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    at = tl.program_id(0) * D + tl.arange(0, BLOCK_D)
    tl.store(dweight_ptr + at, tl.sum(dweight, 0), mask=tl.arange(0, BLOCK_D) < D)


def prepare_rms_norm_gated_bwd(call: GatedNormGradient) -> Optional[Callable]:
    """(x, gate, weight, dy) -> (dx, dgate, dweight): one launch, and the sum over its programs."""
    x, gate, weight, dy, (eps, activation) = call
    D, where = x.shape[-1], x.device
    if not served(x, gate, weight) or not 0 < D <= MAX_CHANNELS:
        return None
    if not lie_in_rows(x, gate, dy) or not weight.is_contiguous():
        return on_copies(prepare_rms_norm_gated_bwd, call, copied)
    M, config = x.numel() // D, tuning.lookup("portable_rms_norm_gated_bwd", where, D=D)
    programs = cdiv(M, config["BLOCK_M"] * config["TILES"])
    kernel = Launch(
        _rms_norm_gated_bwd_kernel, programs, where,
        numbers=(*map(two_strides, (x, gate, dy)), M, rows_of_a_group(x), eps), guarded=True, D=D,
        SILU=activation == "silu", BLOCK_D=next_power_of_2(D), **config,
    )  # fmt: skip
    make_dx, make_dgate, dtype = contiguous_like(x), contiguous_like(gate), weight.dtype

    def run(x, gate, weight, dy):
        dx, dgate = make_dx(x), make_dgate(gate)  # [..., D]
        dweight = torch.empty(programs, D, dtype=torch.float32, device=where)  # [P, D]
        kernel(x, gate, weight, dy, dx, dgate, dweight)
        return dx, dgate, dweight.sum(0).to(dtype)

    return run
