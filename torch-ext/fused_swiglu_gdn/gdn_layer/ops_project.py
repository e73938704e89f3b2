"""The operator of a GDN layer's input projections. Forward only."""

from typing import List

import torch
from torch import Tensor

from ..runtime import dispatch
from ..runtime.dtypes import HALF
from ..runtime.ops import operator, plan, run, serve
from .reference import project as reference

PROJECT = ("gdn_layer.project", "gdn_project_fwd")


@operator("gdn_project_fwd")
def _gdn_project_fwd(
    x: Tensor,  # [M, K]
    weights: List[Tensor],  # [N_i, K] each
) -> Tensor:  # [M, N]
    return serve(*PROJECT, reference.gdn_project_fwd, (x, weights))


@_gdn_project_fwd.register_fake
def _(x, weights):
    return x.new_empty(x.shape[0], sum(w.shape[0] for w in weights))


def is_served(x, weights) -> bool:
    """Whether a kernel makes these products; else the modules themselves had better do it."""
    if not dispatch.has_kernels(*PROJECT, x.device.type, x.device.index):
        return False
    if torch.compiler.is_compiling():
        return x.shape[0] <= 64 and x.dtype in HALF
    return dispatch.choose(*PROJECT, False, (x, weights)) is not None


def gdn_project(x, weights) -> Tensor:
    return run(*PROJECT, _gdn_project_fwd, reference.gdn_project_fwd, (x, weights))


def plan_gdn_project(x, weights):
    """What serves all eager calls of gdn_project like this one, from the tensors, or None."""
    return plan(*PROJECT, (x, weights))
