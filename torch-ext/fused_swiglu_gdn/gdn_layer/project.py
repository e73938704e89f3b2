"""The input projections of a GDN layer. For the layers; not part of the API."""

from typing import List, Optional

import torch
from torch import Tensor

from ..runtime.cache import CallCache, undisturbed
from . import ops_project as ops


def project(x: Tensor, weights: List[Tensor]) -> Optional[List[Tensor]]:
    """x @ w.T for each weight, in one launch, or None where that is no gain or not possible.

    Args:
        x: [B, T, K]. weights: [N_i, K] each, the dtype of x.

    Returns:
        Views [B, T, N_i] of one tensor; None for more than a few tokens, where a gradient is
        needed, under autocast, and where no kernel serves.
    """
    sizes = [w.shape[0] for w in weights]
    plan = _projections.find((x, *weights), (len(weights),)) if undisturbed() else None
    if plan is not None:
        return list(plan(x, *weights).split(sizes, dim=-1))
    kind = x.device.type
    if kind == "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled(kind):
        return None
    rows = x.flatten(0, -2)  # [M, K]
    if any(w.dtype != x.dtype or w.shape[1] != x.shape[-1] for w in weights):
        return None
    if not ops.is_served(rows, weights):
        return None
    if undisturbed() and rows.data_ptr() == x.data_ptr():
        _projections.keep((x, *weights), (len(weights),), ops.plan_gdn_project(rows, weights))
    y = ops.gdn_project(rows, weights)  # [M, sum of N_i]
    return list(y.view(*x.shape[:-1], -1).split(sizes, dim=-1))


_projections = CallCache()
