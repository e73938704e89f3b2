"""The operators of the routed experts, and how a call reaches them.

The forward keeps x, the routing and gate_up [S, 2 I], S = T K; or x and the routing (recompute).
Tracing sees operators; eager mode goes past them.
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._ops import add_op_namespace_prefix
from ..runtime import dispatch
from ..runtime.ops import PLAIN, needs_grad, plan, present, run, serve
from ..swiglu.ops_mlp import _stand_in as stand_in
from . import reference

FORWARD, BACKWARD = "experts.forward", "experts.backward"


@torch.library.custom_op(add_op_namespace_prefix("experts_fwd"), mutates_args=())
def _experts_fwd(
    x: Tensor,  # [T, H]
    w_gate_up: Tensor,  # [E, 2 I, H]
    w_down: Tensor,  # [E, H, I]
    ids: Tensor,  # [T, K]
    weights: Tensor,  # [T, K]
    activation: str,
    limit: Optional[float],
) -> Tensor:  # [T, H]
    args = (x, w_gate_up, w_down, ids, weights, activation, limit)
    return serve(FORWARD, "experts_fwd", reference.experts_fwd, args)


@_experts_fwd.register_fake
def _(x, w_gate_up, w_down, ids, weights, activation, limit):
    return x.new_empty(x.shape)


@torch.library.custom_op(add_op_namespace_prefix("experts_saving_fwd"), mutates_args=())
def _experts_saving_fwd(
    x: Tensor,  # [T, H]
    w_gate_up: Tensor,  # [E, 2 I, H]
    w_down: Tensor,  # [E, H, I]
    ids: Tensor,  # [T, K]
    weights: Tensor,  # [T, K]
    activation: str,
    limit: Optional[float],
    recompute: bool,
) -> Tuple[Tensor, Tensor, Tensor]:  # out [T, H], gate_up [S, 2 I] or empty, routing
    args = (x, w_gate_up, w_down, ids, weights, activation, limit, recompute)
    launch = dispatch.choose(FORWARD, "experts_saving_fwd", False, args)
    if launch is not None:
        return launch(*args)
    out = reference.experts_fwd(*args[:7]).contiguous()
    return (out, *_kept(x, w_gate_up, ids, recompute))  # whose values the gradient does not read


def _kept(x, w_gate_up, ids, recompute) -> Tuple[Tensor, Tensor]:
    """gate_up and routing, not filled; portable/routing.py says how large the latter is."""
    S, (E, width, _) = ids.numel(), w_gate_up.shape
    gate_up = x.new_empty((0,) if recompute else (S, width))
    return gate_up, ids.new_empty(3 * (S + E + 1), dtype=torch.int32)


@_experts_saving_fwd.register_fake
def _(x, w_gate_up, w_down, ids, weights, activation, limit, recompute):
    return (x.new_empty(x.shape), *_kept(x, w_gate_up, ids, recompute))


@torch.library.custom_op(add_op_namespace_prefix("experts_bwd"), mutates_args=())
def _experts_bwd(
    dout: Tensor,  # [T, H]
    x: Tensor,  # [T, H]
    w_gate_up: Tensor,  # [E, 2 I, H]
    w_down: Tensor,  # [E, H, I]
    ids: Tensor,  # [T, K]
    weights: Tensor,  # [T, K]
    gate_up: Tensor,  # [S, 2 I]; or empty
    routing: Tensor,
    activation: str,
    limit: Optional[float],
    needs: List[bool],  # of x, w_gate_up, w_down, weights
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # their gradients; empty where not needed
    tensors = (x, w_gate_up, w_down, ids, weights, gate_up, routing)
    gradients = _gradients(dout, *tensors, activation, limit, needs, (None, None))
    return tuple([present(gradient, x) for gradient in gradients])


def _gradients(
    dout, x, w_gate_up, w_down, ids, weights, gate_up, routing, activation, limit, needs,
    main_grads,
) -> tuple:  # fmt: skip
    """The gradients of x, w_gate_up, w_down, weights; None where not needed, or added to one of
    main_grads, which are the two weights'."""
    tensors = (x, w_gate_up, w_down, weights, gate_up, routing)
    args = (dout, *tensors, activation, limit, needs, main_grads)
    launch = dispatch.choose(BACKWARD, "experts_bwd", False, args)
    if launch is not None:
        return launch(*args)
    tensors = (x, w_gate_up, w_down, ids, weights)
    return reference.experts_bwd(dout, *tensors, activation, limit, needs)


@_experts_bwd.register_fake
def _(dout, x, w_gate_up, w_down, ids, weights, gate_up, routing, activation, limit, needs):
    tensors = (x, w_gate_up, w_down, weights)
    return tuple([t.new_empty(t.shape if n else (0,)) for t, n in zip(tensors, needs)])


def _save(ctx, inputs, output):
    *tensors, ctx.activation, ctx.limit, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _needs(ctx) -> list:
    x, w_gate_up, w_down, _, weights = ctx.needs_input_grad[:5]
    return [x, w_gate_up, w_down, weights]


def _backward(ctx, dout, *_):
    needs = _needs(ctx)
    args = (dout, *ctx.saved_tensors, ctx.activation, ctx.limit, needs)
    found = [g if needed else None for g, needed in zip(_experts_bwd(*args), needs)]
    return (*found[:3], None, found[3], None, None, None)


_experts_saving_fwd.register_autograd(_backward, setup_context=_save)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, launch, *args):
        *args, main_grad = args
        out, gate_up, routing = launch(*args)
        *tensors, ctx.activation, ctx.limit, _ = args
        ctx.save_for_backward(*tensors, gate_up, routing)
        weights = args[1:3]
        ctx.mains = [w if main_grad and hasattr(w, "main_grad") else None for w in weights]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        tensors = ctx.saved_tensors
        x, w_gate_up, w_down, _, weights = ctx.needs_input_grad[1:6]
        needs = [x, w_gate_up, w_down, weights]
        main_grads = [w if w is None else w.main_grad for w in ctx.mains]
        found = list(_gradients(dout, *tensors, ctx.activation, ctx.limit, needs, main_grads))
        for i, weight in enumerate(ctx.mains, 1):
            if weight is not None and needs[i]:
                found[i] = stand_in(weight)
        return (None, *found[:3], None, found[3], None, None, None, None)


def plan_experts(x, w_gate_up, w_down, ids, weights, activation, limit):
    """What serves all eager calls like this one, from their tensors, or None. Where addresses
    differ in what kernels ask of them it makes nothing and returns None."""
    args = (x, w_gate_up, w_down, ids, weights, activation, limit)
    return plan(FORWARD, "experts_fwd", args)


def experts(
    x, w_gate_up, w_down, ids, weights, activation, limit, recompute, main_grad
) -> Tensor:  # [T, H]
    args = (x, w_gate_up, w_down, ids, weights, activation, limit)
    grad = needs_grad(args)
    if torch.compiler.is_compiling():
        if grad and main_grad:
            raise NotImplementedError("main_grad=True is for eager mode, not torch.compile")
        return _experts_saving_fwd(*args, recompute)[0] if grad else _experts_fwd(*args)
    if not grad:
        return run(FORWARD, "experts_fwd", _experts_fwd, reference.experts_fwd, args)
    launch = None
    if all(type(tensor) in PLAIN for tensor in args[:5]):
        launch = dispatch.choose(FORWARD, "experts_saving_fwd", False, (*args, recompute))
    if launch is None:  # torch differentiates the reference
        return reference.experts_fwd(*args)
    return _Experts.apply(launch, *args, recompute, main_grad)
