"""SwiGLU training: torch's products, and one launch for the gate or for its gradients.

    G = X Wg^T + bg,  U = X Wu^T + bu,  Z = act(G) * U,  Y = Z Wd^T
    dZ = dY Wd,  dG = dZ * U * act'(G),  dU = dZ * act(G),  dX = dG Wg + dU Wu

An implementation may pass functions of its own for dX, and for dG, dU and Z from dY.

Sizes: M tokens, K model width, N hidden width, D output width of Wd. `needs` are booleans for x,
w_gate, w_up, b_gate, b_up, w_down; a gradient that is not needed costs nothing and is None.
"""

from typing import Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ...runtime.products import add_product, linear
from .gate import gate_bwd, gate_fwd

Gradients = Tuple[Optional[Tensor], ...]


def projections(x, w_gate, w_up, b_gate, b_up) -> Tensor:
    """gate_up [M, 2 N]: gate and up side by side."""
    M, N = x.shape[0], w_gate.shape[0]
    gate_up = x.new_empty((M, 2 * N))  # [M, 2 N]
    for out, weight, bias in zip(gate_up.split(N, dim=1), (w_gate, w_up), (b_gate, b_up)):
        linear(x, weight, bias, out)
    return gate_up


def saving_fwd(x, w_gate, w_up, b_gate, b_up, activation: str) -> Tuple[Tensor, Tensor]:
    """(z [M, N], gate_up [M, 2 N]): the result, and what the gradients need."""
    gate_up = projections(x, w_gate, w_up, b_gate, b_up)
    return gate_fwd(*gate_up.chunk(2, dim=1), activation), gate_up


def input_gradient(d_gate_up: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """dx [M, K] = dgate Wg + dup Wu."""
    d_gate, d_up = d_gate_up.chunk(2, dim=1)
    return torch.mm(d_gate, w_gate).addmm_(d_up, w_up)


def _weight_gradients(
    d_gate_up: Tensor, x: Tensor, needs: Sequence[bool], main_grads: Sequence[Optional[Tensor]]
) -> Optional[Tensor]:
    """dWg above dWu [2 N, K] in one product, or one of them [N, K], or None.

    A gradient whose weight has a main_grad is added to that and not returned.
    """
    wanted = []
    for d, needed, total in zip(d_gate_up.chunk(2, dim=1), needs[1:3], main_grads):
        if needed and total is not None:
            add_product(total, d.t(), x)
        elif needed:
            wanted.append(d)
    if len(wanted) == 2:
        return torch.mm(d_gate_up.t(), x)  # [2 N, K]
    return torch.mm(wanted[0].t(), x) if wanted else None  # [N, K]


def _projection_gradients(
    d_gate_up: Tensor,  # [M, 2 N]
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    needs: Sequence[bool],
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor],
    main_grads: Sequence[Optional[Tensor]] = (None, None),
) -> Gradients:
    """(dx, dw, db_gate, db_up); dw as from _weight_gradients."""
    dx = input_gradient(d_gate_up, w_gate, w_up) if needs[0] else None  # [M, K]
    dw = _weight_gradients(d_gate_up, x, needs, main_grads)
    d_gate, d_up = d_gate_up.chunk(2, dim=1)
    db_gate, db_up = (
        d.sum(0, dtype=torch.float32).to(d.dtype) if needed else None
        for d, needed in ((d_gate, needs[3]), (d_up, needs[4]))
    )  # [N] each
    return dx, dw, db_gate, db_up


def gated_gradients(
    dz, x, w_gate, w_up, gate_up, activation, needs, input_gradient=input_gradient
) -> Gradients:
    """(dx, dw, db_gate, db_up) of z = act(gate) * up; overwrites gate_up [M, 2 N].

    dw: dw_gate above dw_up [2 N, K] if both are needed, else the one that is [N, K].
    """
    gate_bwd(dz, gate_up, activation, with_z=False)
    return _projection_gradients(gate_up, x, w_gate, w_up, needs, input_gradient)


def gate_gradient(
    dy: Tensor,  # [M, D]
    w_down: Tensor,  # [D, N]
    gate_up: Tensor,  # [M, 2 N]: overwritten by its gradient
    activation: str,
    with_z: bool,
) -> Optional[Tensor]:  # z [M, N]
    return gate_bwd(torch.mm(dy, w_down), gate_up, activation, with_z)


def mlp_gradients(
    dy, x, w_gate, w_up, w_down, gate_up, activation, needs, main_grads,
    gate_gradient=gate_gradient, input_gradient=input_gradient,
) -> Gradients:  # fmt: skip
    """(dx, dw, db_gate, db_up, dw_down) of y = z w_down^T; overwrites gate_up [M, 2 N].

    dy: [M, D]; w_down: [D, N]. dw_down needs z, which is recomputed from gate_up.
    main_grads: fp32 tensors to which the gradients of w_gate, w_up and w_down are added, or None.
    """
    z = gate_gradient(dy, w_down, gate_up, activation, needs[5])  # [M, N], or None
    dw_down = None
    if needs[5] and main_grads[2] is not None:
        add_product(main_grads[2], dy.t(), z)
    elif needs[5]:
        dw_down = torch.mm(dy.t(), z)  # [D, N]
    del z
    args = (gate_up, x, w_gate, w_up, needs, input_gradient, main_grads[:2])
    return (*_projection_gradients(*args), dw_down)
