"""Drafts of an assistant model by its own CUDA graph of one token.

Between two rounds of the model the assistant is replayed once for each draft. Its tokens stay on
the device, from where the round reads them. What it has read of wrong drafts is taken back: keys
and values are overwritten, a recurrent state is copied after each token.
"""

import sys
from typing import Any, List, Optional

import torch
from torch import nn

from .capture import Graph
from .choosing import Choice
from .graph_rules import CACHE_NAMES, CACHES, why_not_cache, why_not_model
from .lookup import Drafter
from .reading import Reader
from .rounds import Round
from .row_choice import RowChoice
from .rows import LINEAR
from .static_cache import PREPARE, _slides

COUNT = 4  # drafts of a round where the assistant's generation_config has no number
KNOWN = {*CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}  # arguments
LENGTH = "cumulative_length"  # of a cache's layers with attention
OWN = ("Gemma4Assistant", "Gemma4UnifiedAssistant")  # read the model's keys and values


def why_not_assistant(model: nn.Module, assistant: nn.Module, given: dict) -> Optional[str]:
    """Reason why transformers has to ask the assistant, or None. given: the model's arguments."""
    kind = type(assistant)
    if not hasattr(kind, "prepare_inputs_for_generation") or kind.__name__.startswith(OWN):
        return "it is no causal language model"
    if PREPARE in assistant.__dict__ or not getattr(assistant, "_can_compile_fullgraph", False):
        return "it decodes without graphs"
    if any(name not in KNOWN and x is not None for name, x in given.items()):
        return "it gets arguments of the model"
    configs = [x.config.get_text_config(decoder=True) for x in (assistant, model)]
    if configs[0].vocab_size > configs[1].vocab_size:
        return "it has more words than the model"
    if assistant.training or assistant.device != model.device:
        return "it is in training mode, or on another device"
    return why_not_model(assistant)


def drafts_of(assistant: nn.Module, most: int) -> int:
    """The drafts of a round."""
    found = getattr(assistant.generation_config, "num_assistant_tokens", None)
    return COUNT if found is None else max(1, min(int(found), most))


class Past:
    """The tokens in a static cache of one sequence, of which the latest may be taken back."""

    def __init__(self, cache: Any, most: int):
        self.lengths = [
            x.cumulative_length for x in cache.layers if hasattr(x, "cumulative_length")
        ]
        linear = [layer for layer in cache.layers if type(layer).__name__ == LINEAR]
        self.states = [x[0] for y in linear for x in (y.recurrent_states, y.conv_states)]
        self.copies = [[torch.empty_like(x) for x in self.states] for _ in range(most)]

    @property
    def length(self) -> torch.Tensor:
        return self.lengths[0]

    def note(self, place: int) -> None:
        """Copies the states."""
        if self.states:
            torch._foreach_copy_(self.copies[place], self.states)

    def take_back(self, tokens: int, place: int) -> None:
        """Takes back the latest tokens; the states before them were noted at a place."""
        torch._foreach_sub_(self.lengths, tokens)
        if self.states:
            torch._foreach_copy_(self.states, self.copies[place])


def why_not_past(cache: Any, slots: int) -> Optional[str]:
    """Reason why tokens cannot be taken back from a static cache, or None."""
    if why_not_cache(cache) is not None or _slides(cache, slots):
        return "it has no static cache, or a window that becomes full"
    for layer in cache.layers:
        kind = type(layer).__name__
        if "Linear" in kind and (kind != LINEAR or layer.number_of_states != 1):
            return f"its cache has a layer that is a {kind}"
    if not any(hasattr(layer, LENGTH) for layer in cache.layers):
        return "it has no attention, which knows the length"
    return None


class Assistant(Drafter):
    """count: drafts of a round. given: the model's arguments. ids [1, T]: the prompt; slots: for
    the text and a round's drafts."""

    def __init__(self, model: nn.Module, assistant: nn.Module, ids, given, count: int, slots: int):
        name = next(name for name in CACHE_NAMES if given.get(name) is not None)
        self.cache = sys.modules[CACHES].StaticCache(config=assistant.config, max_cache_len=slots)
        self.reason = why_not_past(self.cache, slots)
        self.reader = Reader(assistant, ids, {**given, name: self.cache})
        self.count, self.choice = count, RowChoice(Choice([], False), ids)
        self.ids: List[int] = []
        self.cached = 0  # tokens in the cache
        self.drafted = 0  # length of the text behind which the latest drafts are
        sizes = [sum(x.numel() for x in m.parameters()) for m in (assistant, model)]
        self.takes = count * sizes[0] / sizes[1]
        self.found = ids.new_zeros(count)
        self.lacking = ids.new_zeros(2)  # ids that the assistant has not read
        self.given = Graph.delivery(ids.device, [self.lacking]).values[0]

    def begin(self) -> None:
        self.reader.prompt()
        self.past = Past(self.cache, self.count)
        self.cached = self.reader.ids.shape[1]
        reader, before = self.reader, self._before
        of = reader.model, self.cache, reader.name, 1, self.choice, self.past
        self.step = Round(*of, lambda ids: reader.inputs(ids, before()))

    def _before(self) -> List[int]:
        """The ids in the cache; those of drafts do not matter."""
        return (self.ids + [0] * self.count)[: self.cached]

    def add(self, token: int) -> None:
        self.ids.append(token)

    @torch.no_grad()
    def drafts(self) -> torch.Tensor:
        lacking = self.ids[self.cached :]
        if len(lacking) > 2:  # drafts have rested
            first = self.found.new_tensor([lacking[:-1]])
            self.reader.model(
                **self.reader.inputs(first, self._before()), **{self.reader.name: self.cache}
            )
            self.cached, lacking = len(self.ids) - 1, lacking[-1:]
        self.given[: len(lacking)] = torch.tensor(lacking)
        self.lacking.copy_(self.given, non_blocking=True)
        self.drafted = len(self.ids)
        for n in range(len(lacking)):
            self.step.ids[0].copy_(self.lacking[n : n + 1])
            self._step()
        for n in range(self.count):
            self.past.note(n)
            self.found[n : n + 1].copy_(self.step.tokens)
            if n + 1 < self.count:
                self._step()
        return self.found

    def _step(self) -> None:
        self.step.count(self.cached)
        self.step.compute(None)
        self.cached += 1

    def verified(self, right: int) -> None:
        """A round has added `right` tokens, all but the last of them drafts."""
        place = min(right, self.count) - 1
        wrong = self.cached - self.drafted - place
        if wrong:
            self.past.take_back(wrong, place)
            self.cached -= wrong
