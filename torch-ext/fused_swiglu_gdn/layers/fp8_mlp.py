"""MLPs of three FP8Linears: x quantised, gate and up, silu(gate) * up quantised, down."""

from typing import List, Optional

import torch
from torch import nn

from ..fp8.call import BLOCK, MOST, Quantised
from ..fp8.ops import FEW_MLP, MULTIPLY, QUANTISE, SILU_MUL_QUANTISE
from .fp8 import (
    FORMS,
    Given,
    Weight,
    for_many,
    rows_of,
    shaped,
    taken,
    takes,
    weights_of,
)


def mlp(
    x: torch.Tensor, gate: nn.Module, up: Optional[nn.Module], down: nn.Module, gate_first: bool
) -> Optional[torch.Tensor]:
    """down(silu(gate(x)) * up(x)) of FP8Linears, in five launches or less; None where it is not.
    The caller knows that torch_unpatched.

    up=None: gate makes both, one half each.
    """
    if type(gate) not in FORMS or not takes(x, MULTIPLY, True):
        return None
    weights = weights_of((gate, down) if up is None else (gate, up, down), x)
    if any([found is None for found in weights]):
        return None
    *gates, last = weights
    rows = 2 * last.weight.shape[1] if up is None else last.weight.shape[1]
    if any([found.weight.shape != (rows, x.shape[-1]) for found in gates]):
        return None
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _computed(x, weights, gate_first)
    return _computed(x, weights, gate_first)


def _computed(x: torch.Tensor, weights: List[Weight], gate_first: bool) -> Optional[torch.Tensor]:
    """mlp() of weights that fit: of gate and up, or one for both, and of down."""
    M, known = x.numel() // x.shape[-1], None
    if M > MOST:  # what multiplies is known before x is quantised
        known = for_many(weights)
        if known is None:
            return None
    it = taken(x)
    codes = QUANTISE((rows_of(x),)) if it is None else it.codes
    if codes is None:
        return None
    if known is None:
        y = _of_few(codes, M, weights, gate_first, it)
        if y is not None:
            return shaped(y, x)
        known = for_many(weights)
    y = _of_many(codes, M, known, gate_first) if known else None
    return None if y is None else shaped(y, x)


def _of_many(
    x: Quantised, M: int, weights: List[Weight], gate_first: bool
) -> Optional[torch.Tensor]:  # [P, K] or [M, K]
    """An MLP of any number of tokens."""
    *gates, down = weights
    g = gates[0].times(x, M)  # [P, N], or [M, N]
    if len(gates) > 1:
        u = gates[1].times(x, M)
    else:
        g, u = g.chunk(2, 1) if gate_first else reversed(g.chunk(2, 1))
    z = SILU_MUL_QUANTISE((g, u))
    return None if z is None else down.times(z, M)


def _of_few(
    x: Quantised, M: int, weights: List[Weight], gate_first: bool, it: Optional[Given]
) -> Optional[torch.Tensor]:  # [M, K]
    """An MLP of a few tokens without biases; None where it is another. it: says what to add."""
    if any([found.bias is not None for found in weights]):
        return None
    *gates, down = weights
    if len(gates) > 1:
        both, scales = [w.weight for w in gates], [w.scale for w in gates]
    else:
        if gates[0].weight.shape[0] % (2 * BLOCK):
            return None  # a block of scales is for rows of both
        order = 1 if gate_first else -1
        both, scales = (t.chunk(2)[::order] for t in (gates[0].weight, gates[0].scale))
    residual = None if it is None else it.residual
    if residual is not None and residual.ndim != 2:
        residual = residual.reshape(-1, residual.shape[-1])
    y = FEW_MLP((*x, *both, down.weight, *scales, down.scale, residual), (M,))
    if y is not None and residual is not None:
        it.added = True
    return y
