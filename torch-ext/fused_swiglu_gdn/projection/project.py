"""Products of a few tokens with the weights of a layer. For the layers; not part of the API."""

from typing import List, Optional

import torch
from torch import Tensor

from ..runtime.cache import CallCache, undisturbed
from . import ops


def project(
    x: Tensor, weights: List[Tensor], activation: Optional[str] = None
) -> Optional[List[Tensor]]:
    """x @ w.T for each weight, in one launch, or None where that is no gain or not possible.

    Args:
        x: [..., K]. weights: [N_i, K] each, the dtype of x.
        activation: of two weights, a gate's and an up projection's: the result is one tensor,
            act(x @ w_gate.T) * (x @ w_up.T). Of one token alone.

    Returns:
        Views [..., N_i] of one tensor; None for more than a few tokens, where a gradient is
        needed, under autocast, and where no kernel serves.
    """
    sizes = [w.shape[0] for w in weights[: 1 if activation else None]]
    options = (len(weights), activation)
    plan = _projections.find((x, *weights), options) if undisturbed() else None
    if plan is not None:
        return list(plan(x, *weights).split(sizes, dim=-1))
    kind = x.device.type
    if kind == "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled(kind) or not x.numel():
        return None
    if any((w.dtype, w.device, w.shape[1:]) != (x.dtype, x.device, x.shape[-1:]) for w in weights):
        return None
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    if not ops.is_served(rows, weights, activation):
        return None
    if undisturbed() and rows.data_ptr() == x.data_ptr():
        plan = ops.plan_project(rows, weights, activation)
        _projections.keep((x, *weights), options, plan)
    y = ops.project(rows, weights, activation)  # [M, sum of N_i]
    return list(y.view(*x.shape[:-1], -1).split(sizes, dim=-1))


_projections = CallCache()
