"""The operators of the routed experts, and how a call reaches them.

What is kept for the gradient: x, the routing, and gate_up [S, 2 I], S = T K, unless it is to be
made again.
"""

import functools
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

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
from ..swiglu.ops_mlp import into_main_grad, stand_in
from . import reference
from .call import ExpertsGradient, ExpertsOptions, routing_size

FAMILY = "experts.experts"


@operator("experts_fwd")
def _experts_fwd(
    x: Tensor,  # [T, H]
    w_gate_up: Tensor,  # [E, 2 I, H]
    w_down: Tensor,  # [E, H, I]
    ids: Tensor,  # [T, K]
    weights: Tensor,  # [T, K]
    *options: ExpertsOptions,
) -> Tuple[Tensor, Tensor, Tensor]:  # out [T, H], gate_up [S, 2 I], routing
    args = (x, w_gate_up, w_down, ids, weights, ExpertsOptions(*options))
    out, gate_up, routing = serve(FAMILY, "experts_fwd", _by_torch, args)
    if routing is None:  # the gradient of who served does not read them
        gate_up, routing = _room(*args)
    return out, gate_up, routing


def _room(x, w_gate_up, w_down, ids, weights, options) -> Tuple[Optional[Tensor], ...]:
    """gate_up and routing, not filled."""
    if not options.keeps:
        return None, None
    S, (E, width, _) = ids.numel(), w_gate_up.shape
    routing = ids.new_empty(routing_size(S, E), dtype=torch.int32)
    return None if options.recompute else x.new_empty(S, width), routing


@_experts_fwd.register_fake
def _(x, w_gate_up, w_down, ids, weights, *options):
    kept = _room(x, w_gate_up, w_down, ids, weights, ExpertsOptions(*options))
    return (x.new_empty(x.shape), *[present(tensor, x) for tensor in kept])


@operator("experts_bwd")
def _experts_bwd(
    x: Tensor,  # [T, H]
    w_gate_up: Tensor,  # [E, 2 I, H]
    w_down: Tensor,  # [E, H, I]
    ids: Tensor,  # [T, K]
    weights: Tensor,  # [T, K]
    dout: Tensor,  # [T, H]
    gate_up: Optional[Tensor],  # [S, 2 I]
    routing: Tensor,
    needs: List[bool],  # of x, w_gate_up, w_down, weights
    *options: ExpertsOptions,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # their gradients, if needed
    tensors = (x, w_gate_up, w_down, ids, weights, dout, gate_up, routing)
    return _gradients((None, None), *tensors, needs, *options)


@_experts_bwd.register_fake
def _(x, w_gate_up, w_down, ids, weights, dout, gate_up, routing, needs, *options):
    tensors = (x, w_gate_up, w_down, weights)
    return tuple([t.new_empty(t.shape if n else (0,)) for t, n in zip(tensors, needs)])


def _gradients(
    main_grads, x, w_gate_up, w_down, ids, weights, dout, gate_up, routing, needs, *options
) -> Sequence[Optional[Tensor]]:
    """The gradients of x, w_gate_up, w_down and weights; None where not needed, or where it was
    added to one of main_grads, which are the two weights'."""
    gradient = ExpertsGradient(dout, gate_up, routing, needs, main_grads)
    args = (x, w_gate_up, w_down, ids, weights, ExpertsOptions(*options), gradient)
    return serve(FAMILY, "experts_bwd", _gradients_by_torch, args)


def _save(ctx, inputs, output):
    _, gate_up, routing = output
    ctx.options = ExpertsOptions(*inputs[5:])
    ctx.save_for_backward(*inputs[:5], None if ctx.options.recompute else gate_up, routing)
    ctx.mark_non_differentiable(*[x for x in (gate_up, routing) if x is not None])
    ctx.set_materialize_grads(False)
    adds = ctx.options.main_grad
    ctx.mains = [w if adds and hasattr(w, "main_grad") else None for w in inputs[1:3]]


def _backward(ctx, dout, *_):
    """Of x, w_gate_up, w_down, ids and weights; those of mains are added to their main_grad."""
    x, w_gate_up, w_down, ids, weights, *options = ctx.needs_input_grad
    nothing = [None for _ in options]
    if dout is None:
        return (None, None, None, None, None, *nothing)
    needs = [x, w_gate_up, w_down, weights]
    *tensors, gate_up, routing = ctx.saved_tensors
    args = (*tensors, dout, gate_up, routing, needs, *ctx.options)
    if any(weight is not None for weight in ctx.mains):
        main_grads = [w if w is None else w.main_grad for w in ctx.mains]
        found = _experts_bwd.run(functools.partial(_gradients, main_grads), *args)
    else:
        found = _experts_bwd(*args)
    dx, *dw, dweights = [g if needed else None for g, needed in zip(found, needs)]
    for i, weight in enumerate(ctx.mains):
        if weight is not None and needs[1 + i]:
            dw[i] = stand_in(weight)
    return (dx, *dw, None, dweights, *nothing)


_experts_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_experts_bwd, "fused_experts")


def _by_torch(x, w_gate_up, w_down, ids, weights, options) -> tuple:
    """What torch can differentiate; nothing is kept."""
    if options.main_grad:
        w_gate_up, w_down = map(into_main_grad, (w_gate_up, w_down))
    args = (x, w_gate_up, w_down, ids, weights, options.activation, options.limit)
    return reference.experts_fwd(*args), None, None


def _gradients_by_torch(x, w_gate_up, w_down, ids, weights, options, gradient) -> tuple:
    args = (x, w_gate_up, w_down, ids, weights, options.activation, options.limit)
    found = list(reference.experts_bwd(gradient.dout, *args, gradient.needs))
    for i, main_grad in enumerate(gradient.main_grads, 1):
        if main_grad is not None and found[i] is not None:
            main_grad.add_(found[i])
            found[i] = None
    return tuple(found)


def _options(tensors, activation, limit, recompute, main_grad) -> ExpertsOptions:
    return ExpertsOptions(activation, limit, needs_grad(tensors), recompute, main_grad)


def plan_experts(x, w_gate_up, w_down, ids, weights, *options) -> Optional[Callable]:
    """What serves all eager calls like this one, from their tensors: a tuple, of which the first is
    out; or None. Where addresses differ in what kernels ask of them it makes nothing and returns
    None."""
    tensors = (x, w_gate_up, w_down, ids, weights)
    options = _options(tensors, *options)
    launch = plan(FAMILY, "experts_fwd", (*tensors, options), differentiable=True)
    if launch is None or not options.keeps:
        return launch

    def body(*args):
        return launch(*args[:5]) or _experts_fwd.body(*args)

    return lambda *tensors: _experts_fwd.run(body, *tensors, *options)


def experts(
    x, w_gate_up, w_down, ids, weights, activation, limit, recompute, main_grad
) -> Tensor:  # [T, H]
    tensors = (x, w_gate_up, w_down, ids, weights)
    options = _options(tensors, activation, limit, recompute, main_grad)
    if torch.compiler.is_compiling():  # whoever serves: the reference reads the ids on the host
        if options.keeps and main_grad:
            raise NotImplementedError("main_grad=True is for eager mode, not torch.compile")
        return _experts_fwd(*tensors, *options)[0]

    def op(*args):
        return _experts_fwd(*args[:5], *options)

    differentiable = all([type(tensor) in PLAIN for tensor in tensors])
    args = (*tensors, options)
    return run(FAMILY, "experts_fwd", op, _by_torch, args, differentiable=differentiable)[0]
