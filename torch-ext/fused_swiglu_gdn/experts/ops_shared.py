"""Adding a block's shared expert to the output of its routed experts, as an operation."""

from torch import Tensor

from ..runtime.operation import Operation
from . import reference
from .call import Shared, SharedGradient

FAMILY = "experts.shared"


def _gradients(call: SharedGradient) -> tuple:
    shared, x = call.shared, call.x
    return shared.new_empty(shared.shape), x.new_empty(x.shape), x.new_empty(x.shape[0])


SHARED = Operation(
    FAMILY, "shared_fwd", Shared, reference, like=("routed",), schema="experts_shared_fwd"
)
GRADIENT = Operation(
    FAMILY, "shared_bwd", SharedGradient, reference, outputs=3, fake=_gradients,
    schema="experts_shared_bwd",
)  # fmt: skip


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx, dout):
    shared, x, w_gate = ctx.saved_tensors
    dshared, dx, dgate = GRADIENT.in_gradient((dout, shared, x, w_gate))
    return dout, dshared, dx, dgate @ x if ctx.needs_input_grad[3] else None


SHARED.register_gradient(_save, _backward, GRADIENT, "a block with a shared expert")


def add_shared(routed: Tensor, shared: Tensor, x: Tensor, w_gate: Tensor) -> Tensor:
    """routed + sigmoid(<x, w_gate>) shared.

    x, routed and shared [T, H] and w_gate [H] are of one dtype.
    """
    return SHARED((routed, shared, x, w_gate))
