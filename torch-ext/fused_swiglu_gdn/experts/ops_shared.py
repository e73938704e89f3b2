"""The operator that adds a block's shared expert to the output of its routed experts."""

from typing import Tuple

from torch import Tensor

from ..runtime.ops import no_second_derivative, operator, run, serve
from . import reference

FAMILY = "experts.shared"


@operator("experts_shared_fwd", like=("routed",))
def _shared_fwd(
    routed: Tensor,  # [T, H]
    shared: Tensor,  # [T, H]
    x: Tensor,  # [T, H]
    w_gate: Tensor,  # [H]
) -> Tensor:  # [T, H]
    return serve(FAMILY, "shared_fwd", reference.shared_fwd, (routed, shared, x, w_gate))


@operator("experts_shared_bwd")
def _shared_bwd(
    dout: Tensor,  # [T, H]
    shared: Tensor,  # [T, H]
    x: Tensor,  # [T, H]
    w_gate: Tensor,  # [H]
) -> Tuple[Tensor, Tensor, Tensor]:  # dshared, dx, the gradient of <x, w_gate> [T]
    return serve(FAMILY, "shared_bwd", reference.shared_bwd, (dout, shared, x, w_gate))


@_shared_bwd.register_fake
def _(dout, shared, x, w_gate):
    return shared.new_empty(shared.shape), x.new_empty(x.shape), x.new_empty(x.shape[0])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx, dout):
    shared, x, w_gate = ctx.saved_tensors
    dshared, dx, dgate = _shared_bwd(dout, shared, x, w_gate)
    return dout, dshared, dx, dgate @ x if ctx.needs_input_grad[3] else None


_shared_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_shared_bwd, "a block with a shared expert")


def add_shared(routed, shared, x, w_gate) -> Tensor:
    """routed + sigmoid(<x, w_gate>) shared.

    x, routed and shared [T, H] and w_gate [H] are of one dtype.
    """
    args = (routed, shared, x, w_gate)
    return run(FAMILY, "shared_fwd", _shared_fwd, reference.shared_fwd, args)
