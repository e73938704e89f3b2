"""The routed experts and their gradients: `few` tokens without routing, all others by grouped
products.

Chosen by the number of tokens alone, never by where they go. What of the gradients is not needed
costs nothing: frozen experts leave the products for dx alone. Sizes: T tokens, K slots, S = T K
entries, E experts, H model width, I hidden width of an expert.
"""

from typing import Callable, Optional, Tuple

import torch

from ...runtime import tuning
from ...runtime.dtypes import HALF
from ..call import ExpertsGradient, ExpertsOptions
from .combine import combine, weights_gradient
from .few import plan_few
from .gradients import gate_gradient, spread, weight_gradient
from .products import rows_product, up
from .routing import Routing, new_buffer, route

FEW = 8  # tokens


def _is_readable(x: torch.Tensor) -> bool:
    """The copy engine reads it: contiguous, from a multiple of 16 bytes on, in rows of such."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0 and x.shape[-1] % 8 == 0


def supports_experts_fwd(x, w_gate_up, w_down, ids, weights, options) -> bool:
    E, K = w_down.shape[0], ids.shape[1]
    return (
        x.dtype in HALF
        and 0 < E <= 1024
        and 0 < K <= 64
        and x.shape[0] * K < 2**29
        and weights.dtype != torch.float64
        and _is_readable(w_gate_up)
        and _is_readable(w_down)
    )


def supports_experts_bwd(x, w_gate_up, w_down, ids, weights, options, gradient=None) -> bool:
    return supports_experts_fwd(x, w_gate_up, w_down, ids, weights, options)


def tiles_for(where: torch.device, T: int, K: int, E: int) -> dict:
    """The tuned tiles for so many rows an expert."""
    return tuning.lookup("portable_experts", where, rows=max(1, T * K // E))


def experts_fwd(
    x: torch.Tensor,  # [T, H]
    w_gate_up: torch.Tensor,  # [E, 2 I, H]: gate above up
    w_down: torch.Tensor,  # [E, H, I]
    ids: torch.Tensor,  # [T, K] int32 or int64
    weights: torch.Tensor,  # [T, K]
    options: ExpertsOptions,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(out [T, H], gate_up [S, 2 I] by rows if it is kept, routing if any is)."""
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    activation, limit, keeps, recompute, _ = options
    T, (E, _, I), K = x.shape[0], w_down.shape, ids.shape[1]
    gate_up = x.new_empty((T * K, 2 * I)) if keeps and not recompute else None  # [S, 2 I]
    if x.numel() == 0:
        return torch.empty_like(x), gate_up, new_buffer(ids, E) if keeps else None
    if T <= FEW and not keeps:
        few = plan_few(x, w_down, ids, activation, limit)
        return few(x, w_gate_up, w_down, ids, weights), None, None
    tiles = tiles_for(x.device, T, K, E)
    routing = route(ids, E, tiles["BLOCK_M"])
    z = x.new_empty((routing.places, I))
    up(x, w_gate_up, routing, z, gate_up, activation, limit, tiles["up"])
    y = rows_product(z, w_down, routing, True, tiles["down"])  # [.., H]
    return combine(y, weights, routing), gate_up, routing.buffer if keeps else None


def plan_experts_fwd(x, w_gate_up, w_down, ids, weights, options) -> Callable:
    """experts_fwd for all calls like this one, from their tensors. It returns None where
    supports_experts_fwd would not take their addresses."""
    few = None
    if 0 < x.shape[0] <= FEW and not options.keeps:
        if all(t.is_contiguous() for t in (x, ids, weights)):
            few = plan_few(x, w_down, ids, options.activation, options.limit)

    def plan(x, w_gate_up, w_down, ids, weights):
        if (w_gate_up.data_ptr() | w_down.data_ptr()) & 15:
            return None
        if few is not None:
            return few(x, w_gate_up, w_down, ids, weights), None, None
        return experts_fwd(x, w_gate_up, w_down, ids, weights, options)

    return plan


def experts_bwd(
    x: torch.Tensor,  # [T, H]
    w_gate_up: torch.Tensor,  # [E, 2 I, H]
    w_down: torch.Tensor,  # [E, H, I]
    ids: torch.Tensor,  # [T, K]
    weights: torch.Tensor,  # [T, K]
    options: ExpertsOptions,
    gradient: ExpertsGradient,
    product: Callable = weight_gradient,
    gate: Optional[Callable] = None,
) -> Tuple[Optional[torch.Tensor], ...]:
    """(dx, dw_gate_up, dw_down, dweights): None where not needed or added to a main_grad.

    product: what serves as weight_gradient. gate: as gate_gradient, if dout lies by places.
    """
    activation, limit, *_ = options
    dout, gate_up, buffer, needs, main_grads = gradient
    dout, x, weights = dout.contiguous(), x.contiguous(), weights.contiguous()
    T, (E, _, I), K = x.shape[0], w_down.shape, weights.shape[1]
    if x.numel() == 0:
        return _zeros(x, w_gate_up, w_down, weights, needs, main_grads)
    tiles = tiles_for(x.device, T, K, E)
    routing = Routing(buffer, T, K, E, tiles["BLOCK_M"])
    if gate_up is None:
        gate_up = x.new_empty((T * K, 2 * I))  # [S, 2 I]
        up(x, w_gate_up, routing, None, gate_up, activation, limit, tiles["up"])
    d_gate_up = x.new_empty((routing.places, 2 * I))
    wz = x.new_empty((routing.places, I)) if needs[2] else None
    spread_dout = spread(dout, routing) if needs[2] else None  # [.., H]
    more = (w_down, gate_up, weights, routing, d_gate_up, wz, needs[3], activation, limit)
    if gate is None or spread_dout is None:
        parts = gate_gradient(dout, *more, tiles["gate"])
    else:
        parts = gate(spread_dout, *more)
    dx = dw_gate_up = dw_down = dweights = None
    if needs[3]:
        dweights = weights_gradient(parts, weights, routing)
    if needs[2]:
        more = (routing, main_grads[1], tiles["weight"])
        dw_down = product(spread_dout, wz, *more)  # [E, H, I]
        del wz, spread_dout
    if needs[1]:
        more = (routing, main_grads[0], tiles["weight"])
        spread_x = spread(x, routing)
        dw_gate_up = product(d_gate_up, spread_x, *more)  # [E, 2 I, H]
        del spread_x
    if needs[0]:
        dx = rows_product(d_gate_up, w_gate_up, routing, False, tiles["dx"])
        dx = combine(dx, None, routing)
    return dx, dw_gate_up, dw_down, dweights


def _zeros(x, w_gate_up, w_down, weights, needs, main_grads) -> tuple:
    """The gradients of a call without tokens."""
    gone = (None, *main_grads, None)
    return tuple(
        torch.zeros_like(tensor) if needed and main_grad is None else None
        for tensor, needed, main_grad in zip((x, w_gate_up, w_down, weights), needs, gone)
    )
