"""RMSNorm: n = x rstd, rstd = 1 / sqrt(mean(x^2) + eps), y = weight n, in fp32.

Rounds where norm/reference.py rounds. Sizes: M rows (groups of R rows at one stride each), D
columns.
"""

import functools
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.dtypes import SERVED
from ...runtime.launch import Launch, named
from .backward import rms_norm_bwd, supports_rms_norm_bwd  # noqa: F401
from .rows import blocks, layout, readable


def supports_rms_norm_fwd(x, weight, *_) -> bool:
    return x.shape[-1] > 0 and all(t is None or t.dtype in SERVED for t in (x, weight))


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
    M,
    R,
    x_group,  # strides of x
    x_row,
    residual_group,
    residual_row,
    eps,
    offset,
    D: tl.constexpr,
    LLAMA: tl.constexpr,
    AFTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,  # the next launch may begin before this one has ended
):
    """Normalises BLOCK_M rows. Rows wider than BLOCK_D are read twice."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
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


def _launch(
    where: torch.device,
    M: int,
    D: int,
    llama: bool,
    after: bool,
    rows: tuple,
    guarded: bool,
    *numbers: float,
) -> Launch:
    """rows: as from layout(); numbers: eps, offset."""
    config = blocks("portable_rms_norm_fwd", where, M, D)
    # LLVM makes these products and sums ones of 16 bits, and of the two one instruction, which does
    # not round the product
    exact = {"enable_fp_fusion": False} if llama and after else {}
    constexprs, options = named(
        _rms_norm_fwd_kernel, D=D, LLAMA=llama, AFTER=after, PDL=device.overlaps_launches(where),
        **config, **exact,
    )  # fmt: skip
    return Launch(
        _rms_norm_fwd_kernel, triton.cdiv(M, config["BLOCK_M"]), where,
        numbers=(M, *rows, *numbers), constexprs=constexprs, options=options, guarded=guarded,
    )  # fmt: skip


_kept = functools.lru_cache(maxsize=1024, typed=True)(_launch)


def _dtype(x: torch.Tensor, weight: Optional[torch.Tensor], llama: bool) -> torch.dtype:
    """The dtype of y."""
    return torch.promote_types(x.dtype, weight.dtype) if llama and weight is not None else x.dtype


def rms_norm_fwd(
    x: torch.Tensor,  # [..., D]
    weight: Optional[torch.Tensor],  # [D]
    residual: Optional[torch.Tensor],  # [..., D]
    eps: float,
    casting_mode: str,
    offset: float,
    keep: bool,
    after: bool = False,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """y [..., D], x + residual [..., D] or None, rstd [...] or None: one launch."""
    added = residual is not None and not after
    D, llama = x.shape[-1], casting_mode == "llama"
    M = x.numel() // D
    y = torch.empty(x.shape, dtype=_dtype(x, weight, llama), device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if added else None
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if keep else None
    if M > 0:
        x, residual = readable(x), readable(residual)
        kernel = _kept(x.device, M, D, llama, after, layout(x, residual), False, eps, offset)
        weight = weight if weight is None else weight.contiguous()
        kernel(x, weight, residual, y, total, rstd)
    return y, total, rstd


def plan_rms_norm_fwd(x, weight, residual, eps, casting_mode, offset, keep, after=False):
    """Returns rms_norm_fwd as a function of the tensors, for all matching calls; or None."""
    D, llama = x.shape[-1], casting_mode == "llama"
    if x.numel() == 0 or not all(t is None or t.is_contiguous() for t in (x, weight, residual)):
        return None
    rows = layout(x, residual)
    kernel = _launch(x.device, x.numel() // D, D, llama, after, rows, True, eps, offset)
    added = residual is not None and not after
    dtype, empty_like = _dtype(x, weight, llama), torch.empty_like
    empty = empty_like if dtype is x.dtype else functools.partial(empty_like, dtype=dtype)

    def run(x, weight, residual):
        y = empty(x)
        total = empty_like(x) if added else None
        rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if keep else None
        kernel(x, weight, residual, y, total, rstd)
        return y, total, rstd

    return run
