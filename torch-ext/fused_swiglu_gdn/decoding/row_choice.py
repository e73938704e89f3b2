"""The choice of the tokens of a round, and how many of its drafts are right.

Row i of a round chooses what follows its token i. The draft behind that is right if it is what was
chosen: then row i + 1 has read what it should have. For greedy tokens the text is the one without
drafts. Drawn tokens are drawn row by row, each of its own distribution given the tokens before, and
a row counts only if those before it were right: so every token is distributed as without drafts,
whatever the drafts are.

Sizes: T tokens of a round, V words of the vocabulary.
"""

from types import SimpleNamespace
from typing import Any, Optional

import torch

from .choosing import Choice, Choosing, choice_of


def rows_choice(processors: list, config: Any, ids: torch.Tensor) -> Optional["RowChoice"]:
    """The choice of a call of generate with prompt ids [1, T]; None if a graph cannot make it."""
    asked = SimpleNamespace(return_dict_in_generate=False, do_sample=config.do_sample)
    found = choice_of(processors, asked, ids.device)
    return None if found is None else RowChoice(found, ids)


class RowChoice(Choosing):
    """The choice of a round. seen_before [1, V + 1]: the words that a penalty concerns among the
    tokens so far. Of a round, seen is [T, V + 1] and length [T, 1]."""

    def __init__(self, choice: Choice, ids: torch.Tensor):
        choice.ids = ids
        super().__init__(choice)
        self.ids = ids
        if self.known is not None and self.known[1].least:
            self.known = None
        self.seen_before: Optional[torch.Tensor] = None

    def begin(self, V: int) -> None:
        if self.penalises():
            self.seen_before = torch.zeros(1, V + 1, dtype=torch.bool, device=self.ids.device)
            self.mark(self.seen_before, self.ids)

    def choose(self, logits: torch.Tensor, ids: torch.Tensor, before: Any) -> tuple:
        """Returns `chosen` of logits [T, V] of tokens ids [T] behind `before` others."""
        T, V = logits.shape
        self.length = before + 1 + torch.arange(T, device=ids.device)[:, None]
        if self.seen_before is not None:
            found = torch.zeros(T, V + 1, dtype=torch.int32, device=ids.device)
            found.scatter_(1, ids.clamp(max=V)[:, None], 1)
            self.seen = self.seen_before | (found.cumsum(0) > 0)
        return self.chosen(logits, ids[:, None], self.length[0, 0])

    def keep(self, right: Optional[torch.Tensor]) -> None:
        """right []: the tokens of the round that count; None: its only one."""
        if self.seen_before is not None:
            seen = self.seen if right is None else self.seen.index_select(0, right.reshape(1) - 1)
            self.seen_before.copy_(seen)

    def first(self, logits: torch.Tensor) -> tuple:
        """The token after a prompt, of logits [1, V], and its scores, by transformers' own
        `LogitsProcessor`s."""
        scores = self.choice.processors(self.ids, logits.to(torch.float32, copy=True))
        if not self.choice.draws:
            return scores.argmax(-1), scores
        return torch.multinomial(scores.softmax(-1), 1)[:, 0], scores


def right_ones(ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Number [] of tokens of a round that count: ids [T] read, tokens [T] chosen behind them."""
    return (ids[1:] == tokens[:-1]).cumprod(0).sum() + 1
