"""Several FP8Linears in fewer launches: whole MLPs, and output projections whose input attention
over a cache, its gate, or the gated norm of Gated DeltaNet quantises in its own launch."""

from typing import Optional

import torch
from torch import nn

from ...attention.ops_fp8 import ATTENTION_QUANTISE, GATE_QUANTISE
from ...fp8.call import BLOCK
from ...fp8.ops import MLP, MULTIPLY, multiplies
from .given import taken
from .linear import multiplied
from .weights import FORMS, Weight, takes, weights_of

NONE = (None, None, None)


def mlp(
    x: torch.Tensor, gate: nn.Module, up: Optional[nn.Module], down: nn.Module, gate_first: bool
) -> Optional[torch.Tensor]:
    """down(silu(gate(x)) * up(x)) of FP8Linears, in five launches or less; None where it is not.
    The caller knows that torch_unpatched.

    up=None: gate makes both, one half each.
    """
    if type(gate) not in FORMS or not takes(x, MULTIPLY, True):
        return None
    found = weights_of((gate, down) if up is None else (gate, up, down), x)
    if None in found:
        return None
    if up is None:
        found.insert(1, NONE)
    it = taken(x)
    codes, residual = ((None, None), None) if it is None else (it.codes, it.residual)
    weights, scales, biases = zip(*found)
    tensors, options = (*weights, *scales, *biases, x, *codes, residual), (x.shape[:-1], gate_first)
    if torch.is_grad_enabled():  # the weights say that they need one, and get none
        with torch.no_grad():
            y = MLP(tensors, options)
    else:
        y = MLP(tensors, options)
    if y is not None and residual is not None:
        it.added = True
    return y


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


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length, mask, scale, linear: nn.Module
) -> Optional[tuple]:
    """(linear() of attention_with_kvcache's result [B, 1, N], None): without weights of attention.
    None where the parts are to be called."""
    B, T, HQ, D = q.shape
    if T > 1 or D != BLOCK:
        return None
    weight = weight_of_out(linear, q, HQ * D, True)
    codes = None if weight is None else ATTENTION_QUANTISE((q, k, v, length, mask), (scale,))
    return None if codes is None else (multiplied((B, T), (weight,), None, codes)[0], None)
