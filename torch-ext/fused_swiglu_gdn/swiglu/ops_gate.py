"""The gate of SwiGLU alone, act(gate) * up: operators and dispatch.

Saved for the gradient: gate and up.
"""

from typing import Callable, Optional, Tuple

from torch import Tensor

from ..runtime.ops import dense, no_second_derivative, operator, plan, run, serve
from . import reference

FAMILY = "swiglu.gate"


@operator("silu_mul_fwd", like=("gate",))
def _silu_mul_fwd(
    gate: Tensor,  # [M, N]
    up: Tensor,  # [M, N]
    activation: str,
) -> Tensor:  # [M, N]
    return serve(FAMILY, "silu_mul_fwd", reference.silu_mul, (gate, up, activation))


@operator("silu_mul_bwd", like=("gate", "up"))
def _silu_mul_bwd(
    gate: Tensor,  # [M, N]
    up: Tensor,  # [M, N]
    dz: Tensor,  # [M, N]
    activation: str,
) -> Tuple[Tensor, Tensor]:  # their gradients
    args = (gate, up, dense(dz), activation)
    return serve(FAMILY, "silu_mul_bwd", reference.silu_mul_bwd, args)


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dz):
    return (*_silu_mul_bwd(*ctx.saved_tensors, dz, ctx.activation), None)


_silu_mul_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_silu_mul_bwd, "silu_mul")


def silu_mul(*args) -> Tensor:
    """act(gate) * up [M, N] of gate, up and activation."""
    return run(FAMILY, "silu_mul_fwd", _silu_mul_fwd, reference.silu_mul, args)


def plan_silu_mul(gate, up, activation, shape) -> Optional[Callable]:
    """Returns a function of the tensors for all eager calls that match this one, or None.

    Its result has the shape given.
    """
    make = plan(FAMILY, "silu_mul_fwd", (gate, up, activation))
    return None if make is None else make(shape)
