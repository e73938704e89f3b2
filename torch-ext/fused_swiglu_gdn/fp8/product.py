"""Tokens in FP8 and their products with weights in FP8. For the layers; not part of the API."""

from typing import Callable, Optional

from torch import Tensor

from ..runtime.cache import CallCache, fast_path_ok
from . import ops
from .call import Quantised


def quantise(x: Tensor) -> Optional[Quantised]:
    """x [M, K] bf16 in e4m3, with a scale for each 128 columns; None where no kernel serves."""
    return _made(_quantised, ops.QUANTISE, x)


def silu_mul_quantise(gate: Tensor, up: Tensor) -> Optional[Quantised]:
    """silu(gate) * up of [M, N] bf16 each, in e4m3; rounded to bf16 after each of the two."""
    return _made(_gated, ops.GATE, gate, up)


def product_of(weight: Tensor, scale: Tensor) -> Optional[Callable]:
    """Returns the function that multiplies with weight [N, K] e4m3 and its scale [ceil(N / 128), K
    / 128] fp32: takes them and tokens in FP8, gives [P, N] bf16. None where nothing does; told
    before any launch."""
    return _served(_products, ops.MULTIPLY, weight, scale)


def norm_quantise(x: Tensor, weight: Optional[Tensor], residual: Optional[Tensor], *how):
    """(y, x + residual or None, y in FP8) of RMSNorm of x [..., K] bf16; how: eps, casting_mode and
    offset, as rms_norm has them. None where no kernel serves."""
    tensors = (x, weight, residual)
    if not fast_path_ok():
        launch = ops.chosen(*ops.NORM, *tensors, *how)
        return None if launch is None else launch(*tensors, *how)
    plan = _norms.find(tensors, how)
    if plan is None:
        plan = _norms.keep(tensors, how, ops.plan(*ops.NORM, *tensors, *how))
    return None if plan is None else plan(*tensors)


def few(x: Quantised, M: int, weights: tuple, scales: tuple) -> Optional[Tensor]:
    """x W^T of the M tokens of x with each of the weights, side by side [M, N] bf16, in one or two
    launches; None where M is no small number or no kernel serves."""
    return _of_few(_few, ops.FEW, x, M, weights, scales)


def few_mlp(x: Quantised, M: int, weights: tuple, scales: tuple) -> Optional[Tensor]:
    """down(silu(gate(x)) * up(x)) of the M tokens of x, [M, K] bf16; weights and scales of gate, up
    and down. None as above."""
    return _of_few(_mlps, ops.FEW_MLP, x, M, weights, scales)


def _of_few(cache: CallCache, operation: tuple, x: Quantised, M: int, *more) -> Optional[Tensor]:
    weights, scales = more
    args = (*x, M, *weights, *scales)
    if not fast_path_ok():
        launch = ops.chosen(*operation, *args)
    else:
        tensors = (*x, *weights, *scales)
        launch = cache.find(tensors, (M,))
        if launch is None:
            launch = cache.keep(tensors, (M,), ops.planned(*operation, *args))
    return None if launch is None else launch(*args)


def _made(cache: CallCache, operation: tuple, *tensors: Tensor) -> Optional[Quantised]:
    launch = _served(cache, operation, *tensors)
    return None if launch is None else launch(*tensors)


def _served(cache: CallCache, operation: tuple, *tensors: Tensor) -> Optional[Callable]:
    """Returns the implementation of calls like this one; cached, where nothing is recorded or
    forced."""
    if not fast_path_ok():
        return ops.chosen(*operation, *tensors)
    found = cache.find(tensors, ())
    if found is None:
        found = cache.keep(tensors, (), ops.planned(*operation, *tensors))
    return found


_quantised, _gated, _products = CallCache(), CallCache(), CallCache()
_few, _mlps, _norms = CallCache(), CallCache(), CallCache()
