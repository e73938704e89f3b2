"""Drafts for models with recurrent states: prompt lookup and assistants in transformers' generate.

transformers refuses them for a model whose cache cannot take tokens back. Its own assisted decoding
runs here on a view of the model that says it is not stateful, on a cache whose layers with a
recurrent state keep the state after each token of the latest call and go back to one of them in
`crop`. The first round has no drafts: a prompt runs in chunks, after which there are no such
states. Greedy tokens are those without drafts, as far as sums of several rows round as those of
one.
"""

import functools
import sys
from typing import Any, Callable, Optional

import torch
from torch import nn

from ..layers.plain import Named
from .caches import CACHES, cache_among, is_empty, is_of
from .draft_loop import HELPERS, drafted
from .graph_rules import PREPARE
from .late import UTILS, Generate, view_class, view_of
from .lookup import NotServed
from .mtp import MOST, Mtp, MtpDrafts
from .rows import keeping

ASSISTED, GENERATOR = "_assisted_decoding", "_get_candidate_generator"
LOOKUP = "prompt_lookup_num_tokens"


def why_not_drafts(model: nn.Module, now: bool = True) -> Optional[str]:
    """Reason why transformers' refusal of drafts stays, or None. now: as in `keeping`."""
    kind = type(model)
    if not getattr(kind, "_is_stateful", False):
        return "it has no recurrent state"
    if not _is_generate_own(kind):
        return "generate is not transformers' own"
    if PREPARE in model.__dict__:
        return "PEFT puts a trained prompt before that of the call"
    config = model.config.get_text_config(decoder=True)
    recurrent = [each for each in getattr(config, "layer_types", ()) or () if "linear" in each]
    if not recurrent or len(recurrent) != keeping(model, now):
        return "a layer with a recurrent state is not served"
    return None


def _is_generate_own(kind: type) -> bool:
    mixin = getattr(sys.modules.get(UTILS), "GenerationMixin", None)
    names = ("generate", ASSISTED, GENERATOR)
    return mixin is not None and all(getattr(kind, n, None) is getattr(mixin, n, n) for n in names)


def asks_for_drafts(model: nn.Module, args: tuple, options: dict) -> bool:
    """True for a call of generate that is assisted decoding by prompt lookup or an assistant."""
    if options.get("assistant_model") is not None:
        return True
    config = args[1] if len(args) > 1 else options.get("generation_config")
    config, name = config or model.generation_config, LOOKUP
    return options.get(name, getattr(config, name, None)) is not None


class Drafted(Generate):
    """Replaces a model's generate, also where it decodes without graphs."""

    def __call__(self, *args, **options):
        model = self.model
        own = type(model).generate
        if asks_for_drafts(model, args, options) and options.get("custom_generate") is None:
            if not getattr(type(model), "_is_stateful", False) or why_not_drafts(model) is None:
                return own(view_of(model, _view_class(type(model))), *args, **options)
        if "get_compiled_call" in model.__dict__:
            return super().__call__(*args, **options)
        return own(model, *args, **options)


def serve_drafts(modules: Named) -> bool:
    """Lets generate of the model, or of one inside it, take drafts where transformers refuses, and
    returns whether it does."""
    for _, module in modules:
        before, kind = module.__dict__.get(Drafted.name), type(module)
        refused = getattr(kind, "_is_stateful", False) and hasattr(kind, "generate")
        if type(before) is Generate and not refused and _is_generate_own(kind):
            setattr(module, Drafted.name, Drafted(module))  # for rounds that are graphs
        elif refused:
            if type(before) in (type(None), Generate) and why_not_drafts(module, now=False) is None:
                setattr(module, Drafted.name, Drafted(module))
            served = type(module.__dict__.get(Drafted.name)) is Drafted
            return served and why_not_drafts(module) is None
    return False


