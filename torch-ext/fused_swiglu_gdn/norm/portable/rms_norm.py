"""RMSNorm: n = x rstd, rstd = 1 / sqrt(mean(x^2) + eps), y = weight n, in fp32.

Rounds where norm/reference.py rounds. Sizes: M rows (groups of R rows at one stride each), D
columns.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.copies import contiguous_like, on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.primitives import after_predecessor
from ...runtime.sizes import cdiv
from ..call import RmsNorm
from .backward import prepare_rms_norm_bwd  # noqa: F401  both are looked up in this module
from .rows import blocks, layout, lie_in_rows, readable

FEW = 64  # rows whose norm begins before the last launch has ended: many take longer so


@triton.jit
def _added(x_ptr, residual_ptr, at_x, at_residual, mask):
    """x + residual, rounded to the dtype of x, or x; as fp32."""
    x = tl.load(x_ptr + at_x, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + at_residual, mask=mask, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["M"])
def _rms_norm_fwd_kernel(
    x_ptr,  # [M, D]
    weight_ptr,  # [D] or None
    residual_ptr,  # [M, D] or None
    y_ptr,  # [M, D]
    total_ptr,  # [M, D] or None
    rstd_ptr,  # [M] or None
    M, R,
    x_group,  # strides of x
    x_row, residual_group, residual_row, eps, offset,
    D: tl.constexpr, LLAMA: tl.constexpr, AFTER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,  # this launch may begin before the last one has ended, the next one likewise
):  # fmt: skip
    """Normalises BLOCK_M rows. Rows wider than BLOCK_D are read twice."""
    after_predecessor(PDL)
    before_ptr = None if AFTER else residual_ptr
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None]
    group = (rows // R).to(tl.int64)[:, None]
    member = (rows % R).to(tl.int64)[:, None]
    at_x = group * x_group + member * x_row
    at_residual = group * residual_group + member * residual_row
    at_y = rows.to(tl.int64)[:, None] * D
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = inside & (offs_d < D)
    x = _added(x_ptr, before_ptr, at_x + offs_d, at_residual + offs_d, mask)
    square = tl.sum(x * x, 1)  # [BLOCK_M]
    for d in range(BLOCK_D, D, BLOCK_D):
        offs = d + offs_d
        far = _added(x_ptr, before_ptr, at_x + offs, at_residual + offs, inside & (offs < D))
        square += tl.sum(far * far, 1)
    rstd = tl.rsqrt(square * (1.0 / D) + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    for d in range(0, D, BLOCK_D):
        offs = d + offs_d
        mask = inside & (offs < D)
        if BLOCK_D < D:
            x = _added(x_ptr, before_ptr, at_x + offs, at_residual + offs, mask)
        if total_ptr is not None:
            tl.store(total_ptr + at_y + offs, x.to(total_ptr.dtype.element_ty), mask=mask)
        n = x * rstd[:, None]
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + offs, mask=offs < D, other=0.0).to(tl.float32)
            if LLAMA:
                n = weight * n.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                n = n * (offset + weight)
        if AFTER:
            residual = tl.load(residual_ptr + at_residual + offs, mask=mask, other=0.0)
            n = n.to(y_ptr.dtype.element_ty).to(tl.float32) + residual.to(tl.float32)
        tl.store(y_ptr + at_y + offs, n.to(y_ptr.dtype.element_ty), mask=mask)


def prepare_rms_norm_fwd(call: RmsNorm) -> Optional[Callable]:
    """(x, weight, residual) -> (y, x + residual or None, rstd or None): one launch."""
    x, weight, residual, (eps, casting_mode, offset, after, keep) = call
    D, llama = x.shape[-1], casting_mode == "llama"
    if D == 0 or not served(x, weight):
        return None
    if not lie_in_rows(x, residual) or weight is not None and not weight.is_contiguous():
        return on_copies(prepare_rms_norm_fwd, call, _copied)
    M = x.numel() // D
    config = blocks("portable_rms_norm_fwd", x.device, M, D)
    # LLVM makes these products and sums ones of 16 bits, and of the two one instruction, which does
    # not round the product
    exact = {"enable_fp_fusion": False} if llama and after else {}
    pdl = device.overlaps_launches(x.device)
    kernel = Launch(
        _rms_norm_fwd_kernel, cdiv(M, config["BLOCK_M"]), x.device,
        numbers=(M, *layout(x, residual), eps, offset), guarded=True, early=pdl and M <= FEW,
        D=D, LLAMA=llama, AFTER=after, PDL=pdl, **config, **exact,
    )  # fmt: skip
    dtype = torch.promote_types(x.dtype, weight.dtype) if llama and weight is not None else x.dtype
    make_y, make_total = contiguous_like(x, dtype), contiguous_like(x)
    added = residual is not None and not after

    def run(x, weight, residual):
        y = make_y(x)
        total = make_total(x) if added else None
        rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if keep else None
        kernel(x, weight, residual, y, total, rstd)
        return y, total, rstd

    return run


def _copied(x, weight, residual) -> tuple:
    return readable(x), weight if weight is None else weight.contiguous(), readable(residual)
