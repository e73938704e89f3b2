"""Projections of a few tokens by all weights of a layer, for layers; not part of the API."""

from typing import List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.cache import CallCache, fast_path_ok
from . import ops


def project(x: Tensor, weights: List[Tensor]) -> Optional[List[Tensor]]:
    """x @ w.T for each weight, in one launch; None if that is no gain or not possible.

    Args:
        x: [..., K]. weights: [N_i, K] each, the dtype of x.

    Returns:
        Views [..., N_i] of one tensor; None for more than a few tokens, if a gradient is needed,
        under autocast, and if no kernel supports the call.
    """
    plan = _plans.find((x, *weights), (len(weights),)) if fast_path_ok() else None
    if plan is not None:
        y = plan(x, *weights)
    else:
        y = _product(x, weights, None)
        if y is None:
            return None
        if _lies_in_rows(x):
            plan = ops.plan_project(_rows(x), weights, None)
            _plans.keep((x, *weights), (len(weights),), plan)
    if len(weights) == 1:
        return [y]
    return list(y.split_with_sizes([w.shape[0] for w in weights], -1))


def mlp_of_a_token(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str
) -> Optional[Tensor]:
    """(act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T of one token, in two launches; None as from
    project.

    Args:
        x: [..., K], K numbers in all. w_gate, w_up: [N, K]. w_down: [K, N].
    """
    tensors = (x, w_gate, w_up, w_down)
    plans = _plans.find(tensors, (activation,)) if fast_path_ok() else None
    if plans is not None:
        gated, down = plans
        return down(gated(x, w_gate, w_up), w_down)
    z = _product(x, [w_gate, w_up], activation)
    y = None if z is None else _product(z, [w_down], None)
    if y is None:
        return None if z is None else F.linear(z, w_down)
    if _lies_in_rows(x):
        gated = ops.plan_project(_rows(x), [w_gate, w_up], activation)
        down = ops.plan_project(_rows(z), [w_down], None)
        if gated is not None and down is not None:
            _plans.keep(tensors, (activation,), (gated, down))
    return y


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])  # [M, K]


def _product(x: Tensor, weights: List[Tensor], activation: Optional[str]) -> Optional[Tensor]:
    """The product [..., N] by a kernel, or None."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or not x.numel():
        return None
    if any((w.dtype, w.device, w.shape[1:]) != (x.dtype, x.device, x.shape[-1:]) for w in weights):
        return None
    rows = _rows(x)
    if not ops.is_served(rows, weights, activation):
        return None
    return ops.project(rows, weights, activation).view(*x.shape[:-1], -1)


def _lies_in_rows(x: Tensor) -> bool:
    """True if x is a view of its rows [M, K] and a plan for it may be kept."""
    return fast_path_ok() and _rows(x).data_ptr() == x.data_ptr()


_plans = CallCache()
