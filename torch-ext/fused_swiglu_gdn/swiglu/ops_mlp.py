"""The whole SwiGLU MLP with gradients by kernels; ops_train.py has SwiGLU alone.

The forward saves x and gate_up [M, 2 N]; with recompute only x, with keep_z also z. With main_grad
the weights' gradients are added, in fp32, to the `main_grad` of weights that have one.
"""

from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from ..runtime import dispatch
from ..runtime.main_grad import stand_in
from ..runtime.ops import dense, operator
from .ops_train import apart, launcher, shapes


@operator("swiglu_mlp_fwd")
def _swiglu_mlp_fwd(
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    w_down: Tensor,  # [D, N]
    b_gate: Optional[Tensor],  # [N]
    b_up: Optional[Tensor],  # [N]
    b_down: Optional[Tensor],  # [D]
    activation: str,
    recompute: bool,
    keep_z: bool,
    main_grad: bool,  # False where it is traced
) -> Tuple[Tensor, Tensor, Tensor]:  # y [M, D], gate_up [M, 2 N], z [M, N]: None if not kept
    args, gate_up = (x, w_gate, w_up, b_gate, b_up, activation), None
    if recompute:
        z = dispatch.choose("swiglu.forward", "swiglu_fwd", False, args)(*args)
    else:
        z, gate_up = launcher("swiglu_saving_fwd", *args)
    return F.linear(z, w_down, b_down), gate_up, z if keep_z else None


@_swiglu_mlp_fwd.register_fake
def _(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute, keep_z, main_grad):
    M, N = x.shape[0], w_gate.shape[0]
    gate_up = x.new_empty((0,) if recompute else (M, 2 * N))
    return x.new_empty(M, w_down.shape[0]), gate_up, x.new_empty((M, N) if keep_z else (0,))


@operator("swiglu_mlp_bwd", mutates_args=("gate_up",))
def _swiglu_mlp_bwd(
    dy: Tensor,  # [M, D]
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    w_down: Tensor,  # [D, N]
    b_gate: Optional[Tensor],  # [N]
    b_up: Optional[Tensor],  # [N]
    gate_up: Optional[Tensor],  # [M, 2 N], overwritten
    z: Optional[Tensor],  # [M, N]
    activation: str,
    needs: List[bool],
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # dx, dw, db_gate, db_up, dw_down
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, gate_up, z)
    return _run_bwd(dy, *tensors, activation, needs, (None, None, None))


def _run_bwd(
    dy, x, w_gate, w_up, w_down, b_gate, b_up, gate_up, z, activation, needs, main_grads
) -> tuple:
    if gate_up is None:
        gate_up = launcher("swiglu_projections", x, w_gate, w_up, b_gate, b_up)
    args = (dy, x, w_gate, w_up, w_down, gate_up, z, activation, needs, main_grads)
    return launcher("swiglu_mlp_bwd", *args)


@_swiglu_mlp_bwd.register_fake
def _(dy, x, w_gate, w_up, w_down, b_gate, b_up, gate_up, z, activation, needs):
    found = [*shapes(x, w_gate, needs), w_down.shape if needs[5] else (0,)]
    return tuple([x.new_empty(shape) for shape in found])


def _save(ctx, inputs, output):
    x, w_gate, w_up, w_down, b_gate, b_up, _, ctx.activation, _, _, main_grad = inputs
    kept = [t if t is not None and t.numel() else None for t in output[1:]]
    ctx.save_for_backward(x, w_gate, w_up, w_down, b_gate, b_up, *kept)
    ctx.mark_non_differentiable(*[t for t in output[1:] if t is not None])
    ctx.set_materialize_grads(False)  # zeros as large as what is kept
    weights = (w_gate, w_up, w_down)
    ctx.mains = [w if main_grad and hasattr(w, "main_grad") else None for w in weights]


def _backward(ctx, dy, *_):
    """Gradients of the first seven arguments, with None for weights whose gradient went to
    main_grad."""
    if dy is None:
        return (None,) * 11
    x, gate, up, down, b_gate, b_up, b_down = ctx.needs_input_grad[:7]
    needs = [x, gate, up, b_gate, b_up, down]
    args = (dense(dy), *ctx.saved_tensors, ctx.activation, needs)
    if any(weight is not None for weight in ctx.mains):
        gradients = _run_bwd(*args, [w if w is None else w.main_grad for w in ctx.mains])
        if args[7] is not None:
            increment_version(args[7])
    else:
        gradients = _swiglu_mlp_bwd(*args)
    here = [n and w is None for n, w in zip((gate, up, down), ctx.mains)]
    dx, *weights, db_gate, db_up = apart(gradients, [x, *here[:2], b_gate, b_up])
    weights.append(gradients[4] if here[2] else None)
    for i, (needed, weight) in enumerate(zip((gate, up, down), ctx.mains)):
        if needed and weight is not None:
            weights[i] = stand_in(weight)
    db_down = dy.sum(0, dtype=torch.float32).to(dy.dtype) if b_down else None  # [D]
    return (dx, *weights, db_gate, db_up, db_down, None, None, None, None)


_swiglu_mlp_fwd.register_autograd(_backward, setup_context=_save)


def swiglu_mlp_train(*args) -> Tensor:
    """y [M, D] of x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute, keep_z,
    main_grad."""
    return _swiglu_mlp_fwd(*args)[0]
