"""The routed experts and their gradients: few tokens without routing, more by grouped products.

The numbers of tokens and experts decide, never the routing. Gradients that are not needed cost
nothing: frozen experts compute only the products for dx. Sizes: T tokens, K slots, S = T K entries,
E experts, H model width, I hidden width of an expert.
"""

import functools
from typing import Callable, Optional, Tuple

import torch

from ...runtime import tuning
from ...runtime.dtypes import HALF
from ..call import Biases, Experts, ExpertsBackward, ExpertsGradient, ExpertsOptions
from .combine import combine, weights_gradient
from .few import are_few, plan_few
from .gradients import bias_gradients, gate_gradient, spread, weight_gradient
from .products import rows_product, up
from .routing import Routing, new_buffer, route


def _is_readable(x: torch.Tensor) -> bool:
    """True if TMA can read x, addresses apart: contiguous, with rows of a multiple of 16 bytes."""
    return x.is_contiguous() and x.shape[-1] % 8 == 0


def _have_one_layout(w_gate_up: torch.Tensor, w_down: torch.Tensor, interleaved: bool) -> bool:
    """True if both weights are contiguous, or both are .mT of contiguous tensors."""
    if w_gate_up.is_contiguous():
        return not interleaved and _is_readable(w_gate_up) and _is_readable(w_down)
    return _is_readable(w_gate_up.mT) and _is_readable(w_down.mT)


def supports_experts_fwd(x, w_gate_up, w_down, ids, weights, biases, options) -> bool:
    (E, _, I), K = w_down.shape, ids.shape[1]
    return (
        x.dtype in HALF
        and I > 0
        and 0 < E <= 1024
        and 0 < K <= 64
        and x.shape[0] * K < 2**29
        and weights.dtype != torch.float64
        and _have_one_layout(w_gate_up, w_down, options.interleaved)
        and all(b is None or (b.dtype == x.dtype and b.is_contiguous()) for b in biases)
    )


def supports_experts_bwd(
    x, w_gate_up, w_down, ids, weights, biases, options, gradient=None
) -> bool:
    return supports_experts_fwd(x, w_gate_up, w_down, ids, weights, biases, options)


