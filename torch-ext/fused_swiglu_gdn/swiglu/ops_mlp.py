"""The whole SwiGLU MLP as an operation; ops.py has SwiGLU alone.

For its gradient it saves x and gate_up [M, 2 N]; with recompute only x. With main_grad the
weights' gradients are added, in fp32, to the `main_grad` of weights that have one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from ..runtime.main_grad import into_main_grad, stand_in
from ..runtime.operation import Operation, keeps_graph
from ..runtime.ops import autocast
from . import checks
from .call import MlpGradient, SwigluMlp
from .ops import SWIGLU, TRAINING, apart, differentiable, gradients_like, saved


def _composed(call: SwigluMlp) -> Tensor:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, (activation, _, main_grad) = call
    if main_grad:
        w_gate, w_up, w_down = map(into_main_grad, (w_gate, w_up, w_down))
    return F.linear(SWIGLU((x, w_gate, w_up, b_gate, b_up), (activation,)), w_down, b_down)


def _results(call: SwigluMlp) -> tuple:
    """y and gate_up; None if not kept."""
    x = call.x
    y = x.new_empty(*x.shape[:-1], call.w_down.shape[0])
    return y, None if call.options.recompute else saved(call)


def _gradients(call: MlpGradient) -> tuple:
    w_down = call.w_down
    dw_down = w_down.new_empty(w_down.shape) if call.options.needs[5] else None
    return (*gradients_like(call), dw_down)


SAVING = Operation(
    TRAINING, "swiglu_mlp_fwd", SwigluMlp, None, differentiable=differentiable, outputs=2,
    fake=_results,
)  # fmt: skip
GRADIENT = Operation(
    TRAINING, "swiglu_mlp_bwd", MlpGradient, None, written=("gate_up",), outputs=5, fake=_gradients
)
MLP = Operation(
    TRAINING, "swiglu_mlp", SwigluMlp, _composed, check=checks.fused_swiglu_mlp, cast=autocast,
    train=SAVING, schema=None,
)  # fmt: skip


def _save(ctx, inputs, output):
    x, w_gate, w_up, w_down, b_gate, b_up, _, ctx.activation, _, main_grad = inputs
    gate_up = output[1]
    kept = gate_up if gate_up is not None and gate_up.numel() else None
    ctx.save_for_backward(x, w_gate, w_up, w_down, b_gate, b_up, kept)
    if gate_up is not None:
        ctx.mark_non_differentiable(gate_up)
    ctx.set_materialize_grads(False)  # zeros as large as what is kept
    weights = (w_gate, w_up, w_down)
    ctx.mains = [w if main_grad and hasattr(w, "main_grad") else None for w in weights]


def _backward(ctx, dy, _):
    """Gradients of the first seven arguments, with None for weights whose gradient went to
    main_grad."""
    if dy is None:
        return (None,) * 10
    x, gate, up, down, b_gate, b_up, b_down = ctx.needs_input_grad[:7]
    tensors, options = (dy, *ctx.saved_tensors), (ctx.activation, (x, gate, up, b_gate, b_up, down))
    if any(weight is not None for weight in ctx.mains):
        main_grads = [w if w is None else w.main_grad for w in ctx.mains]
        tensors = GRADIENT.spared(tensors) if keeps_graph() else tensors
        gradients = GRADIENT.launcher((*tensors, *options))(*tensors, main_grads=main_grads)
        if tensors[7] is not None:
            increment_version(tensors[7])
    else:
        gradients = GRADIENT.in_gradient(tensors, options)
    here = [n and w is None for n, w in zip((gate, up, down), ctx.mains)]
    dx, *weights, db_gate, db_up = apart(gradients, [x, *here[:2], b_gate, b_up])
    weights.append(gradients[4] if here[2] else None)
    for i, (needed, weight) in enumerate(zip((gate, up, down), ctx.mains)):
        if needed and weight is not None:
            weights[i] = stand_in(weight)
    db_down = None
    if b_down:
        db_down = dy.flatten(0, -2).sum(0, dtype=torch.float32).to(dy.dtype)  # [D]
    return (dx, *weights, db_gate, db_up, db_down, None, None, None)


SAVING.register_gradient(_save, _backward, GRADIENT, "fused_swiglu_mlp")
