"""Losses over a vocabulary in plain torch, forward and backward.

    z = logits, or scale (hidden weight^T + bias), then softcap tanh(z / softcap)
    log_prob = z[target] - log sum_v exp(z[v])
    entropy = -sum_v p[v] log p[v],  p = softmax(z)
    loss of a row = -(1 - smoothing) log_prob - smoothing mean_v log p[v] + z_loss (log sum exp z)^2

Sizes: M targets, V words of a vocabulary, H the width of hidden states.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.dtypes import at_least_fp32


def cross_entropy_fwd(
    logits: Tensor,  # [M, V]
    target: Tensor,  # [M]
    ignore_index: int,
    mean: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    """The loss []; of each row [3, M] its largest logit m, log(sum exp(logit - m)) and the target's
    logit - m; the number of targets that count []."""
    wide = at_least_fp32(logits)
    reduction = "mean" if mean else "sum"
    loss = F.cross_entropy(wide, target, ignore_index=ignore_index, reduction=reduction)
    largest = wide.amax(1)
    rest = (wide - largest.unsqueeze(1)).exp().sum(1).log()
    own = wide.gather(1, target.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1) - largest
    return loss, torch.stack((largest, rest, own)), (target != ignore_index).sum().to(wide.dtype)


def cross_entropy_bwd(
    logits: Tensor,  # [M, V]
    target: Tensor,  # [M]
    stats: Tensor,  # [3, M]
    count: Tensor,  # []
    dloss: Tensor,  # []
    ignore_index: int,
    mean: bool,
) -> Tensor:  # [M, V]
    """The gradient of the logits; zeros for a target that does not count."""
    largest, rest = stats[:2].unsqueeze(-1)
    counts = (target != ignore_index).unsqueeze(1)
    scale = torch.where(counts, dloss / count if mean else dloss, 0.0)
    share = (at_least_fp32(logits) - largest - rest).exp()
    one = torch.arange(logits.shape[1], device=target.device) == target.unsqueeze(1)
    return torch.where(counts, (share - one.to(share.dtype)) * scale, 0.0).to(logits.dtype)


def _scores(hidden, weight, bias, scale: float, softcap: float) -> Tensor:
    z = at_least_fp32(F.linear(hidden, weight, bias)) * scale
    return softcap * torch.tanh(z / softcap) if softcap else z


def _of_rows(hidden, weight, bias, target, ignore_index, scale, softcap) -> Tuple[Tensor, ...]:
    """log_prob, lse, mean and entropy [M], and whether a row counts [M]."""
    z = _scores(hidden, weight, bias, scale, softcap)
    logs, counts = z.log_softmax(1), target != ignore_index
    own = logs.gather(1, torch.where(counts, target, 0).unsqueeze(1)).squeeze(1)
    p = logs.exp()
    entropy = -torch.where(p > 0, p * logs, 0.0).sum(1)
    return own, z.logsumexp(1), logs.mean(1), entropy, counts


def kept_by_loss(
    hidden, weight, bias, smoothing: float, z_loss: float, rows=0, way="", of_hidden=False,
    of_weight=False, of_bias=False,
) -> list:  # fmt: skip
    """Shape and dtype, or None, of stats, kept, dweight and dbias."""
    (M, H), V, wide = hidden.shape, weight.shape[0], at_least_fp32(hidden).dtype
    found: list = [((5 if smoothing > 0 or z_loss > 0 else 3, M), wide), None, None, None]
    if way == "kept":
        found[1] = (M, -(-V // 64) * 64), hidden.dtype
    elif way:
        half = hidden.dtype == torch.float16
        found[1] = ((M, H), wide if half else hidden.dtype) if of_hidden else None
        found[2] = ((V, H), wide) if of_weight else None
        found[3] = ((V,), wide) if of_bias else None
    return found


def linear_loss_fwd(
    hidden: Tensor,  # [M, H]
    weight: Tensor,  # [V, H]
    bias: Optional[Tensor],  # [V]
    target: Tensor,  # [M]
    ignore_index: int, mean: bool, smoothing: float, z_loss: float, scale: float, softcap: float,
    *more,
) -> tuple:  # fmt: skip
    """The loss [], the number of targets that count [], and what kernels keep for the gradient:
    zeros, for the gradient below is made of the arguments."""
    own, lse, mean_of_logs, _, counts = _of_rows(
        hidden, weight, bias, target, ignore_index, scale, softcap
    )
    loss = -own if not smoothing else -(1 - smoothing) * own - smoothing * mean_of_logs
    loss = loss + z_loss * lse * lse if z_loss else loss
    count, loss = counts.sum().to(own.dtype), torch.where(counts, loss, 0.0).sum()
    options = (smoothing, z_loss, *more)  # rows of a piece first
    kept = [
        x if x is None else own.new_zeros(()).to(x[1]).expand(x[0])
        for x in kept_by_loss(hidden, weight, bias, *options)
    ]
    return loss / count if mean else loss, count, *kept


def linear_loss_bwd(
    hidden, weight, bias, target, stats, count, kept, dweight, dbias, dloss: Tensor, *options
) -> tuple:
    """Gradients of hidden, weight and bias."""
    *values, _, _, of_hidden, of_weight, of_bias = options

    def loss(*given):
        return (linear_loss_fwd(*given, target, *values)[0],)

    return _gradients(loss, (hidden, weight, bias), (dloss,), (of_hidden, of_weight, of_bias))


def token_log_probs_fwd(
    hidden: Tensor,  # [M, H]
    weight: Tensor,  # [V, H]
    bias: Optional[Tensor],  # [V]
    target: Tensor,  # [M]
    ignore_index: int, scale: float, softcap: float, more: bool, *_,
) -> tuple:  # fmt: skip
    """log_prob, lse, and with more mean and entropy [M]: zeros where a target does not count."""
    *found, counts = _of_rows(hidden, weight, bias, target, ignore_index, scale, softcap)
    found = [torch.where(counts, x, 0.0) for x in found]
    own = found[0]
    found[2:] = found[2:] if more else (None, None)
    zeros = own.new_zeros(()).expand(5 if more else 3, len(target))
    return (*found, zeros)


def token_log_probs_bwd(
    hidden, weight, bias, target, stats, dlog_prob, dlse, dmean, dentropy, *options
) -> tuple:
    """Gradients of hidden, weight and bias."""
    *values, _, of_hidden, of_weight, of_bias = options
    given = (dlog_prob, dlse, dmean, dentropy)

    def outputs(*leaves):
        found = token_log_probs_fwd(*leaves, target, *values)[:4]
        return [x for x, d in zip(found, given) if d is not None]

    there = [d for d in given if d is not None]
    return _gradients(outputs, (hidden, weight, bias), there, (of_hidden, of_weight, of_bias))


def _gradients(function, tensors, given, needs) -> tuple:
    """Gradients of those of the tensors that are needed, None of the others."""
    with torch.enable_grad():
        leaves = [x if x is None else x.detach().requires_grad_(n) for x, n in zip(tensors, needs)]
        wanted = [x for x, needed in zip(leaves, needs) if needed]
        if not wanted:
            return None, None, None
        found = iter(torch.autograd.grad(function(*leaves), wanted, given))
    return tuple([next(found) if needed else None for needed in needs])
