"""The gradient of RMSNorm (rms_norm.py), in one pass over its inputs.

With n = x rstd and y = weight n:

    dn = dy weight        dx = rstd (dn - n mean(dn n)) + dtotal
    dweight = sum over rows of dy n

Sizes: M rows, D columns; P programs, each of which leaves its part of dweight for a second kernel.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.copies import contiguous_like, on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import RmsNormGradient
from .rows import blocks, layout, lie_in_rows, readable

COLUMNS = 32  # that a program of the last sum takes
HELD = tl.constexpr(8192)  # columns up to which a program keeps the weight in registers


@triton.jit
def _loaded(ptr, rows, R, stride_group, stride_row, offs, mask):
    """Loads rows at two strides as [BLOCK_M, BLOCK_D] fp32."""
    group = (rows // R).to(tl.int64)
    member = (rows % R).to(tl.int64)
    at = group * stride_group + member * stride_row
    return tl.load(ptr + at[:, None] + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weight(weight_ptr, offs, offset, D: tl.constexpr):
    """offset + weight [1, BLOCK_D] fp32, or 1."""
    weight = 1.0
    if weight_ptr is not None:
        weight = offset + tl.load(weight_ptr + offs, mask=offs < D, other=0.0).to(tl.float32)
    return weight


@triton.jit
def _rms_norm_mean_kernel(
    x_ptr,  # [M, D]
    rstd_ptr,  # [M]
    weight_ptr,  # [D] or None
    dy_ptr,  # [M, D]
    mean_ptr,  # [M] fp32
    M, R,
    x_group,  # strides of x
    x_row, dy_group, dy_row, offset,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """mean(dn n) of a row, for rows that are wider than a block."""
    row = tl.program_id(0) + tl.arange(0, 1)
    rstd = tl.load(rstd_ptr + row)
    total = tl.zeros((1,), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs = d + tl.arange(0, BLOCK_D)[None, :]
        x = _loaded(x_ptr, row, R, x_group, x_row, offs, offs < D)
        dy = _loaded(dy_ptr, row, R, dy_group, dy_row, offs, offs < D)
        dn = dy * _weight(weight_ptr, offs, offset, D)
        total += tl.sum(dn * x * rstd[:, None], 1)
    tl.store(mean_ptr + row, total * (1.0 / D))


@triton.jit
def _rms_norm_bwd_kernel(
    x_ptr,  # [M, D]
    rstd_ptr,  # [M]
    weight_ptr,  # [D] or None
    dy_ptr,  # [M, D]
    dtotal_ptr,  # [M, D] or None
    mean_ptr,  # [M], or None where BLOCK_D columns are the row
    dx_ptr,  # [M, D]
    parts_ptr,  # [P, D] fp32 or None
    M, R,
    x_group,  # strides of x
    x_row, dy_group, dy_row, dtotal_group, dtotal_row, offset, TILES,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of BLOCK_D columns of TILES tiles of BLOCK_M rows, and their contribution to dweight.

    Tile i belongs to program i mod P.
    """
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    weight = _weight(weight_ptr, offs, offset, D)
    parts = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        first = (tile * tl.num_programs(0) + tl.program_id(0)) * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (offs < D)
        x = _loaded(x_ptr, rows, R, x_group, x_row, offs, mask)
        dy = _loaded(dy_ptr, rows, R, dy_group, dy_row, offs, mask)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        if BLOCK_D > HELD:
            weight = _weight(weight_ptr, offs, offset, D)
        n = x * rstd
        dn = dy * weight
        if mean_ptr is None:
            mean = tl.sum(dn * n, 1)[:, None] * (1.0 / D)
        else:
            mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)[:, None]
        dx = rstd * (dn - n * mean)
        if dtotal_ptr is not None:
            dx += _loaded(dtotal_ptr, rows, R, dtotal_group, dtotal_row, offs, mask)
        at = rows.to(tl.int64)[:, None] * D + offs
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if parts_ptr is not None:
            parts += dy * n
    if parts_ptr is not None:
        columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        at = tl.program_id(0).to(tl.int64) * D + columns
        tl.store(parts_ptr + at, tl.sum(parts, 0), mask=columns < D)


