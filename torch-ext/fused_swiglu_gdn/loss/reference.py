"""Cross entropy of logits and targets in plain torch, forward and backward.

    loss = sum or mean over rows of log(sum_v exp(logits[v])) - logits[target]

Sizes: M targets, V words of a vocabulary.
"""

from typing import Tuple

import torch
import torch.nn.functional as F

from ..runtime.dtypes import at_least_fp32


def cross_entropy_fwd(
    logits: torch.Tensor,  # [M, V]
    target: torch.Tensor,  # [M]
    ignore_index: int,
    mean: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss []; the largest logit and log(sum exp(logit - largest)) of each row [2, M]; the
    number of targets that count []."""
    wide = at_least_fp32(logits)
    reduction = "mean" if mean else "sum"
    loss = F.cross_entropy(wide, target, ignore_index=ignore_index, reduction=reduction)
    largest = wide.amax(1)
    parts = torch.stack((largest, (wide - largest.unsqueeze(1)).exp().sum(1).log()))
    return loss, parts, (target != ignore_index).sum().to(wide.dtype)


def cross_entropy_bwd(
    logits: torch.Tensor,  # [M, V]
    target: torch.Tensor,  # [M]
    parts: torch.Tensor,  # [2, M]
    count: torch.Tensor,  # []
    dloss: torch.Tensor,  # []
    ignore_index: int,
    mean: bool,
) -> torch.Tensor:  # [M, V]
    """The gradient of the logits; zeros for a target that does not count."""
    largest, rest = parts.unsqueeze(-1)
    counts = (target != ignore_index).unsqueeze(1)
    scale = torch.where(counts, dloss / count if mean else dloss, 0.0)
    share = (at_least_fp32(logits) - largest - rest).exp()
    one = torch.arange(logits.shape[1], device=target.device) == target.unsqueeze(1)
    return torch.where(counts, (share - one.to(share.dtype)) * scale, 0.0).to(logits.dtype)
