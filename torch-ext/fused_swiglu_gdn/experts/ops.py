"""Operators of the routed experts, and their dispatch.

Saved for the gradient: x, the routing, and gate_up [S, 2 I], S = T K, unless it is recomputed.
"""

import functools
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..runtime.main_grad import into_main_grad, stand_in
from ..runtime.ops import (
    PLAIN,
    needs_grad,
    no_second_derivative,
    operator,
    plan,
    present,
    run,
    serve,
)
from . import reference
from .call import Biases, ExpertsGradient, ExpertsOptions, routing_size

FAMILY = "experts.experts"


@operator("experts_fwd")
def _experts_fwd(
    x: Tensor,  # [T, H]
    w_gate_up: Tensor,  # [E, 2 I, H]
    w_down: Tensor,  # [E, H, I]
    ids: Tensor,  # [T, K]
    weights: Tensor,  # [T, K]
    b_gate_up: Optional[Tensor],  # [E, 2 I]
    b_down: Optional[Tensor],  # [E, H]
    *options: ExpertsOptions,
) -> Tuple[Tensor, Tensor, Tensor]:  # out [T, H], gate_up [S, 2 I], routing
    biases, asked = Biases(b_gate_up, b_down), ExpertsOptions(*options)
    args = (x, w_gate_up, w_down, ids, weights, biases, asked)
    out, gate_up, routing = serve(FAMILY, "experts_fwd", _by_torch, args)
    if routing is None:  # the gradient of who served does not read them
        gate_up, routing = _unfilled(x, w_gate_up, ids, asked)
    return out, gate_up, routing


def _unfilled(x, w_gate_up, ids, options) -> Tuple[Optional[Tensor], ...]:
    """gate_up and routing, uninitialised, or None if they are not kept."""
    if not options.keeps:
        return None, None
    S, (E, width, _) = ids.numel(), w_gate_up.shape
    routing = ids.new_empty(routing_size(S, E), dtype=torch.int32)
    return None if options.recompute else x.new_empty(S, width), routing


@_experts_fwd.register_fake
def _(x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, *options):
    kept = _unfilled(x, w_gate_up, ids, ExpertsOptions(*options))
    return (x.new_empty(x.shape), *[present(tensor, x) for tensor in kept])


@operator("experts_bwd")
def _experts_bwd(
    x: Tensor,  # [T, H]
    w_gate_up: Tensor,  # [E, 2 I, H]
    w_down: Tensor,  # [E, H, I]
    ids: Tensor,  # [T, K]
    weights: Tensor,  # [T, K]
    b_gate_up: Optional[Tensor],  # [E, 2 I]
    b_down: Optional[Tensor],  # [E, H]
    dout: Tensor,  # [T, H]
    gate_up: Optional[Tensor],  # [S, 2 I]
    routing: Tensor,
    needs: List[bool],  # of x, w_gate_up, w_down, weights, b_gate_up, b_down
    *options: ExpertsOptions,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # their gradients, if needed
    tensors = (x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, dout, gate_up, routing)
    return _gradients((None, None), *tensors, needs, *options)


@_experts_bwd.register_fake
def _(
    x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, dout, gate_up, routing, needs, *options
):  # fmt: skip
    tensors = (x, w_gate_up, w_down, weights, b_gate_up, b_down)
    found = [
        x.new_empty(0) if not needed
        else torch.empty_like(t) if t is w_gate_up or t is w_down
        else t.new_empty(t.shape)
        for t, needed in zip(tensors, needs)
    ]  # fmt: skip
    return tuple(found)


def _gradients(
    main_grads, x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, dout, gate_up, routing,
    needs, *options,
) -> Sequence[Optional[Tensor]]:  # fmt: skip
    """Gradients of x, w_gate_up, w_down, weights and the biases.

    They are None if not needed, or if added to one of main_grads, which belong to the two weights.
    Those of the weights have the weights' layout in memory.
    """
    gradient = ExpertsGradient(dout, gate_up, routing, needs, main_grads)
    biases, asked = Biases(b_gate_up, b_down), ExpertsOptions(*options)
    args = (x, w_gate_up, w_down, ids, weights, biases, asked, gradient)
    found = list(serve(FAMILY, "experts_bwd", _gradients_by_torch, args))
    for i, weight in ((1, w_gate_up), (2, w_down)):
        if found[i] is not None and not weight.is_contiguous():
            like = torch.empty_like(weight)
            found[i] = found[i] if found[i].stride() == like.stride() else like.copy_(found[i])
    return tuple(found)


def _save(ctx, inputs, output):
    _, gate_up, routing = output
    ctx.options = ExpertsOptions(*inputs[7:])
    ctx.save_for_backward(*inputs[:7], None if ctx.options.recompute else gate_up, routing)
    ctx.mark_non_differentiable(*[x for x in (gate_up, routing) if x is not None])
    ctx.set_materialize_grads(False)
    adds = ctx.options.main_grad
    ctx.mains = [w if adds and hasattr(w, "main_grad") else None for w in inputs[1:3]]


def _backward(ctx, dout, *_):
    """Gradients of x, w_gate_up, w_down, ids, weights and the biases.

    Those of weights in ctx.mains are added to their main_grad.
    """
    x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, *options = ctx.needs_input_grad
    nothing = [None for _ in options]
    if dout is None:
        return (None,) * 7 + tuple(nothing)
    needs = [x, w_gate_up, w_down, weights, b_gate_up, b_down]
    *tensors, gate_up, routing = ctx.saved_tensors
    args = (*tensors, dout, gate_up, routing, needs, *ctx.options)
    if any(weight is not None for weight in ctx.mains):
        main_grads = [w if w is None else w.main_grad for w in ctx.mains]
        found = _experts_bwd.run(functools.partial(_gradients, main_grads), *args)
    else:
        found = _experts_bwd(*args)
    dx, *dw, dweights, db_gate_up, db_down = [
        g if needed else None for g, needed in zip(found, needs)
    ]
    for i, weight in enumerate(ctx.mains):
        if weight is not None and needs[1 + i]:
            dw[i] = stand_in(weight)
    return (dx, *dw, None, dweights, db_gate_up, db_down, *nothing)


_experts_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_experts_bwd, "fused_experts")


