"""Output projections that are FP8Linears, for which attention's gate and the gated norm of Gated
DeltaNet quantise in their own launch."""

from typing import Optional

import torch
from torch import nn

from ...attention.ops_fp8 import GATE_QUANTISE
from ...fp8.call import BLOCK
from ...fp8.ops import MULTIPLY, multiplies
from .linear import multiplied
from .weights import FORMS, Weight, takes, weights_of


def weight_of_out(
    linear: nn.Module, x: torch.Tensor, K: int, unpatched: bool = False
) -> Optional[Weight]:
    """Returns what calling the FP8Linear multiplies K columns of x's tokens by, if it does no more,
    no gradient can be asked for, and the product of these tokens is known to be computed. x [B, T,
    ...]; unpatched: the caller knows that torch_unpatched."""
    if type(linear) not in FORMS or torch.is_grad_enabled():
        return None
    if not takes(x, MULTIPLY, unpatched) or K % BLOCK:
        return None
    (found,) = weights_of((linear,), x)
    if found is None or found[0].shape[1] != K:
        return None
    return found if multiplies(*found[:2], x.shape[0] * x.shape[1]) else None


def gated(out: torch.Tensor, gate: torch.Tensor, linear: nn.Module) -> Optional[torch.Tensor]:
    """linear(out * sigmoid(gate)) of heads [B, T, HQ, D], [B, T, N]; None where the parts are to be
    called."""
    if out.ndim != 4 or out.shape != gate.shape:
        return None
    B, T, HQ, D = out.shape
    weight = weight_of_out(linear, out, HQ * D, True)
    codes = None if weight is None else GATE_QUANTISE((out, gate))
    return None if codes is None else multiplied((B, T), (weight,), None, codes)[0]
