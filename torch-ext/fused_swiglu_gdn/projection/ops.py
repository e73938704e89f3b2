"""The operator of projections of a few tokens. Forward only."""

from typing import List, Optional

import torch
from torch import Tensor

from ..runtime import dispatch
from ..runtime.dtypes import HALF
from ..runtime.ops import operator, plan, run, serve
from . import reference
from .call import MAX_TOKENS

PROJECT = ("projection.project", "project_fwd")


@operator("project_fwd")
def _project_fwd(
    x: Tensor,  # [M, K]
    weights: List[Tensor],  # [N_i, K] each
    activation: Optional[str],
) -> Tensor:  # [M, N]
    return serve(*PROJECT, reference.project_fwd, (x, weights, activation))


@_project_fwd.register_fake
def _(x, weights, activation):
    rows = [w.shape[0] for w in weights]
    return x.new_empty(x.shape[0], sum(rows) if activation is None else rows[0])


def is_served(x, weights, activation) -> bool:
    """True if a kernel computes these products; else the modules themselves are as fast."""
    if not dispatch.has_kernels(*PROJECT, x.device.type, x.device.index):
        return False
    if torch.compiler.is_compiling():
        # a single weight of several tokens may be cuBLAS's, which is told by the device
        few = x.shape[0] <= (MAX_TOKENS if activation is None and len(weights) > 1 else 1)
        return few and x.dtype in HALF and x.shape[1] % 64 == 0
    return dispatch.choose(*PROJECT, False, (x, weights, activation)) is not None


def project(x, weights, activation) -> Tensor:
    return run(*PROJECT, _project_fwd, reference.project_fwd, (x, weights, activation))


def plan_project(x, weights, activation):
    """Returns a function of the tensors for all eager calls that match this one, or None."""
    return plan(*PROJECT, (x, weights, activation))
