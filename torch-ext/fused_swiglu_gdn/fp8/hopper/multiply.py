"""The product of tokens and a weight in FP8 by torch: cuBLAS's, with a scale for 1 x 128 values of
the tokens and for 128 x 128 of the weight.

It is asked for by torch._scaled_mm, whose public form, torch.nn.functional.scaled_mm, gives the
same bits and costs the host 2 to 8 us more a call; that serves where a torch has no other.
cuBLAS reads the scales of a weight in rows of a multiple of four, which torch takes as they lie
only where K is a multiple of 512. What torch, CUDA and the GPU have is tried once for each device.
"""

from typing import Callable, Dict, Optional

import torch
import torch.nn.functional as F

from ..call import BLOCK, ROWS, Product, Quantised

_works: Dict[int, bool] = {}  # by the index of a device


def prepare_multiply_fwd(call: Product) -> Optional[Callable]:
    """(weight, scale, x) -> [P, N] bf16, for tokens x in FP8."""
    weight, scale, _ = call
    if weight.dtype is not torch.float8_e4m3fn or scale.dtype is not torch.float32:
        return None
    N, K = weight.shape
    dense = weight.is_contiguous() and scale.is_contiguous() and scale.device == weight.device
    fits = K > 0 and K % (4 * BLOCK) == 0 and N >= BLOCK and N % ROWS == 0
    shape = (-(-N // BLOCK), K // BLOCK)
    served = dense and fits and scale.shape == shape and _has_product(weight.device)
    return _way() if served else None


def _way() -> Callable:
    return _multiply if hasattr(torch, "_scaled_mm") else _multiply_publicly


def _multiply(
    weight: torch.Tensor,  # [N, K]
    scale: torch.Tensor,  # [ceil(N / BLOCK), K / BLOCK]
    x: Quantised,  # [P, K]
) -> torch.Tensor:  # [P, N] bf16
    return torch._scaled_mm(
        x.codes, weight.t(), scale_a=x.scales, scale_b=scale.t(), out_dtype=torch.bfloat16
    )


def _multiply_publicly(weight: torch.Tensor, scale: torch.Tensor, x: Quantised) -> torch.Tensor:
    kinds = F.ScalingType
    return F.scaled_mm(
        x.codes, weight.t(), x.scales, kinds.BlockWise1x128, scale.t(), kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


def _has_product(where: torch.device) -> bool:
    if where.type != "cuda":
        return False
    if where.index not in _works:
        if torch.cuda.is_current_stream_capturing():
            return False  # values cannot be looked at
        _works[where.index] = _is_right(where)
    return _works[where.index]


def _is_right(where: torch.device) -> bool:
    """Returns True if torch's product applies the scales where they belong, those of a last block
    of 16 rows too."""
    random = torch.Generator("cpu").manual_seed(0)
    P, N, K = 32, 2 * BLOCK + ROWS, 8 * BLOCK

    def values(*shape):
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)

    codes, weight = (values(n, K).to(torch.float8_e4m3fn) for n in (P, N))
    scales, scale = values(K // BLOCK, P).exp(), values(-(-N // BLOCK), K // BLOCK).exp()
    wide = scale.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)
    tokens = codes.double() * scales.t().repeat_interleave(BLOCK, 1)
    exact = tokens @ (weight.double() * wide).t()
    codes, weight, scales, scale = (x.to(where) for x in (codes, weight, scales, scale))
    try:
        y = _way()(weight, scale, Quantised(codes, scales.t())).cpu()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return bool((y - exact).norm() <= 1e-2 * exact.norm())
