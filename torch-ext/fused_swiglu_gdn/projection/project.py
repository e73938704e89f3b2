"""Projections of a few tokens by all weights of a layer, for layers; not part of the API."""

from typing import List, Optional

import torch
from torch import Tensor

from ..runtime.dtypes import HALF
from ..runtime.operation import Operation
from . import reference
from .call import MAX_TOKENS, MAX_WEIGHTS, NormedOptions, NormedProject, Project, TokenMlp

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


def project(
    x: Tensor, weights: List[Tensor], apart: bool = True, fp32: bool = False
) -> Optional[List[Tensor]]:
    """x @ w.T for each weight, in one launch; None if that is no gain or not possible.

    Args:
        x: [..., K]. weights: [N_i, K] each, the dtype of x.
        apart: False for the one tensor itself, [..., N].
        fp32: the products are not rounded to the dtype of x.

    Returns:
        Views [..., N_i] of one tensor; None for more than MAX_TOKENS tokens, if a gradient is
        needed, under autocast, and if no kernel supports the call.
    """
    if x.numel() > MAX_TOKENS * x.shape[-1:].numel() or len(weights) > MAX_WEIGHTS:
        return None
    tensors = (x, *weights, *(None,) * (MAX_WEIGHTS - len(weights)))
    run = PROJECT.serving(tensors, (None, fp32))
    if run is None:
        return None
    y = run(*tensors)
    if len(weights) == 1 or not apart:
        return [y]
    return list(y.split_with_sizes([w.shape[0] for w in weights], -1))


def mlp_of_a_token(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str
) -> Optional[Tensor]:
    """(act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T of one token, in two launches; None of more,
    and as from project.

    Args:
        x: [..., K]. w_gate, w_up: [N, K]. w_down: [K, N].
    """
    if x.numel() != x.shape[-1:].numel():
        return None
    tensors = (x, w_gate, w_up, w_down)
    run = TOKEN_MLP.serving(tensors, (activation,))
    return None if run is None else run(*tensors)


def normed_project(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Optional[Tensor]:
    """(x / rms(x) * norm) weight^T of one token, in one launch; None of more, and if no kernel
    supports the call. For calls without gradients and autocast.

    Args:
        x: [..., K]. norm: [K]. weight: [N, K], the dtype of x.
    """
    if x.numel() != x.shape[-1:].numel():
        return None
    tensors = (x, norm, weight)
    run = NORMED_PROJECT.serving(tensors, (eps,))
    return None if run is None else run(*tensors)
