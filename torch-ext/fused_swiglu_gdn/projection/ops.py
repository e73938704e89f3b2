"""Projections of a few tokens as operations. Forward only."""

import torch
from torch import Tensor

from ..runtime.dtypes import HALF
from ..runtime.operation import Operation
from . import reference
from .call import MAX_TOKENS, NormedOptions, NormedProject, Project, TokenMlp

FAMILY = "projection.project"


def _gains(call):
    """The call, or None if the modules themselves are as fast, or must compute it."""
    x, *weights, _ = call
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or not x.numel():
        return None
    alike = [w for w in weights if w is not None and (w.dtype, w.device) == (x.dtype, x.device)]
    if len(alike) < len([w for w in weights if w is not None]):
        return None
    if any([w.shape[1:] != x.shape[-1:] for w in (alike[:2] if type(call) is TokenMlp else alike)]):
        return None
    if torch.compiler.is_compiling():
        # a single weight of several tokens may be cuBLAS's, which is told by the device
        few = MAX_TOKENS if type(call) is Project and len(alike) > 1 else 1
        tokens, K = x.numel() // x.shape[-1], x.shape[-1]
        return call if tokens <= few and x.dtype in HALF and K % 64 == 0 else None
    return call


def _result(call: Project) -> Tensor:
    x, *weights, (activation, fp32) = call
    rows = [w.shape[0] for w in weights if w is not None]
    shape = (*x.shape[:-1], sum(rows) if activation is None else rows[0])
    return x.new_empty(shape, dtype=torch.float32 if fp32 else x.dtype)


PROJECT = Operation(FAMILY, "project_fwd", Project, reference, check=_gains, fake=_result)
TOKEN_MLP = Operation(
    FAMILY, "token_mlp_fwd", TokenMlp, reference, check=_gains,
    fake=lambda call: call.x.new_empty(*call.x.shape[:-1], call.w_down.shape[0]),
)  # fmt: skip
NORMED_PROJECT = Operation(
    FAMILY, "normed_project_fwd", NormedProject, reference,
    check=lambda call: call._replace(options=NormedOptions(*call.options)),
    fake=lambda call: call.x.new_empty(*call.x.shape[:-1], call.w.shape[0]),
)  # fmt: skip
