"""SwiGLU and its whole MLP with gradients, where kernels serve.

The forward keeps x and gate_up [M, 2 N] (or x alone, with recompute); the backward overwrites
gate_up with its gradient, so a second backward over the same graph raises. Tracing sees operators;
eager mode goes past them, by functions that cost a tenth of their time.
"""

from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from .. import dispatch
from .._ops import add_op_namespace_prefix
from .common import PLAIN, needs_grad, present

SERVED = (torch.float16, torch.bfloat16, torch.float32)


def _launcher(operation: str, *args):
    """The kernels' launcher; the caller has asked `trains` before."""
    return dispatch.choose("swiglu_backward", operation, False, args)(*args)


def trains(*args) -> bool:
    """Whether gradients are wanted of these tensors (or None) and kernels make them.

    Portable takes every size and layout; tensor subclasses (DTensor) stay with torch.
    """
    x = args[0]
    if not needs_grad(args) or x.dtype not in SERVED:
        return False
    if not dispatch.has_kernels("swiglu_backward", "swiglu_bwd", x.device.type, x.device.index):
        return False
    return all(arg is None or type(arg) in PLAIN for arg in args)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _shapes(x, w_gate, needs) -> list:
    """Shapes of dx, dw, db_gate, db_up; an absent gradient is an empty tensor."""
    N, K = w_gate.shape
    weights = N * (needs[1] + needs[2])
    dw = (weights, K) if weights else (0,)
    bias = [(N,) if needed else (0,) for needed in needs[3:5]]
    return [x.shape if needs[0] else (0,), dw, *bias]


def _apart(gradients: Sequence[Optional[Tensor]], needs: Sequence[bool]) -> list:
    """dx, dw_gate, dw_up, db_gate, db_up, None where not needed: the weights' share a tensor."""
    dx, dw, db_gate, db_up = gradients[:4]
    dw_gate = dw_up = None
    if needs[1] and needs[2]:
        dw_gate, dw_up = dw.chunk(2)
    elif needs[1]:
        dw_gate = dw
    elif needs[2]:
        dw_up = dw
    found = (dx, dw_gate, dw_up, db_gate, db_up)
    return [gradient if needed else None for gradient, needed in zip(found, needs)]


@torch.library.custom_op(add_op_namespace_prefix("swiglu_saving_fwd"), mutates_args=())
def _swiglu_saving_fwd(
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    b_gate: Optional[Tensor],  # [N]
    b_up: Optional[Tensor],  # [N]
    activation: str,
) -> Tuple[Tensor, Tensor]:  # z [M, N], gate_up [M, 2 N]
    return _launcher("swiglu_saving_fwd", x, w_gate, w_up, b_gate, b_up, activation)


@_swiglu_saving_fwd.register_fake
def _(x, w_gate, w_up, b_gate, b_up, activation):
    M, N = x.shape[0], w_gate.shape[0]
    return x.new_empty(M, N), x.new_empty(M, 2 * N)


@torch.library.custom_op(add_op_namespace_prefix("swiglu_bwd"), mutates_args=("gate_up",))
def _swiglu_bwd(
    dz: Tensor,  # [M, N]
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    gate_up: Tensor,  # [M, 2 N], overwritten
    activation: str,
    needs: List[bool],
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # dx, dw, db_gate, db_up
    args = (_dense(dz), x, w_gate, w_up, gate_up, activation, needs)
    return tuple([present(gradient, x) for gradient in _launcher("swiglu_bwd", *args)])


@_swiglu_bwd.register_fake
def _(dz, x, w_gate, w_up, gate_up, activation, needs):
    return tuple([x.new_empty(shape) for shape in _shapes(x, w_gate, needs)])


def _save(ctx, inputs, output):
    x, w_gate, w_up, _, _, ctx.activation = inputs
    ctx.save_for_backward(x, w_gate, w_up, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dz, _):
    x, w_gate, w_up, gate_up = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    gradients = _swiglu_bwd(dz, x, w_gate, w_up, gate_up, ctx.activation, needs)
    return (*_apart(gradients, needs), None)


_swiglu_saving_fwd.register_autograd(_backward, setup_context=_save)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_gate, w_up, b_gate, b_up, activation):
        z, gate_up = _launcher("swiglu_saving_fwd", x, w_gate, w_up, b_gate, b_up, activation)
        ctx.save_for_backward(x, w_gate, w_up, gate_up)
        ctx.activation = activation
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        x, w_gate, w_up, gate_up = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:5])
        args = (_dense(dz), x, w_gate, w_up, gate_up, ctx.activation, needs)
        gradients = _launcher("swiglu_bwd", *args)
        increment_version(gate_up)
        return (*_apart(gradients, needs), None)