def _by_torch(x, w_gate_up, w_down, ids, weights, biases, options) -> tuple:
    """The forward by operations that torch can differentiate; returns nothing to keep."""
    if options.main_grad:
        w_gate_up, w_down = map(into_main_grad, (w_gate_up, w_down))
    args = (x, w_gate_up, w_down, ids, weights, options.activation, options.limit)
    return reference.experts_fwd(*args, options.interleaved, biases), None, None


def _gradients_by_torch(x, w_gate_up, w_down, ids, weights, biases, options, gradient) -> tuple:
    args = (x, w_gate_up, w_down, ids, weights, options.activation, options.limit, gradient.needs)
    found = list(reference.experts_bwd(gradient.dout, *args, options.interleaved, biases))
    for i, main_grad in enumerate(gradient.main_grads, 1):
        if main_grad is not None and found[i] is not None:
            main_grad.add_(found[i])
            found[i] = None
    return tuple(found)


def _options(tensors, activation, limit, recompute, main_grad, interleaved) -> ExpertsOptions:
    return ExpertsOptions(activation, limit, needs_grad(tensors), recompute, main_grad, interleaved)


def plan_experts(
    x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, *options
) -> Optional[Callable]:
    """Returns a function of the tensors for all eager calls that match this one, or None.

    The function returns a tuple that begins with out. It returns None, without computing anything,
    if the kernels cannot take the addresses of a call.
    """
    tensors, biases = (x, w_gate_up, w_down, ids, weights), Biases(b_gate_up, b_down)
    options = _options((*tensors, biases), *options)
    launch = plan(FAMILY, "experts_fwd", (*tensors, biases, options), differentiable=True)
    if launch is None or not options.keeps:
        return launch

    def body(*args):
        return launch(*args[:7]) or _experts_fwd.body(*args)

    return lambda *tensors: _experts_fwd.run(body, *tensors, *options)


def experts(x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, *options) -> Tensor:  # [T, H]
    tensors, biases = (x, w_gate_up, w_down, ids, weights), Biases(b_gate_up, b_down)
    options = _options((*tensors, biases), *options)
    if torch.compiler.is_compiling():  # the reference reads the ids on the host
        if options.keeps and options.main_grad:
            raise NotImplementedError("main_grad=True is for eager mode, not torch.compile")
        return _experts_fwd(*tensors, *biases, *options)[0]

    def op(*args):
        return _experts_fwd(*args[:5], *biases, *options)

    differentiable = all([t is None or type(t) in PLAIN for t in (*tensors, *biases)])
    args = (*tensors, biases, options)
    return run(FAMILY, "experts_fwd", op, _by_torch, args, differentiable=differentiable)[0]
