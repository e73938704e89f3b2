"""SwiGLU with gradients by kernels; ops_mlp.py has the whole MLP.

The forward saves x and gate_up [M, 2 N]; the backward overwrites gate_up with its gradient, so a
second backward over the same graph raises.
"""

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..runtime import dispatch
from ..runtime.dtypes import SERVED
from ..runtime.ops import PLAIN, dense, needs_grad, operator, transformed


def launcher(operation: str, *args):
    """Runs the launcher of an operation; `trains` must have returned True."""
    return dispatch.choose("swiglu.backward", operation, False, args)(*args)


def trains(*args) -> bool:
    """True if gradients of these tensors (or None) are needed and kernels compute them.

    Portable kernels take every size and layout. Tensor subclasses (DTensor) and torch.func
    transforms stay with torch.
    """
    x = args[0]
    if not needs_grad(args) or x.dtype not in SERVED:
        return False
    if not torch.compiler.is_compiling() and transformed():
        return False
    if not dispatch.has_kernels("swiglu.backward", "swiglu_bwd", x.device.type, x.device.index):
        return False
    return all(arg is None or type(arg) in PLAIN for arg in args)


def shapes(x, w_gate, needs) -> list:
    """Shapes of dx, dw, db_gate, db_up; an absent gradient is an empty tensor."""
    N, K = w_gate.shape
    weights = N * (needs[1] + needs[2])
    dw = (weights, K) if weights else (0,)
    bias = [(N,) if needed else (0,) for needed in needs[3:5]]
    return [x.shape if needs[0] else (0,), dw, *bias]


def apart(gradients: Sequence[Optional[Tensor]], needs: Sequence[bool]) -> list:
    """Splits gradients into dx, dw_gate, dw_up, db_gate, db_up, None if not needed.

    The gradients of the two weights share a tensor.
    """
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


@operator("swiglu_saving_fwd")
def _swiglu_saving_fwd(
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    b_gate: Optional[Tensor],  # [N]
    b_up: Optional[Tensor],  # [N]
    activation: str,
) -> Tuple[Tensor, Tensor]:  # z [M, N], gate_up [M, 2 N]
    return launcher("swiglu_saving_fwd", x, w_gate, w_up, b_gate, b_up, activation)


@_swiglu_saving_fwd.register_fake
def _(x, w_gate, w_up, b_gate, b_up, activation):
    M, N = x.shape[0], w_gate.shape[0]
    return x.new_empty(M, N), x.new_empty(M, 2 * N)


@operator("swiglu_bwd", mutates_args=("gate_up",))
def _swiglu_bwd(
    dz: Tensor,  # [M, N]
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    gate_up: Tensor,  # [M, 2 N], overwritten
    activation: str,
    needs: List[bool],
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # dx, dw, db_gate, db_up
    return launcher("swiglu_bwd", dense(dz), x, w_gate, w_up, gate_up, activation, needs)


@_swiglu_bwd.register_fake
def _(dz, x, w_gate, w_up, gate_up, activation, needs):
    return tuple([x.new_empty(shape) for shape in shapes(x, w_gate, needs)])


def _save(ctx, inputs, output):
    x, w_gate, w_up, _, _, ctx.activation = inputs
    ctx.save_for_backward(x, w_gate, w_up, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # zeros as large as what is kept


def _backward(ctx, dz, _):
    if dz is None:
        return (None,) * 6
    x, w_gate, w_up, gate_up = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    gradients = _swiglu_bwd(dz, x, w_gate, w_up, gate_up, ctx.activation, needs)
    return (*apart(gradients, needs), None)


_swiglu_saving_fwd.register_autograd(_backward, setup_context=_save)


def swiglu_train(*args) -> Tensor:
    """z [M, N] of x, w_gate, w_up, b_gate, b_up and the activation; differentiable."""
    return _swiglu_saving_fwd(*args)[0]
