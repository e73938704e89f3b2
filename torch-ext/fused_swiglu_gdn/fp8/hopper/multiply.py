"""The product of many tokens and a weight in FP8 by torch: cuBLAS's, with a scale for 1 x 128
values of the tokens and for 128 x 128 of the weight.

cuBLAS reads the scales of a weight in rows of a multiple of four. Where K is a multiple of 512 they
lie so, and torch._scaled_mm takes them; its public form, torch.nn.functional.scaled_mm, gives the
same bits and costs the host 2 to 8 us more a call. It alone takes rows that are longer than K: for
other K the scales, never the weight, are copied in each call. What torch, CUDA and the GPU have is
tried once for each device.
"""

from typing import Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F

from ..call import BLOCK, E8M0, ROWS, Product, Quantised, blocks_of, is_scaled

FOUR = 4  # scales that cuBLAS reads at once
_works: Dict[Tuple[int, bool], bool] = {}  # by the index of a device, and whether K is odd


def prepare_multiply_fwd(call: Product) -> Optional[Callable]:
    """(weight, scale, x) -> [P, N] bf16, for tokens x in FP8."""
    weight, scale, _ = call
    if not is_scaled(weight, scale) or any([n % ROWS for n in weight.shape]):
        return None
    K = weight.shape[1]
    if not _has_product(weight.device, _is_odd(K)):
        return None
    if _is_odd(K):
        return lambda weight, scale, x: _multiply_publicly(weight, _in_fours(scale), x)
    if scale.dtype is E8M0:
        return lambda weight, scale, x: _multiply(weight, scale.float(), x)
    return _multiply


def _is_odd(K: int) -> bool:
    """True if scales of K columns do not lie in rows of a multiple of four."""
    return K % (FOUR * BLOCK) > 0


def _in_fours(scale: torch.Tensor) -> torch.Tensor:
    """The scales in fp32, in rows of a multiple of four; what stands behind them is not used."""
    rows, blocks = scale.shape
    found = scale.new_empty((rows, -(-blocks // FOUR) * FOUR), dtype=torch.float32)
    found[:, :blocks] = scale
    return found


def _multiply(
    weight: torch.Tensor,  # [N, K]
    scale: torch.Tensor,  # [ceil(N / BLOCK), K / BLOCK], or in rows of a multiple of four
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


def _has_product(where: torch.device, odd: bool = False) -> bool:
    if where.type != "cuda":
        return False
    key = where.index, odd
    if key not in _works:
        if torch.cuda.is_current_stream_capturing():
            return False  # values cannot be looked at
        _works[key] = _is_right(where, odd)
    return _works[key]


def _is_right(where: torch.device, odd: bool = False) -> bool:
    """Returns True if torch's product applies the scales where they belong, those of a last block
    of 16 rows, or of 16 columns, too."""
    random = torch.Generator("cpu").manual_seed(0)
    P, N, K = 32, 2 * BLOCK + ROWS, 4 * BLOCK + ROWS if odd else 8 * BLOCK

    def values(*shape):
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)

    codes, weight = (values(n, K).to(torch.float8_e4m3fn) for n in (P, N))
    scales, scale = values(blocks_of(K), P).exp(), values(blocks_of(N), blocks_of(K)).exp()
    wide = scale.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    tokens = codes.double() * scales.t().repeat_interleave(BLOCK, 1)[:, :K]
    exact = tokens @ (weight.double() * wide).t()
    codes, weight, scales, scale = (x.to(where) for x in (codes, weight, scales, scale))
    try:
        x = Quantised(codes, scales.t())
        multiply = _multiply_publicly if odd else _multiply
        y = multiply(weight, _in_fours(scale) if odd else scale, x).cpu()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return bool((y - exact).norm() <= 1e-2 * exact.norm())
