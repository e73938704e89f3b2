"""Calls of the experts and of the router, and constants that operators and kernels
share.

Sizes: T tokens, K slots, S = T K entries, E experts, H model width, I hidden width of an expert.
"""

from typing import List, NamedTuple, Optional

import torch
from torch import Tensor

from ..runtime.call import NoOptions, call


class ExpertsOptions(NamedTuple):
    """Options of the routed experts."""

    activation: str = "silu"
    limit: Optional[float] = None  # gate is clamped to at most this, up to plus or minus this
    keeps: bool = False  # what the gradient reads is returned: gate_up and the routing
    recompute: bool = False  # but not gate_up, which the gradient makes again
    main_grad: bool = False  # gradients of weights are added to their main_grad
    interleaved: bool = False  # rows alternate between gate and up


@call
class Experts(NamedTuple):
    x: Tensor  # [T, H]
    w_gate_up: Tensor  # [E, 2 I, H]
    w_down: Tensor  # [E, H, I]
    ids: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    b_gate_up: Optional[Tensor]  # [E, 2 I]
    b_down: Optional[Tensor]  # [E, H]
    options: ExpertsOptions


class BackwardOptions(NamedTuple):
    needs: List[bool]  # of x, w_gate_up, w_down, weights, b_gate_up, b_down
    activation: str  # from here on as ExpertsOptions
    limit: Optional[float]
    interleaved: bool


@call
class ExpertsBackward(NamedTuple):
    x: Tensor  # [T, H]
    w_gate_up: Tensor  # [E, 2 I, H]
    w_down: Tensor  # [E, H, I]
    ids: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    b_gate_up: Optional[Tensor]  # [E, 2 I]
    b_down: Optional[Tensor]  # [E, H]
    dout: Tensor  # [T, H]
    gate_up: Optional[Tensor]  # [S, 2 I] by rows, if the forward kept it
    routing: Tensor  # [routing_size(S, E)]
    options: BackwardOptions

    def in_layout(self, gradients) -> tuple:
        """The gradients, those of the two weights in the weights' layout in memory."""
        found = list(gradients)
        for i, weight in ((1, self.w_gate_up), (2, self.w_down)):
            if found[i] is not None and not weight.is_contiguous():
                like = torch.empty_like(weight)
                found[i] = found[i] if found[i].stride() == like.stride() else like.copy_(found[i])
        return tuple(found)


@call
class Fp8Experts(NamedTuple):
    """Weights in e4m3 with a fp32 scale for each 128 x 128 values."""

    x: Tensor  # [T, H] bf16
    w_gate_up: Tensor  # [E, 2 I, H]: gate above up
    s_gate_up: Tensor  # [E, 2 I / 128, H / 128]
    w_down: Tensor  # [E, H, I]
    s_down: Tensor  # [E, H / 128, I / 128]
    ids: Tensor  # [T, K] int32 or int64; outside [0, E): the expert is held elsewhere
    weights: Tensor  # [T, K]
    options: NoOptions


class TopkOptions(NamedTuple):
    """Options of top-k routing."""

    top_k: int
    scoring: str
    renormalize: bool
    scale: float
    dtype: torch.dtype  # of the weights
    n_group: int = 1  # groups of experts, as many in each
    topk_group: int = 1  # of which experts may be chosen
    group_score: str = "top2"  # or "max"
    eps: float = 0.0  # added to the sum of the chosen scores before it divides
    rounds: bool = False  # scores, their sum and the weights, to the dtype of logits


@call
class Topk(NamedTuple):
    logits: Tensor  # [T, E]
    bias: Optional[Tensor]  # [E]
    options: TopkOptions


@call
class TopkGradient(NamedTuple):
    dweights: Tensor  # [T, K]
    logits: Tensor  # [T, E]
    ids: Tensor  # [T, K]
    options: TopkOptions


@call
class Shared(NamedTuple):
    routed: Tensor  # [T, H]
    shared: Tensor  # [T, H]
    x: Tensor  # [T, H]
    w_gate: Tensor  # [H]
    options: NoOptions


@call
class SharedGradient(NamedTuple):
    dout: Tensor  # [T, H]
    shared: Tensor  # [T, H]
    x: Tensor  # [T, H]
    w_gate: Tensor  # [H]
    options: NoOptions


ALPHA = 1.702  # the activation "swigluoai" is gate * sigmoid(ALPHA gate) * (up + 1)
EPS = {"softmax": 0.0, "sigmoid": 1e-20}  # where the caller gives none


def routing_size(entries: int, experts: int) -> int:
    """Number of int32 elements of the buffer of portable/routing.py, with some spare ones."""
    return 3 * (entries + experts + 1)
