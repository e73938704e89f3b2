"""RMSNorm, with a residual added before, and its result in FP8 besides: one launch.

norm/portable/rms_norm.py has the norm, quantise.py the formula of codes and scales. A program takes
a row. Sizes: M rows, P of them with padding, D columns.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.launch import Launch
from ...runtime.sizes import next_power_of_2
from ..call import BLOCK, MOST, NormQuantise, Quantised, blocks_of, padded
from .quantise import is_quantised_here, making, store_codes

_BLOCK = tl.constexpr(BLOCK)
WIDEST = 16384  # columns, which a program holds


def _supports(call: NormQuantise) -> bool:
    x, weight, residual, (_, casting_mode, _) = call
    alike = residual is None or (residual.shape == x.shape and residual.dtype is x.dtype)
    dense = all(t is None or t.is_contiguous() for t in (x, weight, residual))
    rounds = weight is None or weight.dtype is x.dtype or casting_mode != "llama"
    rows = x.view(-1, x.shape[-1]) if dense and x.ndim > 0 else None
    return (
        rows is not None
        and alike
        and rounds  # else y is of the weight's dtype
        and (weight is None or weight.dtype in (torch.bfloat16, torch.float32))
        and x.shape[-1] <= WIDEST
        and is_quantised_here(rows)
    )


@triton.jit(do_not_specialize=["M"])
def _norm_quantise_kernel(
    x_ptr,  # [M, D]
    weight_ptr,  # [D] or None
    residual_ptr,  # [M, D] or None
    y_ptr,  # [M, D]
    total_ptr,  # [M, D], with a residual
    q_ptr,  # [P, D] e4m3
    s_ptr,  # [ceil(D / 128), P] fp32
    M, P, eps, offset,
    D: tl.constexpr, LLAMA: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr,  # it may begin before what it follows has ended
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    offs = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (offs < D) & (row < M)
    at = row.to(tl.int64) * D + offs
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total = x.to(tl.bfloat16)
        tl.store(total_ptr + at, total, mask=mask)
        x = total.to(tl.float32)
    n = x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) * (1.0 / D) + eps)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offs, mask=offs < D, other=0.0).to(tl.float32)
        if LLAMA:
            n = weight * n.to(tl.bfloat16).to(tl.float32)
        else:
            n = n * (offset + weight)
    y = n.to(tl.bfloat16)
    tl.store(y_ptr + at, y, mask=mask)
    store_codes(y.to(tl.float32), q_ptr, s_ptr, row, group, offs, P, D)


def prepare_norm_quantise_fwd(call: NormQuantise) -> Optional[Callable]:
    """(x, weight, residual) -> (y, x + residual or None, y in FP8)."""
    if not _supports(call):
        return None
    x, (eps, casting_mode, offset) = call.x, call.options
    D, where = x.shape[-1], x.device
    M = x.numel() // D
    groups, pdl, P = next_power_of_2(blocks_of(D)), device.overlaps_launches(where), padded(M)
    kernel = Launch(
        _norm_quantise_kernel, P, where, numbers=(M, P, eps, offset),
        constexprs=(D, casting_mode == "llama", groups, pdl),
        options=(("num_warps", 4 if groups <= 32 else 8),), guarded=True, early=pdl,
    )  # fmt: skip
    (make, scales_of), few = making(where, M, D), M <= MOST

    def run(x, weight, residual) -> tuple:
        y = torch.empty_like(x)
        total = None if residual is None else torch.empty_like(x)
        codes = make()
        scales = scales_of(codes)
        kernel(x, weight, residual, y, total, codes, scales)
        return y, total, Quantised(codes, None if few else scales)

    return run
