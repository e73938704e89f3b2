"""CUDA graphs of several tokens: a round reads drafts, chooses tokens and counts the right ones.

One graph for each number of tokens. It computes the model, the choice, what is kept of the round in
the cache, and, where a drafter is on the device, the drafts of the next round, so that the host
reads the tokens and how many of them count, and nothing else. Its positions and masks follow from
the length of the cache on the device; where they differ from transformers' at the capture, rounds
are eager.

Row i of a round chooses what follows its token i. The draft behind that is right if it is what was
chosen: then row i + 1 has read what it should have. For greedy tokens the text is the one without
drafts. Drawn tokens are drawn row by row, each of its own distribution given the tokens before, and
a row counts only if those before it were right: so every token is distributed as without drafts,
whatever the drafts are.

Sizes: T tokens of a round, V words of the vocabulary.
"""

import functools
from collections import deque
from contextlib import nullcontext
from typing import Any, List, Optional

import torch

from .capture import Graph
from .choosing import LEAST, Choice, Choosing
from .drafters import Drafter
from .graph_rules import why_not_model, why_not_now
from .graphs import Replayed, say
from .inputs import IDS, Following, following, mapped
from .reading import Reader, last_hidden
from .rows import TakesBack


class RowChoice(Choosing):
    """The choice of a round. seen_before [1, V + 1]: the words that a penalty concerns among the
    tokens so far. Of a round, seen is [T, V + 1] and length [T, 1]."""

    def __init__(self, choice: Choice, ids: torch.Tensor):
        choice.ids = ids
        super().__init__(choice)
        self.ids = ids
        if self.known is not None and self.known[1].least:
            self.known = None
        self.counts = any(type(each).__name__ in LEAST for each in choice.processors)
        self.length = ids.new_zeros(1, 1)  # which is not looked at unless it counts
        self.seen_before: Optional[torch.Tensor] = None

    def choose(self, logits: torch.Tensor, ids: torch.Tensor, before: Any) -> tuple:
        """Returns `chosen` of logits [T, V] of tokens ids [T] behind `before` others."""
        T, V = logits.shape
        if self.counts:
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
        `LogitsProcessor`s; before all rounds."""
        if self.penalises():
            V = logits.shape[1]
            self.seen_before = torch.zeros(1, V + 1, dtype=torch.bool, device=self.ids.device)
            self.mark(self.seen_before, self.ids)
        scores = self.choice.processors(self.ids, logits.to(torch.float32, copy=True))
        if not self.choice.draws:
            return scores.argmax(-1), scores
        return torch.multinomial(scores.softmax(-1), 1)[:, 0], scores


def right_ones(ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Number [] of tokens of a round that count: ids [T] read, tokens [T] chosen behind them."""
    T = len(ids)
    place = torch.arange(1, T, device=ids.device)
    return torch.where(ids[1:] == tokens[:-1], T, place).amin()


