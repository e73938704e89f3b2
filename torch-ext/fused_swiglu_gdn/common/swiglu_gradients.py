"""Gradients of SwiGLU's projections once those of gate and up are known: products that torch makes.

Sizes: M tokens, K model width, N hidden width. `needs` are truth values: x, w_gate, w_up, b_gate,
b_up; what is not needed costs nothing and comes back as None.
"""

from typing import Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor

Gradients = Tuple[Optional[Tensor], ...]


def weight_gradients(d_gate_up: Tensor, x: Tensor, needs: Sequence[bool]) -> Optional[Tensor]:
    """dWg above dWu [2 N, K] in one product, or the one that is needed [N, K]."""
    if needs[1] and needs[2]:
        return torch.mm(d_gate_up.t(), x)  # [2 N, K]
    d_gate, d_up = d_gate_up.chunk(2, dim=1)
    if needs[1]:
        return torch.mm(d_gate.t(), x)  # [N, K]
    return torch.mm(d_up.t(), x) if needs[2] else None  # [N, K]


def projection_gradients(
    d_gate_up: Tensor,  # [M, 2 N]
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    needs: Sequence[bool],
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Gradients:
    """(dx, dw, db_gate, db_up); dw as weight_gradients has it."""
    dx = input_gradient(d_gate_up, w_gate, w_up) if needs[0] else None  # [M, K]
    dw = weight_gradients(d_gate_up, x, needs)
    d_gate, d_up = d_gate_up.split(w_gate.shape[0], dim=1)
    db_gate, db_up = (
        d.sum(0, dtype=torch.float32).to(d.dtype) if needed else None
        for d, needed in ((d_gate, needs[3]), (d_up, needs[4]))
    )  # [N] each
    return dx, dw, db_gate, db_up


def input_gradient(d_gate_up: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """dx [M, K] = dgate Wg + dup Wu."""
    d_gate, d_up = d_gate_up.split(w_gate.shape[0], dim=1)
    return torch.mm(d_gate, w_gate).addmm_(d_up, w_up)
