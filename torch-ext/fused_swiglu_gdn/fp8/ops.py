"""Quantisation and products in FP8 as operations of layers; not part of the API."""

from typing import Optional, Sequence

import torch
from torch import Tensor

from ..projection.call import MAX_WEIGHTS
from ..runtime import dispatch
from ..runtime.eager_operation import EagerOperation
from . import call as calls
from . import reference

MULTIPLY = ("fp8.multiply", "multiply_fwd")
QUANTISE = EagerOperation("fp8.quantise", "quantise_fwd", calls.Quantise, reference)
SILU_MUL_QUANTISE = EagerOperation(
    "fp8.quantise", "silu_mul_quantise_fwd", calls.SiluMulQuantise, reference
)
NORM_QUANTISE = EagerOperation("fp8.norm", "norm_quantise_fwd", calls.NormQuantise, reference)
PRODUCT = EagerOperation(*MULTIPLY, calls.Product, reference)
DEQUANTISE = EagerOperation("fp8.dequantise", "dequantise_fwd", calls.Dequantise, reference)
PRODUCTS = EagerOperation("fp8.products", "products_fwd", calls.Products, reference)
MLP = EagerOperation("fp8.products", "mlp_fwd", calls.Mlp, reference)
ABSENT = (None,) * MAX_WEIGHTS


def multiplies(weight: Tensor, scale: Tensor, M: int) -> bool:
    """True if products() computes M tokens by a weight that begins at a multiple of 16 bytes."""
    if M > calls.MOST or dispatch.forced is not None:
        return PRODUCT.serving((weight, scale)) is not None
    if weight.dtype is not torch.float8_e4m3fn or weight.device != scale.device:
        return False
    fits = scale.shape == (calls.blocks_of(weight.shape[0]), calls.blocks_of(weight.shape[1]))
    return fits and weight.is_contiguous() and scale.is_contiguous()


def products(
    lead: tuple,
    weights: tuple,
    scales: tuple,
    x: Optional[Tensor] = None,
    codes: Optional[calls.Quantised] = None,
    plain: tuple = (),
) -> Optional[Sequence[Tensor]]:
    """The products of tokens of the shape `lead` with each of the weights, [*lead, N_i] bf16, and
    behind them those of x with weights in bf16. codes: x in FP8, if that is known. None where
    nothing computes it. All weights begin at multiples of 16 bytes."""
    absent, missing = ABSENT[len(weights) :], (None,) * (calls.MAX_PLAIN - len(plain))
    if len(weights) > MAX_WEIGHTS or len(plain) > calls.MAX_PLAIN:
        return None
    given = (x, None, None) if codes is None else (x if plain else None, *codes)
    return PRODUCTS((*weights, *absent, *scales, *absent, *given, *plain, *missing), (lead,))
