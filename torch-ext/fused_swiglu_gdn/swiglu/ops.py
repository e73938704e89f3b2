"""SwiGLU and its gate as operations; ops_mlp.py has the whole MLP.

SwiGLU saves x and gate_up [M, 2 N] for its gradient; the backward overwrites gate_up with its
gradient, or a copy of it where the graph is retained. The gate alone saves gate and up.
"""

import math
from typing import Optional, Sequence

from torch import Tensor

from ..runtime.activations import BY_TORCH
from ..runtime.call import tensors_in
from ..runtime.dtypes import SERVED
from ..runtime.operation import Operation
from ..runtime.ops import PLAIN, autocast
from . import checks, reference
from .call import SiluMul, SiluMulGradient, Swiglu, SwigluGradient

TRAINING = "swiglu.backward"


def differentiable(call) -> bool:
    """True if kernels may compute the gradients of SwiGLU, or of the MLP.

    They take every size and layout. Tensor subclasses (DTensor) stay with torch.
    """
    plain = all([x is None or type(x) in PLAIN for x in tensors_in(call)])
    return plain and call.x.dtype in SERVED and call.options.activation not in BY_TORCH


def _result(call) -> Tensor:
    return call.x.new_empty(*call.x.shape[:-1], call.w_gate.shape[0])


def saved(call) -> Tensor:
    """gate_up [M, 2 N], empty."""
    return call.x.new_empty(math.prod(call.x.shape[:-1]), 2 * call.w_gate.shape[0])


def gradients_like(call) -> list:
    """Empty dx, dw, db_gate, db_up; an absent gradient is None."""
    (N, K), needs = call.w_gate.shape, call.options.needs
    weights = N * (needs[1] + needs[2])
    shapes = (call.x.shape, (weights, K), (N,), (N,))
    wanted = (needs[0], needs[1] or needs[2], *needs[3:5])
    return [call.x.new_empty(shape) if w else None for shape, w in zip(shapes, wanted)]


def apart(gradients: Sequence[Optional[Tensor]], needs: Sequence[bool]) -> list:
    """Splits gradients into dx, dw_gate, dw_up, db_gate, db_up, None if not needed.

    The gradients of the two weights share a tensor.
    """
    dx, dw, db_gate, db_up = gradients[:4]
    both = needs[1] and needs[2]
    dw_gate, dw_up = dw.chunk(2) if both else (dw, dw)
    found = (dx, dw_gate, dw_up, db_gate, db_up)
    return [gradient if needed else None for gradient, needed in zip(found, needs)]


SAVING = Operation(
    TRAINING, "swiglu_saving_fwd", Swiglu, None, differentiable=differentiable, outputs=2,
    fake=lambda call: (_result(call), saved(call)),
)  # fmt: skip
GRADIENT = Operation(
    TRAINING, "swiglu_bwd", SwigluGradient, None, written=("gate_up",), outputs=4,
    fake=gradients_like,
)  # fmt: skip
SWIGLU = Operation(
    "swiglu.forward", "swiglu_fwd", Swiglu, reference, check=checks.fused_swiglu, cast=autocast,
    fake=_result, train=SAVING,
)  # fmt: skip
SILU_MUL = Operation(
    "swiglu.gate", "silu_mul_fwd", SiluMul, reference, check=checks.silu_mul, like=("gate",)
)
SILU_MUL_GRADIENT = Operation(
    "swiglu.gate", "silu_mul_bwd", SiluMulGradient, reference, like=("gate", "up"), outputs=2
)


def _save(ctx, inputs, output):
    x, w_gate, w_up, _, _, ctx.activation = inputs
    ctx.save_for_backward(x, w_gate, w_up, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # zeros as large as what is kept


def _backward(ctx, dz, _):
    if dz is None:
        return (None,) * 6
    needs = ctx.needs_input_grad[:5]
    gradients = GRADIENT.in_gradient((dz, *ctx.saved_tensors), (ctx.activation, needs))
    return (*apart(gradients, needs), None)


SAVING.register_gradient(_save, _backward, GRADIENT, "fused_swiglu")


def _save_gate(ctx, inputs, output) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gate_backward(ctx, dz):
    return (*SILU_MUL_GRADIENT.in_gradient((*ctx.saved_tensors, dz), (ctx.activation,)), None)


SILU_MUL.register_gradient(_save_gate, _gate_backward, SILU_MUL_GRADIENT, "silu_mul")
