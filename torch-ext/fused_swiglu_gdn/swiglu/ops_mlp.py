"""The whole MLP of SwiGLU with gradients, where kernels serve, as ops_train.py has SwiGLU.

The forward keeps x and gate_up [M, 2 N]; or x alone (recompute), or z as well (keep_z). With
main_grad the weights' gradients are added, in fp32, to the `main_grad` of weights that have one.
"""

from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from .._ops import add_op_namespace_prefix
from ..runtime import dispatch
from ..runtime.ops import dense, present
from .ops_train import apart, launcher, shapes


@torch.library.custom_op(add_op_namespace_prefix("swiglu_mlp_fwd"), mutates_args=())
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
) -> Tuple[Tensor, Tensor, Tensor]:  # y [M, D], gate_up [M, 2 N], z [M, N]: empty if not kept
    args = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return _run(*args, activation, recompute, keep_z)


def _run(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute, keep_z):
    args = (x, w_gate, w_up, b_gate, b_up, activation)
    if recompute:
        z = dispatch.choose("swiglu.forward", "swiglu_fwd", False, args)(*args)
        gate_up = x.new_empty(0)
    else:
        z, gate_up = launcher("swiglu_saving_fwd", *args)
    return F.linear(z, w_down, b_down), gate_up, z if keep_z else x.new_empty(0)


@_swiglu_mlp_fwd.register_fake
def _(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute, keep_z):
    M, N = x.shape[0], w_gate.shape[0]
    gate_up = x.new_empty((0,) if recompute else (M, 2 * N))
    return x.new_empty(M, w_down.shape[0]), gate_up, x.new_empty((M, N) if keep_z else (0,))


@torch.library.custom_op(add_op_namespace_prefix("swiglu_mlp_bwd"), mutates_args=("gate_up",))
def _swiglu_mlp_bwd(
    dy: Tensor,  # [M, D]
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    w_down: Tensor,  # [D, N]
    b_gate: Optional[Tensor],  # [N]
    b_up: Optional[Tensor],  # [N]
    gate_up: Tensor,  # [M, 2 N], overwritten; or empty
    z: Tensor,  # [M, N]; or empty
    activation: str,
    needs: List[bool],
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # dx, dw, db_gate, db_up, dw_down
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, gate_up, z)
    gradients = _run_bwd(dy, *tensors, activation, needs, (None, None, None))
    return tuple([present(gradient, x) for gradient in gradients])


def _run_bwd(
    dy, x, w_gate, w_up, w_down, b_gate, b_up, gate_up, z, activation, needs, main_grads
) -> tuple:
    if gate_up.numel() == 0:
        gate_up = launcher("swiglu_projections", x, w_gate, w_up, b_gate, b_up)
    z = z if z.numel() else None
    args = (dy, x, w_gate, w_up, w_down, gate_up, z, activation, needs, main_grads)
    return launcher("swiglu_mlp_bwd", *args)


@_swiglu_mlp_bwd.register_fake
def _(dy, x, w_gate, w_up, w_down, b_gate, b_up, gate_up, z, activation, needs):
    found = [*shapes(x, w_gate, needs), w_down.shape if needs[5] else (0,)]
    return tuple([x.new_empty(shape) for shape in found])


def _save(ctx, inputs, output):
    x, w_gate, w_up, w_down, b_gate, b_up, _, ctx.activation, _, _ = inputs
    ctx.save_for_backward(x, w_gate, w_up, w_down, b_gate, b_up, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, dy, tensors, run, elsewhere=(False, False)) -> tuple:
    """Gradients of the first seven arguments; run: the operator, or past it.

    elsewhere: whether those of w_gate and w_up have gone to a main_grad.
    """
    x, gate, up, down, b_gate, b_up, b_down = ctx.needs_input_grad[:7]
    needs = [x, gate, up, b_gate, b_up, down]
    gradients = run(dense(dy), *tensors, ctx.activation, needs)
    here = [needed and not gone for needed, gone in zip((gate, up), elsewhere)]
    dx, dw_gate, dw_up, db_gate, db_up = apart(gradients, [x, *here, b_gate, b_up])
    dw_down = gradients[4] if down else None
    db_down = dy.sum(0, dtype=torch.float32).to(dy.dtype) if b_down else None  # [D]
    return dx, dw_gate, dw_up, dw_down, db_gate, db_up, db_down


def _backward(ctx, dy, *_):
    *tensors, gate_up, z = ctx.saved_tensors
    if gate_up.numel() == 0:
        gate_up = gate_up.new_empty(0)  # nothing is overwritten, so a second backward is right
    return (*_gradients(ctx, dy, (*tensors, gate_up, z), _swiglu_mlp_bwd), None, None, None)


_swiglu_mlp_fwd.register_autograd(_backward, setup_context=_save)


def _stand_in(weight: Tensor) -> Optional[Tensor]:
    """What Megatron's hooks want for a gradient that is in main_grad already."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


class _IntoMainGrad(torch.autograd.Function):
    """A weight, whose gradient goes into its main_grad."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ctx.weight.main_grad.add_(gradient)
        return _stand_in(ctx.weight)


def into_main_grad(weight: Tensor) -> Tensor:
    """The weight for an MLP that torch differentiates: if it has a main_grad, that is added to."""
    wanted = torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")
    return _IntoMainGrad.apply(weight) if wanted else weight


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        *args, main_grad = args
        y, gate_up, z = _run(*args)
        x, w_gate, w_up, w_down, b_gate, b_up, _, ctx.activation, _, _ = args
        ctx.save_for_backward(x, w_gate, w_up, w_down, b_gate, b_up, gate_up, z)
        weights = (w_gate, w_up, w_down)
        ctx.mains = [w if main_grad and hasattr(w, "main_grad") else None for w in weights]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        tensors = ctx.saved_tensors
        main_grads = [w if w is None else w.main_grad for w in ctx.mains]
        gone = [main_grad is not None for main_grad in main_grads[:2]]
        gradients = _gradients(ctx, dy, tensors, lambda *a: _run_bwd(*a, main_grads), gone)
        gradients = list(gradients)
        for i, weight in enumerate(ctx.mains, 1):
            if weight is not None and ctx.needs_input_grad[i]:
                gradients[i] = _stand_in(weight)
        if tensors[6].numel():
            increment_version(tensors[6])
        return (*gradients, None, None, None, None)


def swiglu_mlp_train(*args) -> Tensor:
    """y [M, D] of x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute, keep_z,
    main_grad."""
    if torch.compiler.is_compiling():
        return _swiglu_mlp_fwd(*args[:-1])[0]  # checks/ refuses main_grad here
    return _MLP.apply(*args)
