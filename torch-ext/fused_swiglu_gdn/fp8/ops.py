"""Quantisation and products in FP8 as operations of layers; not part of the API."""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..projection.call import MAX_WEIGHTS
from ..runtime.eager_operation import EagerOperation
from . import call as calls
from . import reference

MULTIPLY = ("fp8.multiply", "multiply_fwd")
NORM_QUANTISE = EagerOperation("fp8.norm", "norm_quantise_fwd", calls.NormQuantise, reference)
PRODUCT = EagerOperation(*MULTIPLY, calls.Product, reference)
DEQUANTISE = EagerOperation("fp8.dequantise", "dequantise_fwd", calls.Dequantise, reference)
PRODUCTS = EagerOperation("fp8.products", "products_fwd", calls.Products, reference)
MLP = EagerOperation("fp8.products", "mlp_fwd", calls.Mlp, reference)
ABSENT = (None,) * MAX_WEIGHTS


# of an FP8Linear: [N, K] e4m3, [ceil(N / BLOCK), ceil(K / BLOCK)], and its bias [N]
Weight = Tuple[Tensor, Tensor, Optional[Tensor]]


def products(
    lead: tuple,
    weights: Sequence[Weight],
    x: Optional[Tensor] = None,
    codes: Optional[calls.Quantised] = None,
    plain: tuple = (),
) -> Optional[Sequence[Tensor]]:
    """The products of tokens of the shape `lead` with each of the weights, [*lead, N_i] bf16, and
    behind them those of x with weights in bf16. codes: x in FP8, if that is known. None where
    nothing computes it. All weights begin at multiples of 16 bytes; they get no gradient."""
    if torch.is_grad_enabled():  # they may say that they need one
        with torch.no_grad():
            return products(lead, weights, x, codes, plain)
    if len(weights) > MAX_WEIGHTS or len(plain) > calls.MAX_PLAIN:
        return None
    tensors, scales, biases = zip(*weights)
    absent, missing = ABSENT[len(weights) :], (None,) * (calls.MAX_PLAIN - len(plain))
    given = (x, None, None) if codes is None else (x if plain else None, *codes)
    found = PRODUCTS((*tensors, *absent, *scales, *absent, *given, *plain, *missing), (lead,))
    if found is not None:
        for bias, y in zip(biases, found):
            if bias is not None:
                y.add_(bias)
    return found