@functools.cache
def _view_class(own: type) -> type:
    """Returns a class for transformers' generate, whose models share a model's attributes and are
    not stateful."""
    stateful = getattr(own, "_is_stateful", False)

    def decode(self, ids, *args, **given):
        try:
            return drafted(self.viewed, ids, *args, **given)
        except NotServed:
            pass
        if not stateful:
            return own._assisted_decoding(self.viewed, ids, *args, **given)
        cache = cache_among(given)[1]
        if cache is not None and len(ids) == 1:  # else transformers raises
            if not _takes_drafts(cache) or given.get("inputs_embeds") is not None:
                kept = {name: x for name, x in given.items() if name not in HELPERS}
                return own._sample(self.viewed, ids, *args, **kept)
            go_back(cache)
        return own._assisted_decoding(self, ids, *args, **given)

    def generator(self, *args, **given):
        if type(given.get("assistant_model")) is Mtp:
            return MtpDrafts(self.viewed, given["assistant_model"])
        found = own._get_candidate_generator(self, *args, **given)
        return Few(found) if stateful else found

    members = {"_is_stateful": False, ASSISTED: decode, GENERATOR: generator}
    return view_class(own, members)


def _takes_drafts(cache: Any) -> bool:
    """True if transformers' assisted decoding is right on the cache: it reads a whole prompt, of
    which no token may be in the cache, and layers of a static one do not go back."""
    return is_of(cache, "DynamicCache") and is_empty(cache)


class Few:
    """A candidate generator of transformers: no drafts in the first round, at most MOST later."""

    def __init__(self, inner: Any):
        self.inner, self.first, self.drafted = inner, True, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_candidates(self, input_ids: torch.Tensor, *args, **given) -> tuple:
        # an assistant takes positions from its first call, so it is asked in the first round, too
        ids, logits = self.inner.get_candidates(input_ids, *args, **given)
        first, self.first = self.first, False
        length = input_ids.shape[1]
        most = 0 if first else MOST
        self.drafted = min(ids.shape[1] - length, most)
        if first:
            return input_ids, None
        return ids[:, : length + most], None if logits is None else logits[:, :most]

    def update_candidate_strategy(self, input_ids, scores, num_matches, *args, **given) -> None:
        if self.drafted:
            self.inner.update_candidate_strategy(input_ids, scores, num_matches, *args, **given)


def go_back(cache: Any) -> None:
    """Lets the cache's layers with a recurrent state take tokens back."""
    mixin = sys.modules[CACHES].LinearAttentionCacheLayerMixin
    for layer in cache.layers:
        if isinstance(layer, mixin) and not hasattr(layer, "takes_back"):
            layer.__class__ = _layer_class(type(layer))


@functools.cache
def _layer_class(own: type) -> type:
    """A class of cache layers that also put their recurrent state back.

    after [B, T, ...]: the states after each token of the latest call, at most MOST + 1. It has one
    base class: Python changes no object's class to one with another layout.
    """

    class Layer(own):
        is_croppable = True
        is_compileable = False
        rows = after = None

        def takes_back(self, tokens: int) -> bool:
            return tokens <= MOST + 1

        def recur(self, rule: Callable, tensors: tuple, state: torch.Tensor, options: dict):
            """The rule's outputs for tokens behind the state, which becomes the one after them."""
            o, states = rule(*tensors, initial_state=state, output_all_states=True, **options)
            self.keep(states)
            self.recurrent_states[0].copy_(states[:, -1])
            return o

        def keep(self, states: torch.Tensor) -> None:
            self.after = states

        def crop(self, tokens_to_remove: int) -> None:
            removed, states = abs(tokens_to_remove), self.after
            if removed and (states is None or removed >= states.shape[1]):
                raise RuntimeError(f"the states before the latest {removed} tokens are not kept")
            super().crop(tokens_to_remove)
            if removed:
                self.recurrent_states[0].copy_(states[:, -1 - removed])
            self.after = None

        def __reduce_ex__(self, protocol):
            state = {n: x for n, x in self.__dict__.items() if n != "after"}
            return _plain, (own,), state

    Layer.__name__, Layer.__qualname__, Layer.__module__ = (
        own.__name__, own.__qualname__, own.__module__
    )  # fmt: skip
    return Layer


def _plain(own: type) -> Any:
    return own.__new__(own)
