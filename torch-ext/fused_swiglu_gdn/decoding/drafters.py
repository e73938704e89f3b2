"""Drafters of a loop of rounds: what they have in common, drafts from the text so far, and the
pace."""

import statistics
from typing import Any, Dict, List, Sequence, Tuple, Union

import torch
from torch import nn

MOST = 7  # drafts of a round


class NotServed(Exception):
    """The call is left to transformers' loop, for this reason; nothing was changed."""


class Drafter:
    """A source of drafts for a loop. count: at most so many a round."""

    count: int
    reads = 0.0  # weights that a round's drafts read
    in_graph = False  # it drafts in that of the round before: mtp.py, assistants.py
    reads_hidden = False  # the model's states behind its last norm

    def begin(self) -> None:
        """Before the model reads the prompt."""

    def add(self, token: int) -> None:
        """A token of the text, from its first on."""

    def drafts(self) -> Union[List[int], torch.Tensor]:
        """Drafts what follows the tokens added; a tensor is on the device."""
        raise NotImplementedError

    def verified(self, right: int) -> None:
        """The latest drafts were read by a round, which has added `right` tokens."""

    # of one that drafts in the graph, where `before` [] tokens are in the model's cache

    def read(self, ids: torch.Tensor, token: torch.Tensor, hidden: Any) -> None:
        """The model has read ids [1, T], with hidden states [1, T, H], and chosen token [1]."""

    def alone(self, token: torch.Tensor, hidden: Any, before: torch.Tensor) -> None:
        """token [1] was chosen behind the one that follows those before, without a round."""

    def after(self, read, tokens, hidden, right, before) -> torch.Tensor:
        """The last token that counts, and the drafts behind it [1 + count].

        tokens [T] were chosen behind each of read [T], with hidden states [1, T, H]; the first
        `right` [] of them count. before: without those T.
        """
        raise NotImplementedError


class Lookup(Drafter):
    """Drafts what followed the latest two ids where they were met last.

    Where that runs to the end of the ids, it goes on from its own beginning: a text that repeats
    itself goes on to do so.
    """

    def __init__(self, count: int):
        self.count = count
        self.ids: List[int] = []
        self.after: Dict[Tuple[int, int], int] = {}  # two ids -> the place behind them

    def add(self, token: int) -> None:
        ids = self.ids
        if len(ids) > 1:  # of the two that are the latest no more
            self.after[ids[-2], ids[-1]] = len(ids)
        ids.append(token)

    def drafts(self) -> List[int]:
        ids = self.ids
        start = self.after.get((ids[-2], ids[-1])) if len(ids) > 1 else None
        if start is None:
            return []
        found = ids[start : start + self.count]
        while len(found) < self.count:
            found += found[: self.count - len(found)]
        return found


class Weights:
    """Counts the weights that a call of a model reads, embeddings apart."""

    def __init__(self, model: nn.Module):
        config = model.config.get_text_config(decoder=True)
        self.chosen = getattr(config, "num_experts_per_tok", None)
        self.always = 0
        self.stacks: Dict[int, int] = {}  # experts -> their weights
        for module in model.modules():
            own = {} if isinstance(module, nn.Embedding) else module._parameters
            stacked = self.chosen and own.get("down_proj") is not None  # [experts, ..], as all here
            for x in own.values():
                if x is not None and stacked:
                    self.stacks[len(x)] = self.stacks.get(len(x), 0) + x.numel()
                elif x is not None:
                    self.always += x.numel()

    def read(self, tokens: int = 1) -> float:
        """Weights that a call of so many tokens reads: of experts those that the tokens choose,
        each independently of the others."""
        return self.always + sum(
            n * (1 - (1 - self.chosen / E) ** tokens) for E, n in self.stacks.items()
        )


class Pace:
    """Decides whether drafts are worth a round.

    A round of several tokens takes longer than one token: WORTH of it on one H200 (1.12 for a
    Llama, 1.26 for Qwen3.5, by the rounds of generate_drafts.json whose drafts are all right), and
    `more`, for its drafts and for experts, in the same unit. Where rounds gave fewer tokens
    each, the next REST tokens come one by one, and twice as many when that happens again. A few
    rounds tell it where hardly any draft is right: the latest WINDOW by half of what a round is to
    add to a token, and four times as many by all of it. After a rest half of WINDOW suffice.
    """

    WORTH, WINDOW, REST = 1.2, 8, 64

    def __init__(self, more: float = 0.0):
        self.worth = self.WORTH + more
        self.latest: List[int] = []
        self.waits, self.rest = 0, self.REST
        self.without = 0  # tokens since there was a draft

    def drafts(self, drafter: Drafter) -> Sequence:
        """The next drafts; none while they rest."""
        if self.waits:
            self.waits -= 1
            return []
        found = drafter.drafts()
        self.without = 0 if len(found) else self.without + 1
        return found

    def rests(self) -> bool:
        """True if none is expected for the token after the next."""
        return self.waits > 0 or self.without >= self.WINDOW

    def note(self, tokens: int) -> None:
        """tokens: those that a round with drafts gave."""
        self.latest.append(tokens)
        n, again = len(self.latest), self.rest > self.REST
        if n % (self.WINDOW // 2 if again else self.WINDOW):
            return
        mean = statistics.mean(self.latest[-self.WINDOW :])
        if (
            mean < 1 + (self.worth - 1) / 2
            or n >= 4 * self.WINDOW
            and sum(self.latest) < n * self.worth
        ):
            self.waits, self.rest = self.rest, 2 * self.rest
            self.latest.clear()
        elif n >= 4 * self.WINDOW:
            self.rest = self.REST
            self.latest.clear()