class Round(Replayed):
    """Calls of T tokens on one cache.

    reader: of the model and the cache. text: the ids so far, to which the latest token belongs.
    drafter: of the next round on the device, of which `after` is asked in the graph, or None.
    """

    def __init__(
        self, reader: Reader, text: List[int], T: int, choice: RowChoice, back: TakesBack,
        drafter: Optional[Drafter],
    ):  # fmt: skip
        super().__init__(reader.name)
        self.reader, self.model, self.cache = reader, reader.model, reader.cache
        self.text, self.T, self.choice, self.back, self.drafter = text, T, choice, back, drafter
        device = back.length.device
        self.device = device
        self.ids = torch.zeros(1, T, dtype=torch.int64, device=device)
        self.given = Graph.delivery(device, [self.ids[0]]).values[0]  # the ids on the host
        told = self.ids.new_zeros(T + (T > 1))
        self.free = deque([Graph.delivery(device, [told]) for _ in range(2)])
        self.sent: deque = deque()  # to the host, and not yet received
        self.before: Optional[tuple] = None  # inputs and length of the first call
        self.made: Optional[Following] = None  # what the graph makes its inputs of
        # of the latest call; told: the tokens and, of several, how many count; hidden [1, T, H]
        self.tokens = self.told = self.logits = self.scores = self.hidden = None
        self.modes: tuple = ()
        self.checked = False  # that the graph holds, since the latest call

    def launch(self, ids: Optional[List[int]]) -> None:
        """Computes the tokens behind each of ids; the cache keeps the right ones. None: of those
        that are on the device, which the latest call has put there: of one the token that it has
        chosen. While it runs, what a graph has baked in is compared for the next call."""
        if ids is not None:
            self.given.copy_(torch.tensor(ids))
            self.ids[0].copy_(self.given, non_blocking=True)
        self._run()
        slot = self.free.popleft()
        slot.send([self.told])
        self.sent.append(slot)
        self.checked = self.graph is not None and self._holds()

    def receive(self) -> List[int]:
        """Returns the tokens that count of the earliest call that was not received."""
        slot = self.sent.popleft()
        self.free.append(slot)
        found = slot.wait()[0].tolist()
        return found if self.T == 1 else found[: found[-1]]

    def follows(self) -> bool:
        """True if the next call may be launched before the host knows the tokens of this one."""
        known = self.T == 1 or self.drafter is not None  # on the device
        return known and self.checked and self.replays > 1

    def _run(self) -> None:
        if self.graph is not None:
            if self.checked or self._holds():
                return self._replay()
            self.drop()
        inputs = {**self.reader.inputs(self.ids, self.text[:-1]), IDS: self.ids}
        reason = why_not_now(self.device) or self.reason or why_not_model(self.model)
        if reason is not None:
            say(self.model, reason)
            return self._verify(inputs)
        if self.before is None:
            start = self.back.length.clone()
            self.before = {**mapped(inputs, torch.clone), IDS: self.ids}, start
            return Graph(self.device).run(lambda: self._verify(inputs))
        return self._capture(inputs, Graph(self.device))

    def _verify(self, inputs: dict) -> None:
        T, back, drafter = self.T, self.back, self.drafter
        before = back.length.clone()
        hidden = drafter is not None and drafter.reads_hidden
        with last_hidden(self.model) if hidden else nullcontext() as found:
            out = self.model(**{self.name: self.cache}, **inputs)
        if T > 1:
            back.check()
        self.logits = out.logits[0, -T:]
        self.tokens, self.scores = self.choice.choose(self.logits, self.ids[0], before)
        if hidden:
            self.hidden = found.states[:, -T:]
        if T == 1:
            self.told = self.tokens
            self.choice.keep(None)
            if drafter is not None:
                drafter.alone(self.tokens, self.hidden, before)
            return self.ids.copy_(self.tokens[None])  # which the next call reads
        right = right_ones(self.ids[0], self.tokens)
        self.told = torch.cat([self.tokens, right.reshape(1)])
        self.choice.keep(right)
        back.keep(right, T)
        if drafter is not None:
            given = self.ids[0], self.tokens, self.hidden, right, before
            self.ids.copy_(drafter.after(*given)[None])

    def _capture(self, inputs: dict, graph: Graph) -> None:
        before, back = self.before, self.back
        made = following(*before, inputs, back.length)
        if made is None:
            self.reason = "its inputs do not follow from the number of tokens"
            say(self.model, self.reason)
            return self._verify(inputs)

        def step():
            self._verify(made.now(back.length))

        capture = functools.partial(graph.capture, step)
        self.captured(graph, capture, self.cache, self.model, "its round")
        if self.reason is not None:
            return self._verify(inputs)
        self.made, self.modes = made, self._modes()
        self._replay()

    def _modes(self) -> tuple:
        return Graph.place(self.device), torch.is_inference_mode_enabled()

    def _holds(self) -> bool:
        return self.modes == self._modes() and self.holds(self.cache, self.device)

    def _replay(self) -> None:
        self.graph.replay()
        self.replays += 1

    def drop(self) -> None:
        super().drop()
        self.before = self.made = None
