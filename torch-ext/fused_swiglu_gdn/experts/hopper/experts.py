"""Gradients of the routed experts on Hopper: portable/experts.py with strips.py and gate.py."""

from typing import Callable, Optional

import torch

from ...runtime import device, tuning
from ..call import Biases, ExpertsBackward
from ..portable import experts as plain
from ..portable import gradients
from ..portable.routing import Routing
from . import strips
from .gate import BM, gate_gradient


def supports_experts_bwd(
    x, w_gate_up, w_down, ids, weights, biases, options, gradient=None
) -> bool:
    """True if each expert has enough rows for tiles as high as these kernels'.

    The weights may not be transposed, and biases are not supported.
    """
    args = (x, w_gate_up, w_down, ids, weights, biases, options)
    if biases.are_there() or not w_down.is_contiguous():
        return False
    if not device.has_wgmma(x.device) or not plain.supports_experts_bwd(*args):
        return False
    return plain.tiles_for(x.device, *ids.shape, w_down.shape[0])["BLOCK_M"] == BM.value


def takes_strips(a: torch.Tensor, b: torch.Tensor, routing: Routing) -> bool:
    """True if strips.py is faster than portable's tiles for this number of rows an expert."""
    most = tuning.lookup("hopper_experts_weight", a.device)["rows"]  # of an expert
    return routing.T * routing.K <= most * routing.E


def _weight_gradient(
    a, b, routing: Routing, main_grad: Optional[torch.Tensor], config: dict
) -> Optional[torch.Tensor]:
    """Computes weight_gradient of portable/gradients.py by the faster of the two kernels."""
    if main_grad is None and takes_strips(a, b, routing):
        return strips.weight_gradient(a, b, routing)
    return gradients.weight_gradient(a, b, routing, main_grad, config)


def experts_bwd(x, w_gate_up, w_down, ids, weights, biases, options, gradient) -> tuple:
    """Calls experts_bwd of portable/experts.py with the functions of this folder."""
    args = (x, w_gate_up, w_down, ids, weights, biases, options, gradient)
    return plain.experts_bwd(*args, _weight_gradient, gate_gradient)


def prepare_experts_bwd(call: ExpertsBackward) -> Optional[Callable]:
    options = plain.split_options(call)[1]
    if not supports_experts_bwd(*call[:5], Biases(*call[5:7]), options):
        return None
    return plain.prepare_experts_bwd(call, experts_bwd)
