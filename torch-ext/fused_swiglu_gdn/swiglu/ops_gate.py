"""The gate of SwiGLU alone, act(gate) * up: its operators, and how a call reaches them.

Kept for the gradient: gate and up.
"""

from typing import Tuple

import torch
from torch import Tensor

from ..runtime import dispatch
from ..runtime.ops import PLAIN, dense, needs_grad, no_second_derivative, operator, plan, serve
from . import reference

FAMILY = "swiglu.gate"


@operator("silu_mul_fwd")
def _silu_mul_fwd(
    gate: Tensor,  # [M, N]
    up: Tensor,  # [M, N]
    activation: str,
) -> Tensor:  # [M, N]
    return serve(FAMILY, "silu_mul_fwd", reference.silu_mul, (gate, up, activation))


@_silu_mul_fwd.register_fake
def _(gate, up, activation):
    return gate.new_empty(gate.shape)


@operator("silu_mul_bwd")
def _silu_mul_bwd(
    gate: Tensor,  # [M, N]
    up: Tensor,  # [M, N]
    dz: Tensor,  # [M, N]
    activation: str,
) -> Tuple[Tensor, Tensor]:  # their gradients
    args = (gate, up, dense(dz), activation)
    return serve(FAMILY, "silu_mul_bwd", reference.silu_mul_bwd, args)


@_silu_mul_bwd.register_fake
def _(gate, up, dz, activation):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dz):
    return (*_silu_mul_bwd(*ctx.saved_tensors, dz, ctx.activation), None)


_silu_mul_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_silu_mul_bwd, "silu_mul")


def silu_mul(gate, up, activation) -> Tensor:
    """act(gate) * up [M, N]."""
    args = (gate, up, activation)
    grad = needs_grad(args)
    if torch.compiler.is_compiling():
        needed = "silu_mul_bwd" if grad else "silu_mul_fwd"
        kernels = dispatch.has_kernels(FAMILY, needed, gate.device.type, gate.device.index)
        return (_silu_mul_fwd if kernels else reference.silu_mul)(*args)
    launch = None
    if type(gate) in PLAIN and type(up) in PLAIN:
        launch = dispatch.choose(FAMILY, "silu_mul_fwd", grad, args)
    if launch is None:
        return reference.silu_mul(*args)
    return _silu_mul_fwd.run(launch, *args) if grad else launch(*args)


def plan_silu_mul(gate, up, activation, shape):
    """What serves all eager calls of silu_mul like this one, from their tensors, with a result of
    this shape; or None."""
    make = plan(FAMILY, "silu_mul_fwd", (gate, up, activation))
    return None if make is None else make(shape)
