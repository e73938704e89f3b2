"""SwiGLU training on any GPU: the functions of swiglu/portable/gradients.py."""

from ...runtime.dtypes import SERVED
from .gradients import gated_gradients, mlp_gradients, projections, saving_fwd

swiglu_saving_fwd, swiglu_bwd, swiglu_mlp_bwd = saving_fwd, gated_gradients, mlp_gradients
swiglu_projections = projections


def supports_swiglu_saving_fwd(x, w_gate, w_up, b_gate, b_up, activation) -> bool:
    return x.dtype in SERVED


def supports_swiglu_projections(x, w_gate, w_up, b_gate, b_up) -> bool:
    return x.dtype in SERVED


def supports_swiglu_bwd(dz, x, w_gate, w_up, gate_up, activation, needs) -> bool:
    return x.dtype in SERVED


def supports_swiglu_mlp_bwd(
    dy, x, w_gate, w_up, w_down, gate_up, z, activation, needs, main_grads
) -> bool:
    return x.dtype in SERVED
