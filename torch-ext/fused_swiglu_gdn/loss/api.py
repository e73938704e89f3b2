"""Losses and log-probabilities of tokens from hidden states, without their logits."""

from typing import Optional, Tuple, Union

from torch import Tensor

from ..runtime.checks import are_flags, is_number, is_one_of, is_tensor
from ..runtime.main_grad import autocast_weights
from ..runtime.ops import autocast
from .checks import is_share
from .ops import LINEAR_LOSS, TOKENS


def _in_rows(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor) -> tuple:
    """The tensors in autocast's dtype, tokens in rows."""
    for name, x in (("hidden", hidden), ("weight", weight), ("target", target)):
        is_tensor(name, x)
    weight, bias = autocast_weights(weight, bias)
    (hidden,) = autocast(hidden)
    if hidden.ndim > 0 and target.shape == hidden.shape[:-1]:
        hidden, target = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)
    return hidden, weight, bias, target


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, temperature: float = 1.0, softcap: Optional[float] = None,
) -> Tensor:  # fmt: skip
    """The cross entropy of hidden @ weight.T + bias and target, without logits in between.

        z = (hidden @ weight.T + bias) / temperature, then softcap * tanh(z / softcap)
        lse = log(sum(exp(z)));  log p = z - lse
        loss = -(1 - label_smoothing) log p[target] - label_smoothing mean(log p) + z_loss lse^2

    Logits are in the dtype of hidden, all else is computed in fp32. Forward and backward together
    hold either the logits once (until about twice as many tokens as H), or pieces of them and an
    fp32 gradient of the weight. Autocast casts hidden, weight and bias. Label smoothing is that of
    arXiv:1512.00567, z_loss of arXiv:2204.02311, softcap of Gemma 2 (arXiv:2408.00118).

    Args:
        hidden: [..., H]; fp32, bf16 or fp16.
        weight: [V, H] of the same dtype, as nn.Linear has it.
        target: [...] int64: words from 0 to V - 1, or ignore_index. Another value is an error of
            the device, as in torch's cross entropy.
        bias: [V] or None.
        ignore_index: targets of this value have no loss and a gradient of zeros.
        reduction: "mean" over the targets that count (NaN where none does, with gradients of
            zeros), "sum" or "none".
        label_smoothing: 0 to 1.
        z_loss: factor of the square of lse, at least 0.
        temperature: divides the logits, above 0.
        softcap: bounds the logits, above 0; None for no bound.

    Returns:
        The loss in fp32: [], or with "none" [...].

    Raises:
        ValueError, TypeError: an argument does not fit.
        NotImplementedError: a second derivative is asked for.

    Example:
        >>> hidden, weight = torch.randn(2, 5, 16), torch.randn(99, 16, requires_grad=True)
        >>> loss = linear_cross_entropy(hidden, weight, torch.randint(99, (2, 5)))
        >>> loss.backward()
        >>> loss.shape, weight.grad.shape
        (torch.Size([]), torch.Size([99, 16]))
    """
    is_one_of("reduction", reduction, ("mean", "sum", "none"))
    scale, cap = _scale(temperature), _cap(softcap)
    rows = _in_rows(hidden, weight, bias, target)
    if reduction != "none":
        options = (ignore_index, reduction == "mean", label_smoothing, z_loss, scale, cap)
        return LINEAR_LOSS(rows, options)[0]
    is_share(label_smoothing)
    is_number("z_loss", z_loss, "non-negative")
    more = label_smoothing > 0
    log_prob, lse, mean, *_ = TOKENS(rows, (ignore_index, scale, cap, more))
    loss = z_loss * lse * lse - (1 - label_smoothing) * log_prob
    return (loss - label_smoothing * mean if more else loss).view(target.shape)


def token_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, ignore_index: int = -100, temperature: float = 1.0, softcap: Optional[float] = None,
    entropy: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:  # fmt: skip
    """The log-probability of each target and the entropy of its distribution, without logits.

        z = (hidden @ weight.T + bias) / temperature, then softcap * tanh(z / softcap)
        log p = z - log(sum(exp(z)));  log_prob = log p[target];  entropy = -sum(p log p)

    For GRPO (arXiv:2402.03300), PPO, DPO and distillation. Logits are computed in pieces, and once
    more in the backward pass, so that no more than a piece is held at a time.
    Logits are in the dtype of hidden, all else is computed in fp32. Autocast casts hidden, weight
    and bias.

    Args:
        hidden: [..., H]; fp32, bf16 or fp16. Its token t predicts target[t]: shift targets before.
        weight: [V, H] of the same dtype, as nn.Linear has it. Rows that pad the vocabulary count
            as in the model.
        target: [...] int64: words from 0 to V - 1, or ignore_index. Another value is an error of
            the device, as in torch's cross entropy.
        bias: [V] or None.
        ignore_index: targets of this value have results of 0 and gradients of zeros.
        temperature: divides the logits, above 0.
        softcap: bounds the logits, above 0; None for no bound.
        entropy: the entropy is returned as well.

    Returns:
        log_prob [...] in fp32, or (log_prob, entropy).

    Raises:
        ValueError, TypeError: an argument does not fit.
        NotImplementedError: a second derivative is asked for.

    Example:
        >>> hidden, weight = torch.randn(2, 5, 16), torch.randn(99, 16, requires_grad=True)
        >>> log_prob, h = token_log_probs(hidden, weight, torch.randint(99, (2, 5)), entropy=True)
        >>> (log_prob * torch.randn(2, 5) - 0.01 * h).mean().backward()
        >>> log_prob.shape, h.shape
        (torch.Size([2, 5]), torch.Size([2, 5]))
    """
    rows = _in_rows(hidden, weight, bias, target)
    are_flags(entropy=entropy)
    more = bool(entropy)
    log_prob, _, _, found, _ = TOKENS(
        rows, (ignore_index, _scale(temperature), _cap(softcap), more)
    )
    log_prob = log_prob.view(target.shape)
    return (log_prob, found.view(target.shape)) if more else log_prob


def _scale(temperature: float) -> float:
    is_number("temperature", temperature, "positive")
    return 1.0 / temperature


def _cap(softcap: Optional[float]) -> float:
    if softcap is None:
        return 0.0
    is_number("softcap", softcap, "positive", " or None")
    return float(softcap)
