"""Output projections that are FP8Linears, for which attention's gate and the gated norm of Gated
DeltaNet quantise in their own launch."""

from typing import Optional

import torch
from torch import nn

from ..attention.ops_fp8 import GATE_QUANTISE
from ..fp8.call import BLOCK, MOST, Quantised
from ..fp8.ops import MULTIPLY
from ..runtime import dispatch
from .fp8 import FORMS, Weight, for_many, takes, weights_of


def weight_of_out(
    linear: nn.Module, x: torch.Tensor, K: int, unpatched: bool = False
) -> Optional[Weight]:
    """Returns what calling the FP8Linear multiplies K columns of x's tokens by, if it does no more,
    no gradient can be asked for, and the product of these tokens is known to be computed. x [B, T,
    ...]; unpatched: the caller knows that torch_unpatched."""
    if type(linear) not in FORMS or torch.is_grad_enabled():
        return None
    if not takes(x, MULTIPLY, unpatched):
        return None
    (found,) = weights_of((linear,), x)
    if found is None or found.weight.shape[1] != K or K % BLOCK:
        return None
    if x.shape[0] * x.shape[1] > MOST or dispatch.forced is not None:
        (found,) = for_many([found]) or (None,)
        return found
    weight, scale, _, _ = found  # as products of few tokens take them
    fits = scale.shape == (-(-weight.shape[0] // BLOCK), K // BLOCK)
    return found if fits and weight.is_contiguous() and scale.is_contiguous() else None


def product(codes: Quantised, weight: Weight, B: int, T: int) -> torch.Tensor:
    """The product of B * T tokens in FP8 with what weight_of_out gave, [B, T, N]."""
    y = weight.times(codes, B * T)
    return y.resize_((B, T, y.shape[1]))


def gated(out: torch.Tensor, gate: torch.Tensor, linear: nn.Module) -> Optional[torch.Tensor]:
    """linear(out * sigmoid(gate)) of heads [B, T, HQ, D], [B, T, N]; None where the parts are to be
    called."""
    if out.ndim != 4 or out.shape != gate.shape:
        return None
    B, T, HQ, D = out.shape
    weight = weight_of_out(linear, out, HQ * D, True)
    codes = None if weight is None else GATE_QUANTISE((out, gate))
    return None if codes is None else product(codes, weight, B, T)
