"""MLPs of three FP8Linears: x quantised, gate and up, silu(gate) * up quantised, down."""

from typing import Optional

import torch
from torch import nn

from ...fp8.ops import MLP, MULTIPLY
from .given import taken
from .weights import FORMS, takes, weights_of

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
