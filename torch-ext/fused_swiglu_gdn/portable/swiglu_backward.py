"""Training SwiGLU with torch's products and one launch for the gate or its gradients.

Sizes: M tokens, K model width, N hidden width, D output width of w_down. docs/swiglu.md derives it.
"""

import torch

from ..common.swiglu_gate import gate_bwd, gate_fwd
from ..common.swiglu_gradients import input_gradient, projection_gradients

SERVED = (torch.float16, torch.bfloat16, torch.float32)


def supports_swiglu_saving_fwd(x, w_gate, w_up, b_gate, b_up, activation) -> bool:
    return x.dtype in SERVED


def swiglu_saving_fwd(x, w_gate, w_up, b_gate, b_up, activation):
    """(z [M, N], gate_up [M, 2 N]): what swiglu_bwd and swiglu_mlp_bwd want of the forward."""
    (M, _), N = x.shape, w_gate.shape[0]
    gate_up = torch.empty((M, 2 * N), dtype=x.dtype, device=x.device)  # [M, 2 N]
    halves = gate_up.split(N, dim=1)
    for out, weight, bias in zip(halves, (w_gate, w_up), (b_gate, b_up)):
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)
    return gate_fwd(*halves, activation), gate_up


def supports_swiglu_bwd(dz, x, w_gate, w_up, gate_up, activation, needs) -> bool:
    return dz.dtype in SERVED


def swiglu_bwd(dz, x, w_gate, w_up, gate_up, activation, needs):
    """(dx, dw, db_gate, db_up), None where not needed; overwrites gate_up.

    needs: x, w_gate, w_up, b_gate, b_up; dw: dw_gate above dw_up [2 N, K], or one of them [N, K].
    """
    gate_bwd(dz, gate_up, activation, with_z=False)
    return projection_gradients(gate_up, x, w_gate, w_up, needs, input_gradient)


def supports_swiglu_mlp_bwd(dy, x, w_gate, w_up, w_down, gate_up, activation, needs) -> bool:
    return dy.dtype in SERVED


def swiglu_mlp_bwd(dy, x, w_gate, w_up, w_down, gate_up, activation, needs):
    """(dx, dw, db_gate, db_up, dw_down), None where not needed; overwrites gate_up.

    dy: [M, D]; w_down: [D, N]; needs, dw: as swiglu_bwd, and w_down. z, which dw_down needs, is
    made again from gate_up.
    """
    dz = torch.mm(dy, w_down)  # [M, N]
    z = gate_bwd(dz, gate_up, activation, with_z=needs[5])  # [M, N]
    dw_down = torch.mm(dy.t(), z) if needs[5] else None  # [D, N]
    return (*projection_gradients(gate_up, x, w_gate, w_up, needs, input_gradient), dw_down)