def swiglu_train(*args) -> Tensor:
    """z [M, N] of x, w_gate, w_up, b_gate, b_up and the activation; differentiable."""
    if torch.compiler.is_compiling():
        return _swiglu_saving_fwd(*args)[0]
    return _Gated.apply(*args)


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
) -> Tuple[Tensor, Tensor]:  # y [M, D], gate_up [M, 2 N], or empty to be made again
    args = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return _run_mlp(*args, activation, recompute)


def _run_mlp(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute):
    args = (x, w_gate, w_up, b_gate, b_up, activation)
    if recompute:
        z = dispatch.choose("swiglu", "swiglu_fwd", False, args)(*args)
        return F.linear(z, w_down, b_down), x.new_empty(0)
    z, gate_up = _launcher("swiglu_saving_fwd", *args)
    return F.linear(z, w_down, b_down), gate_up


@_swiglu_mlp_fwd.register_fake
def _(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute):
    M, N = x.shape[0], w_gate.shape[0]
    return x.new_empty(M, w_down.shape[0]), x.new_empty((0,) if recompute else (M, 2 * N))


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
    activation: str,
    needs: List[bool],
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # dx, dw, db_gate, db_up, dw_down
    args = (x, w_gate, w_up, w_down, b_gate, b_up, gate_up, activation, needs)
    return tuple([present(gradient, x) for gradient in _run_mlp_bwd(dy, *args)])


def _run_mlp_bwd(dy, x, w_gate, w_up, w_down, b_gate, b_up, gate_up, activation, needs):
    if gate_up.numel() == 0:
        gate_up = _again(x, w_gate, w_up, b_gate, b_up)
    return _launcher("swiglu_mlp_bwd", dy, x, w_gate, w_up, w_down, gate_up, activation, needs)


def _again(x, w_gate, w_up, b_gate, b_up) -> Tensor:
    """gate_up [M, 2 N]: the two projections once more, without the gate."""
    N = w_gate.shape[0]
    gate_up = x.new_empty(x.shape[0], 2 * N)  # [M, 2 N]
    for half, weight, bias in zip(gate_up.split(N, 1), (w_gate, w_up), (b_gate, b_up)):
        if bias is None:
            torch.mm(x, weight.t(), out=half)
        else:
            torch.addmm(bias, x, weight.t(), out=half)
    return gate_up


@_swiglu_mlp_bwd.register_fake
def _(dy, x, w_gate, w_up, w_down, b_gate, b_up, gate_up, activation, needs):
    shapes = [*_shapes(x, w_gate, needs), w_down.shape if needs[5] else (0,)]
    return tuple([x.new_empty(shape) for shape in shapes])


def _save_mlp(ctx, inputs, output):
    x, w_gate, w_up, w_down, b_gate, b_up, _, ctx.activation, _ = inputs
    ctx.save_for_backward(x, w_gate, w_up, w_down, b_gate, b_up, output[1])
    ctx.mark_non_differentiable(output[1])


def _mlp_gradients(ctx, dy, tensors, run) -> tuple:
    """Gradients of swiglu_mlp_train's nine arguments; run: the operator, or past it."""
    x, gate, up, down, b_gate, b_up, b_down = ctx.needs_input_grad[:7]
    needs = [x, gate, up, b_gate, b_up, down]
    gradients = run(_dense(dy), *tensors, ctx.activation, needs)
    dx, dw_gate, dw_up, db_gate, db_up = _apart(gradients, needs)
    dw_down = gradients[4] if down else None
    db_down = dy.sum(0, dtype=torch.float32).to(dy.dtype) if b_down else None  # [D]
    return dx, dw_gate, dw_up, dw_down, db_gate, db_up, db_down, None, None


def _backward_mlp(ctx, dy, _):
    *tensors, gate_up = ctx.saved_tensors
    if gate_up.numel() == 0:
        gate_up = gate_up.new_empty(0)  # nothing is overwritten, so a second backward is right
    return _mlp_gradients(ctx, dy, (*tensors, gate_up), _swiglu_mlp_bwd)


_swiglu_mlp_fwd.register_autograd(_backward_mlp, setup_context=_save_mlp)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        y, gate_up = _run_mlp(*args)
        x, w_gate, w_up, w_down, b_gate, b_up, _, ctx.activation, _ = args
        ctx.save_for_backward(x, w_gate, w_up, w_down, b_gate, b_up, gate_up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        tensors = ctx.saved_tensors
        gradients = _mlp_gradients(ctx, dy, tensors, _run_mlp_bwd)
        if tensors[-1].numel():
            increment_version(tensors[-1])
        return gradients


def swiglu_mlp_train(*args) -> Tensor:
    """y [M, D] of x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute."""
    if torch.compiler.is_compiling():
        return _swiglu_mlp_fwd(*args)[0]
    return _MLP.apply(*args)
