"""The SwiGLU operator and its dispatch."""

from typing import Optional

import torch.nn.functional as F
from torch import Tensor

from ..runtime.activations import BY_TORCH
from ..runtime.main_grad import into_main_grad
from ..runtime.ops import operator, plan, run, serve
from . import ops_train as training
from . import reference
from .ops_mlp import swiglu_mlp_train

FORWARD = ("swiglu.forward", "swiglu_fwd")


@operator("swiglu_fwd")
def _swiglu_fwd(
    x: Tensor,  # [M, K]
    w_gate: Tensor,  # [N, K]
    w_up: Tensor,  # [N, K]
    b_gate: Optional[Tensor],  # [N]
    b_up: Optional[Tensor],  # [N]
    activation: str,
) -> Tensor:  # [M, N]
    args = (x, w_gate, w_up, b_gate, b_up, activation)
    return serve(*FORWARD, reference.swiglu_fwd, args)


@_swiglu_fwd.register_fake
def _(x, w_gate, w_up, b_gate, b_up, activation):
    return x.new_empty(x.shape[0], w_gate.shape[0])


def swiglu(x, w_gate, w_up, b_gate, b_up, activation) -> Tensor:
    args = (x, w_gate, w_up, b_gate, b_up, activation)
    if training.trains(*args[:5]) and activation not in BY_TORCH:
        return training.swiglu_train(*args)
    return run(*FORWARD, _swiglu_fwd, reference.swiglu_fwd, args)


def plan_swiglu(x, w_gate, w_up, b_gate, b_up, activation, shape):
    """Returns a function of the tensors for all eager calls that match this one, or None.

    The function takes any x [.., K] with these rows and makes z of the shape given. It returns
    None, without computing anything, if the kernel cannot take the addresses of a call.
    """
    make = plan(*FORWARD, (x, w_gate, w_up, b_gate, b_up, activation))
    return None if make is None else make(shape)


def swiglu_mlp(
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, recompute, keep_z, main_grad
) -> Tensor:
    """y [M, D] = swiglu(...) @ w_down.T + b_down."""
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    if training.trains(*tensors) and activation not in BY_TORCH:
        return swiglu_mlp_train(*tensors, activation, recompute, keep_z, main_grad)
    if main_grad:
        w_gate, w_up, w_down = map(into_main_grad, (w_gate, w_up, w_down))
    return F.linear(swiglu(x, w_gate, w_up, b_gate, b_up, activation), w_down, b_down)
