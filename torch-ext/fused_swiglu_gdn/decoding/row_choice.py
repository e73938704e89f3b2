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

from ..sampling.ops import CHOOSE
from .choosing import PENALTY, Choice, _step, choice_of, known_to_kernels


def rows_choice(processors: list, config: Any, ids: torch.Tensor) -> Optional["RowChoice"]:
    """The choice of a call of generate with prompt ids [1, T]; None if a graph cannot make it."""
    asked = SimpleNamespace(return_dict_in_generate=False, do_sample=config.do_sample)
    found = choice_of(processors, asked, ids.device)
    return None if found is None else RowChoice(found, ids)


class RowChoice:
    """seen_before [1, V + 1]: the words that a penalty concerns among the tokens so far; the last
    column is for ids past the vocabulary."""

    def __init__(self, choice: Choice, ids: torch.Tensor):
        self.choice, self.ids = choice, ids
        self.steps = [_step(each) for each in choice.processors]
        choice.ids = ids
        known = known_to_kernels(choice)
        self.known = None if known is None or known[1].least else known
        self.seen_before: Optional[torch.Tensor] = None
        # what the steps read of a round
        self.seen: Optional[torch.Tensor] = None  # [T, V + 1]
        self.length: Optional[torch.Tensor] = None  # [T, 1] of the ids up to each row's token

    def begin(self, V: int) -> None:
        for each in self.choice.processors:
            if type(each).__name__ == PENALTY:
                ones = torch.ones(1, V, device=self.ids.device)
                self.seen_before = torch.zeros(1, V + 1, dtype=torch.bool, device=ones.device)
                self.seen_before[:, :V] = each(self.ids, ones) != 1

    def choose(self, logits: torch.Tensor, ids: torch.Tensor, before: Any) -> tuple:
        """Returns the tokens [T] after logits [T, V] of tokens ids [T] behind `before` others, the
        scores [T, V] of which they are chosen, or None where a kernel chooses."""
        T, V = logits.shape
        self.length = before + 1 + torch.arange(T, device=ids.device)[:, None]
        if self.seen_before is not None:
            found = torch.zeros(T, V + 1, dtype=torch.int32, device=ids.device)
            found.scatter_(1, ids.clamp(max=V)[:, None], 1)
            self.seen = self.seen_before | (found.cumsum(0) > 0)
        q = None
        if self.choice.draws:
            q = torch.empty(T, V, dtype=torch.float32, device=ids.device).exponential_()
        if self.known is not None:
            ends, options = self.known
            found = CHOOSE((logits, q, self.seen, ends, self.length[0, 0]), options)
            if found is not None:
                tokens, right = found
                if q is not None:
                    torch._assert_async(right.all())
                return tokens, None
        scores = logits.float()
        for step in self.steps:
            scores = step(scores, ids[:, None], self)
        if q is None:
            return scores.argmax(-1), scores
        p = scores.softmax(-1)
        first = p[:, :1]
        torch._assert_async((first == first).all())
        return (p / q).argmax(-1), scores

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
