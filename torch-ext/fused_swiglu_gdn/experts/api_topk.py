"""Top-k routing of a mixture of experts, as one function."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .ops_topk import TOPK


def fused_topk(
    logits: Tensor, top_k: int,
    *, scoring: str = "softmax", renormalize: bool = True, bias: Optional[Tensor] = None,
    scale: float = 1.0, dtype: Optional[torch.dtype] = None, n_group: int = 1, topk_group: int = 1,
    group_score: str = "top2", eps: Optional[float] = None, rounds: bool = False,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """The experts of each token, and their weights, from a router's logits.

        s = softmax(logits) or sigmoid(logits), in fp32
        e = the top_k experts with the largest s + bias, the largest first
        w = scale s[e], divided by the sum over the chosen s[e], and eps, if renormalize

    Among equal values the expert with the lower index comes first, and NaN counts as largest.
    Without a bias the logits are compared, so that experts whose scores round to the same number
    keep their order; if all scores differ, the experts are those of torch.topk. The gradient goes
    to the logits through the weights; the bias has none. Results are deterministic.

    With n_group > 1 the experts are in groups of E / n_group neighbours, and a token chooses only
    among those of the topk_group groups whose scores are largest, the lower group among equal ones.
    The score of a group is the sum of its two largest s + bias (DeepSeek-V3, arXiv:2412.19437), or
    its largest s + bias (DeepSeek-V2, arXiv:2405.04434).

    Kernels support fp32, bf16 and fp16 with up to 1024 experts and 64 chosen, in one launch.

    Args:
        logits: [T, E]; fp32, bf16 or fp16.
        top_k: K, the number of experts of a token.
        scoring: "softmax" or "sigmoid".
        renormalize: the weights of a token sum up to scale.
        bias: [E], added to the scores for the choice alone, as DeepSeek-V3's correction is.
        scale: a factor on the weights.
        dtype: of the weights; by default that of logits.
        n_group: the number of groups of experts; it divides E.
        topk_group: the number of groups from which a token's experts come.
        group_score: "top2", the sum of the two largest of a group, or "max", the largest.
        eps: added to the sum that divides; by default 1e-20 with "sigmoid" and 0 with "softmax".
        rounds: s, the sum, the quotient and w are each rounded to the dtype of logits, as in torch
            without a cast to fp32 (LFM2-MoE). Gradients are those of the formula all the same.

    Returns:
        (weights [T, K], index [T, K] int64): arguments of fused_experts.

    Raises:
        ValueError: a shape, device, top_k, scoring, scale or eps does not fit.
        TypeError: an argument is no tensor, or a dtype does not fit.

    Example:
        >>> weights, index = fused_topk(torch.randn(5, 8), 2)
        >>> index.shape, weights.sum(-1).allclose(torch.ones(5))
        (torch.Size([5, 2]), True)
    """
    groups = (n_group, topk_group, group_score)
    options = (top_k, scoring, renormalize, scale, dtype, *groups, eps, rounds)
    return TOPK((logits, bias), options)