@triton.jit
def _sum_kernel(
    parts_ptr,  # [P, D] fp32
    sum_ptr,  # [D]
    P,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums BLOCK_D columns over P."""
    offs = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for p in range(0, P, BLOCK_P):
        part = p + tl.arange(0, BLOCK_P)
        mask = (part < P)[:, None] & (offs < D)[None, :]
        at = part.to(tl.int64)[:, None] * D + offs[None, :]
        total += tl.load(parts_ptr + at, mask=mask, other=0.0)
    tl.store(sum_ptr + offs, tl.sum(total, 0).to(sum_ptr.dtype.element_ty), mask=offs < D)


def _stages(config: dict, width: int, weight: int) -> int:
    """Pipeline stages of the loop over tiles that fit in shared memory.

    Each stage but one holds a tile of every tensor that is read.
    """
    tile, shared = config["BLOCK_M"] * config["BLOCK_D"], config["shared"]
    most = min(config["STAGES"], max(1, shared // (width * tile)))  # as tuned
    read = width + weight if config["BLOCK_D"] > HELD.value else width
    return min(most, 1 + shared // (read * tile))


def prepare_rms_norm_bwd(call: RmsNormGradient) -> Optional[Callable]:
    """(x, rstd, weight, dy, dtotal) -> (dx, dweight or None): one launch, one more for dweight, and
    one for rows that are wider than a block."""
    x, rstd, weight, dy, dtotal, (offset, needs_weight) = call
    D, where = x.shape[-1], x.device
    if D == 0 or not served(x, rstd, weight):
        return None
    if not lie_in_rows(x, dy, dtotal) or weight is not None and not weight.is_contiguous():
        return on_copies(prepare_rms_norm_bwd, call, _copied)
    if x.numel() == 0:
        return _of_nothing(needs_weight)
    M, rows = x.numel() // D, layout(x, dy, dtotal)
    config = blocks("portable_rms_norm_bwd", where, M, D)
    tiles = cdiv(M, config["BLOCK_M"])
    width = sum([t.element_size() for t in (x, dy, dtotal) if t is not None])
    config["STAGES"] = _stages(config, width, 0 if weight is None else weight.element_size())
    del config["shared"]
    processors = device.multiprocessor_count(where.index) if device.is_gpu(where) else 1
    programs = min(tiles, config.pop("per_processor") * processors)
    gradient = Launch(
        _rms_norm_bwd_kernel, (programs, cdiv(D, config["BLOCK_D"])), where,
        numbers=(M, *rows, offset, cdiv(tiles, programs)), guarded=True, D=D, **config,
    )  # fmt: skip
    mean = Launch(
        _rms_norm_mean_kernel, M, where, numbers=(M, *rows[:5], offset),
        constexprs=(D, 4096), options=(("num_warps", 8),), guarded=True,
    )  # fmt: skip
    parts = min(512, next_power_of_2(programs))
    add = Launch(
        _sum_kernel, cdiv(D, COLUMNS), where, numbers=(programs,),
        constexprs=(D, parts, COLUMNS), options=(("num_warps", 8),), guarded=True,
    )  # fmt: skip
    wide, make = config["BLOCK_D"] < D, contiguous_like(x)

    def run(x, rstd, weight, dy, dtotal):
        dx, means, parts, dweight = make(x), None, None, None
        if wide:
            means = x.new_empty(M, dtype=torch.float32)
            mean(x, rstd, weight, dy, means)
        if needs_weight:
            parts = x.new_empty((programs, D), dtype=torch.float32)  # [P, D]
        gradient(x, rstd, weight, dy, dtotal, means, dx, parts)
        if needs_weight:
            dweight = torch.empty_like(weight)
            add(parts, dweight)
        return dx, dweight

    return run


def _copied(x, rstd, weight, dy, dtotal) -> tuple:
    weight = weight if weight is None else weight.contiguous()
    return readable(x), rstd, weight, readable(dy), readable(dtotal)


def _of_nothing(needs_weight: bool) -> Callable:
    """For a call without rows."""

    def run(x, rstd, weight, dy, dtotal):
        return torch.empty_like(x), torch.zeros_like(weight) if needs_weight else None

    return run
