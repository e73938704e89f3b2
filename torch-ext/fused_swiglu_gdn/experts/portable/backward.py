"""The gradients of the routed experts, from x, the routing and gate_up; see gradients.py.

What is not needed costs nothing: frozen experts leave the products for dx alone. Sizes: T tokens,
K slots, S = T K entries, E experts, H model width, I hidden width of an expert.
"""

from typing import Optional, Sequence, Tuple

import torch

from .combine import combine, weights_gradient
from .forward import supports_experts_fwd, tiles_for
from .gradients import gate_gradient, spread, weight_gradient
from .products import rows_product, up
from .routing import places


def supports_experts_bwd(
    dout, x, w_gate_up, w_down, weights, gate_up, routing, activation, limit, needs, main_grads
) -> bool:
    return supports_experts_fwd(x, w_gate_up, w_down, weights, weights, activation, limit)


def experts_bwd(
    dout: torch.Tensor,  # [T, H]
    x: torch.Tensor,  # [T, H]
    w_gate_up: torch.Tensor,  # [E, 2 I, H]
    w_down: torch.Tensor,  # [E, H, I]
    weights: torch.Tensor,  # [T, K]
    gate_up: torch.Tensor,  # [S, 2 I] by rows; or empty: made again
    routing: torch.Tensor,
    activation: str,
    limit: Optional[float],
    needs: Sequence[bool],  # of x, w_gate_up, w_down, weights
    main_grads: Sequence[Optional[torch.Tensor]],  # of w_gate_up, w_down
) -> Tuple[Optional[torch.Tensor], ...]:
    """(dx, dw_gate_up, dw_down, dweights): None where not needed or added to a main_grad."""
    dout, x, weights = dout.contiguous(), x.contiguous(), weights.contiguous()
    T, (E, _, I), K = x.shape[0], w_down.shape, weights.shape[1]
    if x.numel() == 0:
        return _zeros(x, w_gate_up, w_down, weights, needs, main_grads)
    tiles = tiles_for(x.device, T, K, E)
    height = tiles["BLOCK_M"]
    if gate_up.numel() == 0:
        gate_up = x.new_empty((T * K, 2 * I))  # [S, 2 I]
        up(x, w_gate_up, routing, None, gate_up, K, activation, limit, height, tiles["up"])
    rows = places(T * K, E, height)
    d_gate_up = x.new_empty((rows, 2 * I))
    wz = x.new_empty((rows, I)) if needs[2] else None
    parts = gate_gradient(
        dout, w_down, gate_up, weights, routing, d_gate_up, wz, needs[3], activation, limit,
        height, tiles["gate"],
    )  # fmt: skip
    dx = dw_gate_up = dw_down = dweights = None
    if needs[3]:
        dweights = weights_gradient(parts, weights, routing, E)
    if needs[2]:
        more = (routing, E, main_grads[1], height, tiles["weight"])
        dw_down = weight_gradient(spread(dout, routing, E, K, height), wz, *more)  # [E, H, I]
        del wz
    if needs[1]:
        more = (routing, E, main_grads[0], height, tiles["weight"])
        spread_x = spread(x, routing, E, K, height)
        dw_gate_up = weight_gradient(d_gate_up, spread_x, *more)  # [E, 2 I, H]
        del spread_x
    if needs[0]:
        dx = rows_product(d_gate_up, w_gate_up, routing, T * K, False, height, tiles["dx"])
        dx = combine(dx, None, routing, T, E, K)
    return dx, dw_gate_up, dw_down, dweights


def _zeros(x, w_gate_up, w_down, weights, needs, main_grads) -> tuple:
    """The gradients of a call without tokens."""
    gone = (None, *main_grads, None)
    return tuple(
        torch.zeros_like(tensor) if needed and main_grad is None else None
        for tensor, needed, main_grad in zip((x, w_gate_up, w_down, weights), needs, gone)
    )
