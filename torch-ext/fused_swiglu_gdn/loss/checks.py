"""Checks of losses of hidden states, and the choice of their way."""

import torch

from ..runtime import checks
from ..runtime.ops import needs_grad
from .call import LinearLoss, LossOptions, TokenLogProbs, TokenOptions

# With a frozen weight, by benchmarks/results/loss.json: fewer rows make smaller products, more
# hold more
FROZEN = 2048


def rows_of_piece(H: int, trained: bool) -> int:
    """Rows whose logits are made at once, where they do not live until the backward.

    With a trained weight a quarter of the bytes of its gradient in fp32, which is read and written
    once a piece.
    """
    return max(1024, -(-H // 2 // 256) * 256) if trained else FROZEN


def way_of(M: int, H: int, trained: bool) -> str:
    """The way that holds less, "kept" where both hold the same.

    "rows" holds the weight's gradient in fp32 and a piece of logits; "kept" all logits.
    """
    if not trained:
        return "kept" if M <= FROZEN else "rows"
    return "kept" if M <= 2 * H + rows_of_piece(H, True) else "rows"


def words_hold_least(M: int, H: int, V: int, trained: bool, size: int) -> bool:
    """True if a loss by the log-probability of each token holds less than "kept" and "rows" do.

    It has no copy of the weight's gradient in fp32, but makes the logits a second time in the
    backward. size: bytes of an element of the logits.
    """
    piece = min(M, rows_of_piece(H, trained)) * V * size
    rows = piece + M * H * size + (4 * V * H if trained else 0)
    return piece + 4 * M * H < min(M * V * size, rows)


def _tensors(hidden, weight, bias, target, ignore_index: int) -> None:
    checks.has_last("hidden", hidden, "H")
    checks.is_floating("hidden", hidden)
    sizes = {"H": hidden.shape[-1]}
    checks.has_form("weight", weight, "V H", sizes, "hidden", hidden)
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight must have the dtype of hidden, {hidden.dtype}, got {weight.dtype}")
    if bias is not None:
        checks.has_form("bias", bias, "V", sizes, "hidden", hidden, (hidden.dtype,))
    if target.dtype is not torch.int64 or target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must be int64 of shape {list(hidden.shape[:-1])}, as hidden has it, got "
            f"{target.dtype} of shape {list(target.shape)}"
        )
    checks.same_device("target", target, "hidden", hidden)
    V = weight.shape[0]
    if checks.readable(target):
        wrong = (target != ignore_index) & ((target < 0) | (target >= V))
        if wrong.any():
            found = target[wrong][0].item()
            raise ValueError(f"target must be {ignore_index} or 0 to {V - 1}, got {found}")


def _needs(call) -> tuple:
    """True for each of hidden, weight and bias whose gradient is needed."""
    return tuple([needs_grad((x,)) for x in call[:3]])


def is_share(smoothing) -> None:
    checks.is_number("label_smoothing", smoothing, "non-negative")
    if smoothing > 1:
        raise ValueError(f"label_smoothing must be 0 to 1, got {smoothing}")


def linear_loss(call: LinearLoss) -> LinearLoss:
    hidden, weight, bias, target, (ignore_index, mean, smoothing, z_loss, scale, softcap) = call
    _values(ignore_index, scale, softcap)
    is_share(smoothing)
    checks.is_number("z_loss", z_loss, "non-negative")
    _tensors(hidden, weight, bias, target, ignore_index)
    needs, (M, H) = _needs(call), hidden.shape
    rows = rows_of_piece(H, needs[1])
    values = (ignore_index, mean, float(smoothing), float(z_loss), float(scale), float(softcap))
    way = way_of(M, H, needs[1]) if any(needs) else ""
    if way and torch.compiler.is_compiling():  # a traced gradient may not overwrite what it has
        way = "rows"
    return LinearLoss(hidden, weight, bias, target, LossOptions(*values, rows, way, *needs))


def _values(ignore_index, scale, softcap) -> None:
    checks.is_int("ignore_index", ignore_index, -(2**31), 2**31 - 1)
    checks.is_number("scale", scale)
    checks.is_number("softcap", softcap, "non-negative")


def token_log_probs(call: TokenLogProbs) -> TokenLogProbs:
    hidden, weight, bias, target, (ignore_index, scale, softcap, more) = call
    _values(ignore_index, scale, softcap)
    _tensors(hidden, weight, bias, target, ignore_index)
    rows = rows_of_piece(hidden.shape[-1], True)
    options = TokenOptions(ignore_index, float(scale), float(softcap), more, rows, *_needs(call))
    return TokenLogProbs(hidden, weight, bias, target, options)
