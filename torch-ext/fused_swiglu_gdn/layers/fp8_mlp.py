"""MLPs of three FP8Linears: x quantised, gate and up, silu(gate) * up quantised, down."""

from typing import List, Optional

import torch
from torch import nn

from ..fp8.call import BLOCK, MOST, Quantised
from ..fp8.product import few_mlp, quantise, silu_mul_quantise
from .fp8 import (
    FORMS,
    Weight,
    for_many,
    given,
    given_of,
    no_grad,
    rows_of,
    shaped,
    takes,
    weight_of,
)  # fmt: skip


def mlp(
    x: torch.Tensor, gate: nn.Module, up: Optional[nn.Module], down: nn.Module, gate_first: bool
) -> Optional[torch.Tensor]:
    """down(silu(gate(x)) * up(x)) of FP8Linears, in five launches or less; None where it is not.

    up=None: gate makes both, one half each.
    """
    if type(gate) not in FORMS or not takes(x):
        return None
    first = weight_of(gate, x, x.shape[-1], called=False)
    second = None if up is None else weight_of(up, x, x.shape[-1], called=False)
    if first is None or up is not None and second is None:
        return None
    rows = first.weight.shape[0]
    hidden = rows // 2 if up is None else rows
    third = weight_of(down, x, hidden, called=False)
    if third is None or rows != (2 * hidden if second is None else second.weight.shape[0]):
        return None
    M, known = x.numel() // x.shape[-1], [w for w in (first, second, third) if w is not None]
    if M > MOST:
        known = for_many(known) or []
    with no_grad():
        it = given_of(x)
        codes = it.found if it is not None else quantise(rows_of(x)) if known else None
        y = None
        if codes is not None and M <= MOST:
            y = _of_few(codes, M, first, second, third, gate_first, it)
            if y is None:
                known = for_many(known) or []
        if codes is not None and y is None and known:
            y = _of_many(codes, M, known, gate_first)
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
    z = silu_mul_quantise(g, u)
    return None if z is None else down.times(z, M)


def _of_few(
    x: Quantised,
    M: int,
    first: Weight,
    second: Optional[Weight],
    third: Weight,
    gate_first: bool,
    it: Optional[given],
) -> Optional[torch.Tensor]:  # [M, K]
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
    more = ()
    if it is not None and it.residual is not None:
        more = (it.residual.reshape(-1, it.residual.shape[-1]),)
    y = few_mlp(x, M, (*weights, third.weight), (*scales, third.scale), *more)
    if more and y is not None:
        it.added = True
    return y
