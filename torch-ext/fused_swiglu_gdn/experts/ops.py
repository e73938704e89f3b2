"""The routed experts as an operation.

Saved for the gradient: x, the routing, and gate_up [S, 2 I], S = T K, unless it is recomputed.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..runtime.call import tensors_in
from ..runtime.main_grad import into_main_grad, stand_in
from ..runtime.operation import Operation
from ..runtime.ops import PLAIN, autocast
from . import checks, reference
from .call import Experts, ExpertsBackward, routing_size

FAMILY = "experts.experts"
WEIGHTS = ("w_gate_up", "w_down")  # which kernels read by TMA


def _unfilled(call: Experts) -> Tuple[Optional[Tensor], ...]:
    """gate_up and routing, uninitialised, or None if they are not kept."""
    if not call.options.keeps:
        return None, None
    S, (E, width, _) = call.ids.numel(), call.w_gate_up.shape
    routing = call.ids.new_empty(routing_size(S, E), dtype=torch.int32)
    return None if call.options.recompute else call.x.new_empty(S, width), routing


def _by_torch(call: Experts) -> tuple:
    """The forward by operations that torch can differentiate; its gradient reads nothing kept."""
    if call.options.main_grad:
        gate_up, down = map(into_main_grad, (call.w_gate_up, call.w_down))
        call = call._replace(w_gate_up=gate_up, w_down=down)
    return reference.experts_fwd(call), *_unfilled(call)


def _gradients_by_torch(call: ExpertsBackward, main_grads=(None, None)) -> tuple:
    found = list(reference.experts_bwd(call))
    for i, main_grad in enumerate(main_grads, 1):
        if main_grad is not None and found[i] is not None:
            main_grad.add_(found[i])
            found[i] = None
    return call.in_layout(found)


def _results(call: Experts) -> tuple:
    return call.x.new_empty(call.x.shape), *_unfilled(call)


def _gradients_like(call: ExpertsBackward) -> tuple:
    x, w_gate_up, w_down, _, weights, b_gate_up, b_down, *_ = call
    tensors = (x, w_gate_up, w_down, weights, b_gate_up, b_down)
    made = [None if t is None else t.new_empty(t.shape) for t in tensors]
    made[1:3] = map(torch.empty_like, (w_gate_up, w_down))
    return tuple([t if needed else None for t, needed in zip(made, call.options.needs)])


def _cast(x, w_gate_up, w_down, ids, weights, b_gate_up, b_down) -> tuple:
    x, w_gate_up, w_down, *biases = autocast(x, w_gate_up, w_down, b_gate_up, b_down)
    return x, w_gate_up, w_down, ids, weights, *biases


EXPERTS = Operation(
    FAMILY, "experts_fwd", Experts, _by_torch, check=checks.fused_experts, cast=_cast, outputs=3,
    fake=_results, aligned=WEIGHTS, opaque=True,
    differentiable=lambda call: all([t is None or type(t) in PLAIN for t in tensors_in(call)]),
)  # fmt: skip
GRADIENT = Operation(
    FAMILY, "experts_bwd", ExpertsBackward, _gradients_by_torch, outputs=6, fake=_gradients_like,
    aligned=WEIGHTS,
)  # fmt: skip


def _save(ctx, inputs, output):
    _, gate_up, routing = output
    activation, limit, _, recompute, adds, interleaved = inputs[7:]
    ctx.options = (activation, limit, interleaved)
    ctx.save_for_backward(*inputs[:7], None if recompute else gate_up, routing)
    ctx.mark_non_differentiable(*[x for x in (gate_up, routing) if x is not None])
    ctx.set_materialize_grads(False)
    ctx.mains = [w if adds and hasattr(w, "main_grad") else None for w in inputs[1:3]]


def _backward(ctx, dout, *_):
    """Gradients of x, w_gate_up, w_down, ids, weights and the biases.

    Those of weights in ctx.mains are added to their main_grad.
    """
    x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, *options = ctx.needs_input_grad
    nothing = [None for _ in options]
    if dout is None:
        return (None,) * 7 + tuple(nothing)
    needs = (x, w_gate_up, w_down, weights, b_gate_up, b_down)
    *tensors, gate_up, routing = ctx.saved_tensors
    args = (*tensors, dout, gate_up, routing, needs, *ctx.options)
    if any(weight is not None for weight in ctx.mains):
        main_grads = [w if w is None else w.main_grad for w in ctx.mains]

        def body(*args):
            return GRADIENT.launcher(args)(*args[:10], main_grads=main_grads)

        found = GRADIENT.op.run(body, *args)
    else:
        found = GRADIENT.in_gradient(args[:10], args[10:])
    dx, *dw, dweights, db_gate_up, db_down = [
        g if needed else None for g, needed in zip(found, needs)
    ]
    for i, weight in enumerate(ctx.mains):
        if weight is not None and needs[1 + i]:
            dw[i] = stand_in(weight)
    return (dx, *dw, None, dweights, db_gate_up, db_down, *nothing)


EXPERTS.register_gradient(_save, _backward, GRADIENT, "fused_experts")
