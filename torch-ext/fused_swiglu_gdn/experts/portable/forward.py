"""The routed experts forward: `few` tokens without routing, all others by grouped products.

Chosen by the number of tokens alone, never by where they go. Sizes: T tokens, K slots, S = T K
entries, E experts, H model width, I hidden width of an expert.
"""

from typing import Callable, Optional, Tuple

import torch

from ...runtime import tuning
from .combine import combine
from .few import plan_few
from .products import rows_product, up
from .routing import new_routing, places, route

SERVED = (torch.float16, torch.bfloat16)
FEW = 8  # tokens


def _is_readable(x: torch.Tensor) -> bool:
    """The copy engine reads it: contiguous, from a multiple of 16 bytes on, in rows of such."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0 and x.shape[-1] % 8 == 0


def supports_experts_fwd(x, w_gate_up, w_down, ids, weights, activation, limit) -> bool:
    E, K = w_down.shape[0], ids.shape[1]
    return (
        x.dtype in SERVED
        and 0 < E <= 1024
        and 0 < K <= 64
        and x.shape[0] * K < 2**29
        and weights.dtype != torch.float64
        and _is_readable(w_gate_up)
        and _is_readable(w_down)
    )


def supports_experts_saving_fwd(
    x, w_gate_up, w_down, ids, weights, activation, limit, recompute
) -> bool:
    return supports_experts_fwd(x, w_gate_up, w_down, ids, weights, activation, limit)


def tiles_for(where: torch.device, T: int, K: int, E: int) -> dict:
    """The tuned tiles for so many rows an expert."""
    return tuning.lookup("portable_experts", where, rows=max(1, T * K // E))


def _grouped(
    x, w_gate_up, w_down, ids, weights, activation, limit, gate_up
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H], routing); fills gate_up [S, 2 I], unless that is None."""
    T, (E, _, I), K = x.shape[0], w_down.shape, ids.shape[1]
    tiles = tiles_for(x.device, T, K, E)
    height = tiles["BLOCK_M"]
    routing = route(ids, E, height)
    z = x.new_empty((places(T * K, E, height), I))
    up(x, w_gate_up, routing, z, gate_up, K, activation, limit, height, tiles["up"])
    y = rows_product(z, w_down, routing, T * K, True, height, tiles["down"])  # [.., H]
    return combine(y, weights, routing, T, E, K), routing


def experts_fwd(
    x: torch.Tensor,  # [T, H]
    w_gate_up: torch.Tensor,  # [E, 2 I, H]: gate above up
    w_down: torch.Tensor,  # [E, H, I]
    ids: torch.Tensor,  # [T, K] int32 or int64
    weights: torch.Tensor,  # [T, K]
    activation: str,
    limit: Optional[float],
) -> torch.Tensor:  # [T, H]
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    args = (x, w_gate_up, w_down, ids, weights, activation, limit)
    if x.shape[0] <= FEW:
        return plan_few(x, w_down, ids, activation, limit)(*args[:5])
    return _grouped(*args, None)[0]


def plan_experts_fwd(x, w_gate_up, w_down, ids, weights, activation, limit) -> Callable:
    """experts_fwd for all calls like this one, from their tensors. It returns None where
    supports_experts_fwd would not take their addresses."""
    few = 0 < x.shape[0] <= FEW and all(t.is_contiguous() for t in (x, ids, weights))
    if few:
        run = plan_few(x, w_down, ids, activation, limit)
    else:

        def run(*tensors):
            return experts_fwd(*tensors, activation, limit)

    def plan(x, w_gate_up, w_down, ids, weights):
        if (w_gate_up.data_ptr() | w_down.data_ptr()) & 15:
            return None
        return run(x, w_gate_up, w_down, ids, weights)

    return plan


def experts_saving_fwd(
    x, w_gate_up, w_down, ids, weights, activation, limit, recompute: bool
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [T, H], gate_up [S, 2 I] by rows or empty, routing): what the gradients want."""
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    S, width = ids.numel(), w_gate_up.shape[1]
    gate_up = x.new_empty(0 if recompute else (S, width))  # [S, 2 I]
    if x.numel() == 0:
        return torch.empty_like(x), gate_up, new_routing(ids, w_down.shape[0])
    kept = None if recompute else gate_up
    out, routing = _grouped(x, w_gate_up, w_down, ids, weights, activation, limit, kept)
    return out, gate_up, routing
