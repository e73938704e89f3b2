"""The routed experts and their gradients: few tokens without routing, more by grouped products.

The numbers of tokens and experts decide, never the routing. Gradients that are not needed cost
nothing: frozen experts compute only the products for dx. Sizes: T tokens, K slots, S = T K entries,
E experts, H model width, I hidden width of an expert.
"""

import functools
from typing import Callable, Optional, Tuple

import torch

from ...runtime import tuning
from ...runtime.copies import on_copies
from ...runtime.dtypes import HALF
from ..call import Experts, ExpertsBackward
from .combine import combine, weights_gradient
from .few import are_few, plan_few
from .gradients import gate_gradient, spread
from .products import rows_product, up
from .routing import Routing, new_buffer, route
from .weight_gradients import bias_gradients, weight_gradient


def _is_readable(x: torch.Tensor) -> bool:
    """True if TMA can read x, addresses apart: contiguous, with rows of a multiple of 16 bytes."""
    return x.is_contiguous() and x.shape[-1] % 8 == 0


def _have_one_layout(w_gate_up: torch.Tensor, w_down: torch.Tensor, interleaved: bool) -> bool:
    """True if both weights are contiguous, or both are .mT of contiguous tensors."""
    if w_gate_up.is_contiguous():
        return not interleaved and _is_readable(w_gate_up) and _is_readable(w_down)
    return _is_readable(w_gate_up.mT) and _is_readable(w_down.mT)


def supports(call) -> bool:
    """True if these kernels compute the call, Experts, or the gradient of one, ExpertsBackward."""
    x, w_down, ids = call.x, call.w_down, call.ids
    (E, _, I), K = w_down.shape, ids.shape[1]
    return (
        x.dtype in HALF
        and I > 0
        and I % 8 == 0  # the rows of z, which have no layout of the caller
        and 0 < E <= 1024
        and 0 < K <= 64
        and x.shape[0] * K < 2**29
        and call.weights.dtype != torch.float64
        and _have_one_layout(call.w_gate_up, w_down, call.options.interleaved)
        and all(
            b is None or (b.dtype == x.dtype and b.is_contiguous())
            for b in (call.b_gate_up, call.b_down)
        )
    )


def has_biases(call) -> bool:
    return call.b_gate_up is not None or call.b_down is not None


def tiles_for(where: torch.device, T: int, K: int, E: int) -> dict:
    """The tuned tiles for the average number of rows of an expert."""
    return tuning.lookup("portable_experts", where, rows=max(1, T * K // E))


def prepare_experts_fwd(call: Experts) -> Optional[Callable]:
    """The tensors of a call -> (out [T, H], gate_up [S, 2 I] by rows if it is kept, routing if
    there is one)."""
    options = call.options
    if not supports(call):
        return None
    if not all(t.is_contiguous() for t in (call.x, call.ids, call.weights)):
        return on_copies(prepare_experts_fwd, call, _contiguous)
    if is_for_few(call):
        return plan_few(call.x, call.w_down, call.ids, options.activation, options.limit)
    return lambda *tensors: _grouped(Experts(*tensors, options))


def _contiguous(x, w_gate_up, w_down, ids, weights, *biases) -> tuple:
    return x.contiguous(), w_gate_up, w_down, ids.contiguous(), weights.contiguous(), *biases


def is_for_few(call: Experts) -> bool:
    """True if few.py computes the call: it takes one layout of the weights, and no biases."""
    if has_biases(call) or call.options.keeps or not call.w_down.is_contiguous():
        return False
    return are_few(call.device, *call.ids.shape, *call.w_down.shape)


def _grouped(call: Experts) -> tuple:
    x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, options = call
    activation, limit, keeps, recompute, _, interleaved = options
    T, (E, _, I), K = x.shape[0], w_down.shape, ids.shape[1]
    gate_up = x.new_empty((T * K, 2 * I)) if keeps and not recompute else None  # [S, 2 I]
    if x.numel() == 0:
        return torch.empty_like(x), gate_up, new_buffer(ids, E) if keeps else None
    tiles = tiles_for(x.device, T, K, E)
    routing = route(ids, E, tiles["BLOCK_M"])
    z = x.new_empty((routing.places, I))
    up(x, w_gate_up, b_gate_up, interleaved, routing, z, gate_up, activation, limit, tiles["up"])
    y = rows_product(z, w_down, routing, tiles["down"])  # [.., H]
    out = combine(y, weights, routing, ids, b_down)
    return out, gate_up, routing.buffer if keeps else None


def prepare_experts_bwd(
    call: ExpertsBackward, product: Callable = weight_gradient, gate: Optional[Callable] = None
) -> Optional[Callable]:
    """The six gradients as a function of the call's tensors. A gradient is None if not needed or
    added to a main_grad.

    product: the function used as weight_gradient. gate: a replacement for gate_gradient that takes
    dout by places. main_grads of the function: fp32 tensors to which the gradients of w_gate_up and
    w_down are added, or None.
    """
    options = call.options
    if not supports(call):
        return None

    def run(*tensors, main_grads=(None, None)):
        call = ExpertsBackward(*tensors, options)
        return call.in_layout(_gradients(call, main_grads, product, gate))

    return run


def _gradients(
    call: ExpertsBackward, main_grads: tuple, product: Callable, gate: Optional[Callable]
) -> Tuple[Optional[torch.Tensor], ...]:
    x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, dout, gate_up, buffer, options = call
    needs, activation, limit, interleaved = options
    dout, x, weights = dout.contiguous(), x.contiguous(), weights.contiguous()
    by_rows = w_down.is_contiguous()
    T, (E, _, I), K = x.shape[0], w_down.shape, weights.shape[1]
    if x.numel() == 0:
        return _zeros((x, w_gate_up, w_down, weights, b_gate_up, b_down), needs, main_grads)
    tiles = tiles_for(x.device, T, K, E)
    routing = Routing(buffer, T, K, E, tiles["BLOCK_M"])
    if gate_up is None:
        gate_up = x.new_empty((T * K, 2 * I))  # [S, 2 I]
        more = (routing, None, gate_up, activation, limit, tiles["up"])
        up(x, w_gate_up, b_gate_up, interleaved, *more)
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
    if has_biases(call):
        more = (ids, weights, b_down, needs[3:], routing, tiles["weight"])
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
