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
    given_of,
    rows_of,
    shaped,
    takes,
    weights_of,
)  # fmt: skip


def mlp(
    x: torch.Tensor, gate: nn.Module, up: Optional[nn.Module], down: nn.Module, gate_first: bool
) -> Optional[torch.Tensor]:
    """down(silu(gate(x)) * up(x)) of FP8Linears, in five launches or less; None where it is not.
    The caller knows that torch_unpatched.

    up=None: gate makes both, one half each.
    """
    if type(gate) not in FORMS or not takes(x, MULTIPLY, True):
        return None
    K, M = x.shape[-1], x.numel() // x.shape[-1]
    if up is None:
        first, third = weights_of((gate, down), x)
        second = None
    else:
        first, second, third = weights_of((gate, up, down), x)
    if first is None or third is None or up is not None and second is None:
        return None
    (rows, width), hidden = first.weight.shape, third.weight.shape[1]
    if width != K or rows != (2 * hidden if second is None else hidden):
        return None
    if second is not None and second.weight.shape != first.weight.shape:
        return None
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _computed(x, M, first, second, third, gate_first)
    return _computed(x, M, first, second, third, gate_first)


def _computed(
    x: torch.Tensor,
    M: int,
    first: Weight,
    second: Optional[Weight],
    third: Weight,
    gate_first: bool,
) -> Optional[torch.Tensor]:
    """mlp() of weights that fit."""
    known = None
    if M > MOST:  # what multiplies is known before x is quantised
        known = for_many([w for w in (first, second, third) if w is not None])
        if known is None:
            return None
    it = given_of(x)
    codes = QUANTISE((rows_of(x),)) if it is None else it.found
    if codes is None:
        return None
    if known is None:
        y = _of_few(x, codes, M, first, second, third, gate_first, it)
        if y is not None:
            return y
        known = for_many([w for w in (first, second, third) if w is not None])
    y = _of_many(codes, M, known, gate_first) if known else None
    return None if y is None else shaped(y, x)


def _of_many(
    x: Quantised, M: int, weights: List[Weight], gate_first: bool
) -> Optional[torch.Tensor]:  # [P, K] or [M, K]
    """An MLP of weights for any number of tokens: gate and up, or one for both, and down."""
    *gates, down = weights
    g = gates[0].times(x, M)  # [P, N], or [M, N]
    if len(gates) > 1:
        u = gates[1].times(x, M)
    else:
        g, u = g.chunk(2, 1) if gate_first else reversed(g.chunk(2, 1))
    z = SILU_MUL_QUANTISE((g, u))
    return None if z is None else down.times(z, M)


def _of_few(
    x: torch.Tensor,  # [..., K]
    codes: Quantised,
    M: int,
    first: Weight,
    second: Optional[Weight],
    third: Weight,
    gate_first: bool,
    it: Optional[Given],
) -> Optional[torch.Tensor]:  # [..., K]
    """An MLP of a few tokens without biases; None where it is another. it: says what to add."""
    if first.bias is not None or third.bias is not None:
        return None
    if second is not None:
        gate, up = first, second
        if second.bias is not None:
            return None
        weights, scales = (gate.weight, up.weight), (gate.scale, up.scale)
    else:
        if first.weight.shape[0] % (2 * BLOCK):
            return None  # a block of scales is for rows of both
        weights, scales = first.weight.chunk(2), first.scale.chunk(2)
        if not gate_first:
            weights, scales = weights[::-1], scales[::-1]
    residual = None if it is None else it.residual
    if residual is not None and residual.ndim != 2:
        residual = residual.reshape(-1, residual.shape[-1])
    y = FEW_MLP((*codes, *weights, third.weight, *scales, third.scale, residual), (M,))
    if y is None:
        return None
    if residual is not None:
        it.added = True
    return y if x.ndim == 2 else y.resize_((*x.shape[:-1], y.shape[1]))
