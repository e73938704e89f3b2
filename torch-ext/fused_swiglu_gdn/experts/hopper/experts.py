"""Gradients of the routed experts on Hopper: portable/experts.py with strips.py and gate.py."""

from typing import Callable, Optional

import torch

from ...runtime import device, tuning
from ..call import ExpertsBackward
from ..portable import experts as plain
from ..portable import weight_gradients
from ..portable.routing import Routing
from . import strips
from .gate import BM, gate_gradient


def _gains(call: ExpertsBackward) -> bool:
    """True if each expert has enough rows for tiles as high as these kernels'.

    The weights may not be transposed, and biases are not supported.
    """
    if plain.has_biases(call) or not call.w_down.is_contiguous():
        return False
    if not device.has_wgmma(call.device):
        return False
    return plain.tiles_for(call.device, *call.ids.shape, len(call.w_down))["BLOCK_M"] == BM.value


def _weight_gradient(
    a, b, routing: Routing, main_grad: Optional[torch.Tensor], config: dict
) -> Optional[torch.Tensor]:
    """Computes weight_gradient of portable/weight_gradients.py by the faster of the two kernels,
    which is strips.py's up to a number of rows an expert."""
    most = tuning.lookup("hopper_experts_weight", a.device)["rows"]
    if main_grad is None and routing.T * routing.K <= most * routing.E:
        return strips.weight_gradient(a, b, routing)
    return weight_gradients.weight_gradient(a, b, routing, main_grad, config)


def prepare_experts_bwd(call: ExpertsBackward) -> Optional[Callable]:
    if not _gains(call):
        return None
    return plain.prepare_experts_bwd(call, _weight_gradient, gate_gradient)