def tiles_for(where: torch.device, T: int, K: int, E: int) -> dict:
    """The tuned tiles for the average number of rows of an expert."""
    return tuning.lookup("portable_experts", where, rows=max(1, T * K // E))


def experts_fwd(
    x: torch.Tensor,  # [T, H]
    w_gate_up: torch.Tensor,  # [E, 2 I, H]: gate above up; as _have_one_layout has it
    w_down: torch.Tensor,  # [E, H, I]
    ids: torch.Tensor,  # [T, K] int32 or int64
    weights: torch.Tensor,  # [T, K]
    biases: Biases,
    options: ExpertsOptions,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(out [T, H], gate_up [S, 2 I] by rows if it is kept, routing if there is one)."""
    if _are_few(x, w_down, ids, biases, options):
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        few = plan_few(x, w_down, ids, options.activation, options.limit)
        return few(x, w_gate_up, w_down, ids, weights)
    return _grouped(x, w_gate_up, w_down, ids, weights, biases, options)


def _grouped(x, w_gate_up, w_down, ids, weights, biases: Biases, options: ExpertsOptions) -> tuple:
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    activation, limit, keeps, recompute, _, interleaved = options
    T, (E, _, I), K = x.shape[0], w_down.shape, ids.shape[1]
    gate_up = x.new_empty((T * K, 2 * I)) if keeps and not recompute else None  # [S, 2 I]
    if x.numel() == 0:
        return torch.empty_like(x), gate_up, new_buffer(ids, E) if keeps else None
    tiles = tiles_for(x.device, T, K, E)
    routing = route(ids, E, tiles["BLOCK_M"])
    z = x.new_empty((routing.places, I))
    more = (activation, limit, tiles["up"])
    up(x, w_gate_up, biases.gate_up, interleaved, routing, z, gate_up, *more)
    y = rows_product(z, w_down, routing, tiles["down"])  # [.., H]
    out = combine(y, weights, routing, ids, biases.down)
    return out, gate_up, routing.buffer if keeps else None


def _are_few(x, w_down, ids, biases: Biases, options: ExpertsOptions) -> bool:
    """True if plan_few supports these tokens: it takes one layout of the weights, and no biases."""
    if biases.are_there() or options.keeps or not w_down.is_contiguous():
        return False
    return are_few(x.device, *ids.shape, *w_down.shape)


def prepare_experts_fwd(call: Experts) -> Optional[Callable]:
    """experts_fwd as a function of the call's tensors."""
    *tensors, b_gate_up, b_down, options = call
    x, w_gate_up, w_down, ids, _ = tensors
    biases = Biases(b_gate_up, b_down)
    if not supports_experts_fwd(*tensors, biases, options):
        return None
    forward = _grouped
    if _are_few(x, w_down, ids, biases, options):
        forward = experts_fwd
        if all(t.is_contiguous() for t in (x, ids, call.weights)):
            return plan_few(x, w_down, ids, options.activation, options.limit)

    def run(x, w_gate_up, w_down, ids, weights, *biases):
        return forward(x, w_gate_up, w_down, ids, weights, Biases(*biases), options)

    return run


def prepare_experts_bwd(call: ExpertsBackward, gradients=None) -> Optional[Callable]:
    """The six gradients as a function of the call's tensors; gradients: as experts_bwd.

    main_grads: fp32 tensors to which the gradients of w_gate_up and w_down are added, or None.
    """
    needs, options, function = *split_options(call), gradients or experts_bwd
    if not supports_experts_bwd(*call[:5], Biases(*call[5:7]), options):
        return None

    def run(*tensors, main_grads=(None, None)):
        gradient = ExpertsGradient(*tensors[7:10], needs, main_grads)
        found = function(*tensors[:5], Biases(*tensors[5:7]), options, gradient)
        return ExpertsBackward(*tensors, None).in_layout(found)

    return run


def split_options(call: ExpertsBackward) -> Tuple[list, ExpertsOptions]:
    """needs, and the options of the forward."""
    needs, *options = call.options
    return needs, ExpertsOptions(*options)


def experts_bwd(
    x: torch.Tensor,  # [T, H]
    w_gate_up: torch.Tensor,  # [E, 2 I, H]
    w_down: torch.Tensor,  # [E, H, I]
    ids: torch.Tensor,  # [T, K]
    weights: torch.Tensor,  # [T, K]
    biases: Biases,
    options: ExpertsOptions,
    gradient: ExpertsGradient,
    product: Callable = weight_gradient,
    gate: Optional[Callable] = None,
) -> Tuple[Optional[torch.Tensor], ...]:
    """(dx, dw_gate_up, dw_down, dweights, db_gate_up, db_down).

    A gradient is None if not needed or added to a main_grad. product: the function used as
    weight_gradient. gate: a replacement for gate_gradient that takes dout by places.
    """
    activation, limit, *_, interleaved = options
    dout, gate_up, buffer, needs, main_grads = gradient
    dout, x, weights = dout.contiguous(), x.contiguous(), weights.contiguous()
    by_rows = w_down.is_contiguous()
    T, (E, _, I), K = x.shape[0], w_down.shape, weights.shape[1]
    if x.numel() == 0:
        return _zeros((x, w_gate_up, w_down, weights, *biases), needs, main_grads)
    tiles = tiles_for(x.device, T, K, E)
    routing = Routing(buffer, T, K, E, tiles["BLOCK_M"])
    if gate_up is None:
        gate_up = x.new_empty((T * K, 2 * I))  # [S, 2 I]
        more = (routing, None, gate_up, activation, limit, tiles["up"])
        up(x, w_gate_up, biases.gate_up, interleaved, *more)
    d_gate_up = x.new_empty((routing.places, 2 * I))
    wz = x.new_empty((routing.places, I)) if needs[2] else None
    spread_dout = spread(dout, routing) if needs[2] else None  # [.., H]
    more = (w_down, gate_up, weights, routing, d_gate_up, wz, needs[3], activation, limit)
    if gate is None or spread_dout is None:
        parts = gate_gradient(dout, *more, interleaved, tiles["gate"])
    else:
        parts = gate(spread_dout, *more)
    dx = dw_gate_up = dw_down = dweights = None
    more, *dbiases = None, None, None
    if biases.are_there():
        more = (ids, weights, biases, needs[3:], routing, tiles["weight"])
        more, *dbiases = bias_gradients(dout, d_gate_up, *more)
    if needs[3]:
        dweights = weights_gradient(parts, weights, routing, more)

    of_weight = functools.partial(
        _of_weight, product=product, by_rows=by_rows, routing=routing, config=tiles["weight"]
    )
    if needs[2]:
        dw_down = of_weight(spread_dout, wz, main_grads[1])  # [E, H, I]
        del wz, spread_dout
    if needs[1]:
        spread_x = spread(x, routing)
        dw_gate_up = of_weight(d_gate_up, spread_x, main_grads[0])  # [E, 2 I, H]
        del spread_x
    if needs[0]:
        dx = combine(rows_product(d_gate_up, w_gate_up.mT, routing, tiles["dx"]), None, routing)
    return dx, dw_gate_up, dw_down, dweights, *dbiases


def _of_weight(a, b, main_grad, product, by_rows, routing, config) -> Optional[torch.Tensor]:
    """[E, a's columns, b's], or None if it is added to main_grad. by_rows: contiguous, else .mT of
    a contiguous one."""
    if by_rows and (main_grad is None or main_grad.is_contiguous()):
        return product(a, b, routing, main_grad, config)
    found = product(*((a, b) if by_rows else (b, a)), routing, None, config)
    found = found if by_rows else found.mT
    if main_grad is None:
        return found
    main_grad.add_(found)
    return None


def _zeros(tensors, needs, main_grads) -> tuple:
    """The gradients of a call without tokens."""
    gone = (None, *main_grads, None, None, None)
    return tuple(
        torch.zeros_like(tensor) if needed and main_grad is None else None
        for tensor, needed, main_grad in zip(tensors, needs, gone)
    )
