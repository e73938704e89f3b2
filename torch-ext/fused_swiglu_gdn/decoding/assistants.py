"""Drafts of an assistant model in the CUDA graph of a round.

A round ends with the drafts of the next one: the assistant reads the last two tokens of the text,
and then its own drafts, one by one. What it has read of wrong drafts is taken back: keys and values
are overwritten, and recurrent states, of which a copy is kept after each token, are put back. All
of it is on the device, so the next round can be launched before the host knows the tokens of this
one.
"""

import sys
from typing import Any, List

import torch
from torch import nn

from .caches import (
    CACHE_NAMES,
    CACHES,
    cache_among,
    lengths_of,
    linear_layers,
    set_count,
    slides,
    takes_back,
    why_not_cache,
)  # fmt: skip
from .choosing import Choice
from .drafters import MOST, Drafter, NotServed, Weights
from .graph_rules import PREPARE, why_not_model
from .inputs import IDS, Following, following
from .reading import Reader
from .rounds import RowChoice

# of a round where the assistant's generation_config has no number: an estimate. Three of an
# assistant of 1B take .45 of a token's time without drafts if all are right, .62 if .7 of them are
# (generate_drafts.json)
DRAFTS = 4
SLICED = ("attention_mask", "position_ids")  # arguments of as many tokens as the prompt
KNOWN = {*CACHE_NAMES, *SLICED, "use_cache", "logits_to_keep"}
OWN = ("Gemma4Assistant", "Gemma4UnifiedAssistant")  # read the model's keys and values


def drafts_of(model: nn.Module, assistant: nn.Module, ids: torch.Tensor, given: dict) -> int:
    """The drafts of a round; raises NotServed where transformers has to ask the assistant. given:
    the model's arguments."""
    kind = type(assistant)
    if not hasattr(kind, PREPARE) or kind.__name__.startswith(OWN):
        raise NotServed("the assistant is no causal language model")
    graphs = (
        getattr(assistant, "_can_compile_fullgraph", False) and why_not_model(assistant) is None
    )
    mine, its = (x.config.get_text_config(decoder=True).vocab_size for x in (model, assistant))
    reasons = (
        (not graphs or PREPARE in assistant.__dict__, "the assistant decodes without graphs"),
        (any(n not in KNOWN and x is not None for n, x in given.items()),
         "the assistant gets arguments of the model"),
        (its > mine, "the assistant has more words than the model"),
        (assistant is model or assistant.training, "the assistant is the model, or is trained"),
        (assistant.device != model.device, "the assistant is on another device"),
        (ids.shape[1] < 2, "the prompt is one token"),
    )  # fmt: skip
    for found, reason in reasons:
        if found:
            raise NotServed(reason)
    found = getattr(assistant.generation_config, "num_assistant_tokens", None)
    return DRAFTS if found is None else max(1, min(int(found), MOST))


class Assistant(Drafter):
    """ids [1, P]: the prompt; given: the model's arguments for it. count: drafts of a round. slots:
    for the text and a round's drafts."""

    in_graph = True

    def __init__(self, model: nn.Module, assistant: nn.Module, ids, given, count: int, slots: int):
        name = cache_among(given)[0]
        self.cache = sys.modules[CACHES].StaticCache(config=assistant.config, max_cache_len=slots)
        if why_not_cache(self.cache) or slides(self.cache, slots) or not takes_back(self.cache):
            raise NotServed("tokens cannot be taken back from the assistant's cache")
        mine = {n: given[n][..., :-1] for n in SLICED if given.get(n) is not None}
        # the last token is read with the one behind it
        self.reader = Reader(assistant, ids[:, :-1], {**given, **mine, name: self.cache})
        self.model, self.name, self.count = assistant, name, count
        self.choice = RowChoice(Choice([], False), ids)
        self.ids: List[int] = []
        self.behind = ids.shape[1]  # length of the text behind which the latest drafts are
        self.reads = count * Weights(assistant).read()

    def add(self, token: int) -> None:
        self.ids.append(token)

    def verified(self, right: int) -> None:
        self.behind = len(self.ids) + right

    @torch.no_grad()
    def begin(self) -> None:
        """Reads the prompt but for its last token, and finds what inputs follow from a length."""
        self.reader.prompt()
        P, linear = self.reader.ids.shape[1], linear_layers(self.cache)
        self.lengths = lengths_of(self.cache.layers)
        self.states = [x[0] for y in linear for x in (y.recurrent_states, y.conv_states)]
        self.copies = [x.new_zeros(self.count + 1, *x.shape) for x in self.states]
        self._keep(0)
        self.firsts = (1, 1) if self.states else (2,)  # tokens of calls until the first draft
        self.made = {T: self._following(T, P) for T in {*self.firsts, 1}}
        self._set(P)

    def _following(self, T: int, P: int) -> Following:
        """Inputs of T tokens that follow from the tokens in the cache."""
        device = self.reader.ids.device
        found = []
        for length in (P, P + 1):
            self._set(length)
            ids = torch.zeros(1, T, dtype=torch.int64, device=device)
            inputs = self.reader.inputs(ids, [0] * length)
            found.append(({**inputs, IDS: ids}, torch.tensor(length, device=device)))
        (one, start), (two, length) = found
        if following(one, start, {**two, IDS: one[IDS]}, length) is None:
            raise NotServed("the assistant's inputs do not follow from a length")
        return Following(one, start)

    def _set(self, tokens: int) -> None:
        for length in self.lengths:
            length.fill_(tokens)
        set_count(self.cache, tokens)  # which must only not reach the end of a window

    @torch.no_grad()
    def drafts(self) -> torch.Tensor:
        """The drafts [count] behind the text, whose latest tokens may not have been read."""
        start, end = self.behind - 1, len(self.ids) - 2
        self._set(start)
        self._back(0)
        if end > start:  # drafts have rested
            ids = self.reader.ids.new_tensor([self.ids[start:end]])
            inputs = self.reader.inputs(ids, self.ids[:start])
            self.model(**{**inputs, IDS: ids, self.name: self.cache})
            self._keep(0)
        pair = self.reader.ids.new_tensor(self.ids[-2:])
        return self._chain(pair, self.lengths[0].clone())

    @torch.no_grad()
    def after(self, read, tokens, hidden, right, before) -> torch.Tensor:
        last = right.reshape(1) - 1
        pair = torch.cat([read.index_select(0, last), tokens.index_select(0, last)])
        length = before + right - 1
        for each in self.lengths:
            each.copy_(length)
        self._back(last)
        return torch.cat([pair[1:], self._chain(pair, length)])

    def _keep(self, place: int) -> None:
        """Copies the states to a place."""
        for copy, x in zip(self.copies, self.states):
            copy[place] = x

    def _back(self, place: Any) -> None:
        """Puts back the states of a place, a number or a tensor [1]."""
        for copy, x in zip(self.copies, self.states):
            x.copy_(copy[place] if isinstance(place, int) else copy.index_select(0, place)[0])

    def _chain(self, pair: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Drafts [count] behind a pair of tokens [2], with `length` [] tokens before them."""
        calls, found, place = list(pair.split(self.firsts)), [], 0
        set_count(self.cache, self.reader.ids.shape[1])
        while len(found) < self.count:
            ids = calls.pop(0) if calls else found[-1]
            inputs = {**self.made[len(ids)].now(length), IDS: ids[None], self.name: self.cache}
            logits = self.model(**inputs).logits[:, -1]
            length = length + len(ids)
            self._keep(place)
            place += 1
            if not calls:
                found.append(self.choice.choose(logits, ids[-1:], 0)[0])
        return torch.cat(found)
