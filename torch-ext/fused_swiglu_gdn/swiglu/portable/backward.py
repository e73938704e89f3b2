"""SwiGLU training on any GPU: the functions of swiglu/portable/gradients.py as operations.

An implementation passes `forward`, which makes z and gate_up, `recomputed`, which prepares
SwiGLU alone, and `steps`, functions of gradients.py in its own way.
"""

from typing import Callable, Optional

import torch.nn.functional as F

from ...runtime.dtypes import SERVED
from ...runtime.ops import in_rows
from ..call import MlpGradient, Swiglu, SwigluGradient, SwigluMlp
from .forward import prepare_swiglu_fwd as swiglu_alone
from .gradients import gated_gradients, mlp_gradients, projections, saving_fwd


def prepare_swiglu_saving_fwd(call: Swiglu, forward: Callable = saving_fwd) -> Optional[Callable]:
    """(x, w_gate, w_up, b_gate, b_up) -> (z, gate_up)."""
    shape, (activation,) = call.x.shape[:-1], call.options
    if call.x.dtype not in SERVED:
        return None

    def run(x, *weights):
        z, gate_up = forward(in_rows(x), *weights, activation)
        return z.view(*shape, z.shape[1]), gate_up

    return run


def prepare_swiglu_bwd(call: SwigluGradient, **steps: Callable) -> Optional[Callable]:
    """(dz, x, w_gate, w_up, gate_up) -> (dx, dw, db_gate, db_up)."""
    shape, (activation, needs) = call.x.shape, call.options
    if call.x.dtype not in SERVED:
        return None

    def run(dz, x, w_gate, w_up, gate_up):
        args = (in_rows(dz), in_rows(x), w_gate, w_up, gate_up, activation, needs)
        dx, *others = gated_gradients(*args, **steps)
        return dx if dx is None else dx.view(shape), *others

    return run


def prepare_swiglu_mlp_fwd(
    call: SwigluMlp, forward: Callable = saving_fwd, recomputed: Callable = swiglu_alone
) -> Optional[Callable]:
    """(x, w_gate, w_up, w_down, b_gate, b_up, b_down) -> (y, gate_up or None)."""
    x, w_gate, w_up, _, b_gate, b_up, _, (activation, recompute, _) = call
    swiglu = Swiglu.of((x, w_gate, w_up, b_gate, b_up, activation))
    if recompute:
        alone = recomputed(swiglu)
        if alone is None:
            return None
        return lambda x, w_gate, w_up, w_down, b_gate, b_up, b_down: (
            F.linear(alone(x, w_gate, w_up, b_gate, b_up), w_down, b_down), None
        )  # fmt: skip
    saving = prepare_swiglu_saving_fwd(swiglu, forward)
    if saving is None:
        return None

    def run(x, w_gate, w_up, w_down, b_gate, b_up, b_down):
        z, gate_up = saving(x, w_gate, w_up, b_gate, b_up)
        return F.linear(z, w_down, b_down), gate_up

    return run


def prepare_swiglu_mlp_bwd(call: MlpGradient, **steps: Callable) -> Optional[Callable]:
    """(dy, x, w_gate, w_up, w_down, b_gate, b_up, gate_up) -> (dx, dw, db_gate, db_up, dw_down).

    main_grads: fp32 tensors to which gradients of the three weights are added, or None.
    """
    shape, (activation, needs) = call.x.shape, call.options
    if call.x.dtype not in SERVED:
        return None

    def run(dy, x, w_gate, w_up, w_down, b_gate, b_up, gate_up, main_grads=(None,) * 3):
        x = in_rows(x)
        if gate_up is None:
            gate_up = projections(x, w_gate, w_up, b_gate, b_up)
        args = (in_rows(dy), x, w_gate, w_up, w_down, gate_up, activation, needs, main_grads)
        dx, *others = mlp_gradients(*args, **steps)
        return dx if dx is None else dx.view(shape), *others

    return run
