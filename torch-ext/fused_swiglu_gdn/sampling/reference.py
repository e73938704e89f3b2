"""The choice of a token in plain torch, by transformers' rules.

score = logit, times or over the penalty where seen, -inf for ends while length < least,
        over the temperature
kept: scores not below the k-th largest; of these the fewest whose probabilities are more than
      top_p together, of equal ones those of the higher places; of these those of min_p of the
      largest probability and above
token = argmax over kept of exp(score - max) / q
"""

from typing import Optional, Tuple

import torch


def scores_of(
    logits: torch.Tensor, seen: Optional[torch.Tensor], ends: Optional[torch.Tensor],
    length: torch.Tensor, temperature: float, penalty: float, least: int,
) -> torch.Tensor:  # fmt: skip
    """The scores of all words, [B, V] fp32."""
    x = logits.float()
    if seen is not None:
        x = torch.where(seen[:, :-1], torch.where(x < 0, x * penalty, x / penalty), x)
    if ends is not None:
        place = torch.arange(x.shape[1], device=x.device)
        ending = (place == ends.reshape(-1, 1)).any(0)
        x = x.masked_fill(ending & (length < least), float("-inf"))
    return x / temperature


def choose_fwd(
    logits: torch.Tensor, q: Optional[torch.Tensor], seen: Optional[torch.Tensor],
    ends: Optional[torch.Tensor], length: torch.Tensor, top_k: int, top_p: float, min_p: float,
    temperature: float, penalty: float, least: int,
) -> Tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tokens [B] int64, and whether the scores of a sequence are a distribution [B]."""
    x = scores_of(logits, seen, ends, length, temperature, penalty, least)
    best = x.amax(1)
    valid = best.isfinite()
    if top_k == 0:
        return x.argmax(1), valid
    x, place = (each.flip(1) for each in x.sort(dim=1, stable=True))
    k = min(top_k, x.shape[1])
    kept = (x >= x[:, k - 1 : k]) & (x > float("-inf"))
    p = torch.where(kept, (x - x[:, :1]).exp(), 0.0)
    first = torch.arange(x.shape[1], device=x.device) == 0
    if top_p < 1.0:
        share = p / p.sum(1, keepdim=True)
        smaller = share.sum(1, keepdim=True) - (share.cumsum(1) - share)  # and itself
        kept = kept & ((smaller > 1 - top_p) | first)
    if min_p > 0.0:
        kept = kept & ((p >= min_p * p[:, :1]) | first)
    race = torch.where(kept, p / q.gather(1, place), -1.0)
    return torch.empty_like(race).scatter_(1, place, race).argmax(1), valid
