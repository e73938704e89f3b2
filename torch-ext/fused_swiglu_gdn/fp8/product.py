"""Tokens in FP8 and their products with weights in FP8. For the layers; not part of the API."""

from typing import Callable, Optional

from torch import Tensor

from ..projection.call import MAX_WEIGHTS
from . import reference
from .call import MAX_PLAIN, Quantised
from .ops import DEQUANTISE, FEW, FEW_MLP, GATE, NORM, PRODUCT, QUANTISE, QUANTISE_FEW


def quantise(x: Tensor) -> Optional[Quantised]:
    """x [M, K] bf16 in e4m3, with a scale for each 128 columns; None where no kernel serves."""
    return QUANTISE((x,))


def silu_mul_quantise(gate: Tensor, up: Tensor) -> Optional[Quantised]:
    """silu(gate) * up of [M, N] bf16 each, in e4m3; rounded to bf16 after each of the two."""
    return GATE((gate, up))


def product_of(weight: Tensor, scale: Tensor) -> Optional[Callable]:
    """Returns the function that multiplies with weight [N, K] e4m3 and its scale [ceil(N / 128), K
    / 128] fp32: takes them and tokens in FP8, gives [P, N] bf16. None where nothing does; told
    before any launch."""
    return PRODUCT.serving((weight, scale))


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """Returns weight [N, K] e4m3 times its scale in bf16; without a kernel by torch."""
    y = DEQUANTISE((weight, scale))
    return reference.dequantise_fwd(weight, scale) if y is None else y


def norm_quantise(x: Tensor, weight: Optional[Tensor], residual: Optional[Tensor], *how):
    """(y, x + residual or None, y in FP8) of RMSNorm of x [..., K] bf16; how: eps, casting_mode and
    offset, as rms_norm has them. None where no kernel serves."""
    return NORM((x, weight, residual), how)


def few(
    x: Quantised,
    M: int,
    weights: tuple,
    scales: tuple,
    plain: tuple = (),
    tokens: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """x W^T of the M tokens of x with each of the weights, side by side [M, N] bf16, in one or two
    launches; behind them those of `tokens`, x in bf16, with weights in bf16. None where M is no
    small number or no kernel serves. All weights begin at multiples of 16 bytes."""
    count, others = len(weights), len(plain)
    if count > MAX_WEIGHTS or others > MAX_PLAIN:
        return None
    absent = _ABSENT[count:]
    more = (tokens, *plain, None) if others == 1 else (tokens, *plain) if others else _NOTHING
    return FEW((*x, *weights, *absent, *scales, *absent, *more), (M,))


def quantise_few(x: Tensor, weight: Tensor, scale: Tensor) -> Optional[Tensor]:
    """x W^T of few tokens x [..., K] bf16, which are quantised first, [..., N]. None as above."""
    return QUANTISE_FEW((x, weight, scale))


def few_mlp(
    x: Quantised, M: int, weights: tuple, scales: tuple, residual: Optional[Tensor] = None
) -> Optional[Tensor]:
    """down(silu(gate(x)) * up(x)) of the M tokens of x, [M, K] bf16, with residual [M, K] bf16
    added; weights and scales of gate, up and down. None as above."""
    return FEW_MLP((*x, *weights, *scales, residual), (M,))


_ABSENT, _NOTHING = (None,) * MAX_WEIGHTS, (None,) * (1 + MAX_PLAIN)
