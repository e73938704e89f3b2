"""Drafts in generate: rounds of our own, and transformers' assisted decoding for what they leave.

transformers refuses drafts for a model whose cache cannot take tokens back. Its own assisted
decoding runs here on a view of the model that says it is not stateful, on a cache whose layers with
a recurrent state keep the state after each token of the latest call and go back to one of them in
`crop`. The first round has no drafts: a prompt runs in chunks, after which there are no such
states. Greedy tokens are those without drafts, as far as sums of several rows round as those of
one.
"""

import functools
import logging
import sys
from typing import Any, Callable, Optional

import torch
from torch import nn

from .caches import CACHES, cache_among, is_empty, is_of, named_like
from .draft_loop import HELPERS, drafted
from .drafters import MOST, NotServed
from .graph_rules import PREPARE
from .late import LOOP, is_own
from .mtp import Mtp, MtpDrafts
from .rows import keeping

ASSISTED, GENERATOR = "_assisted_decoding", "_get_candidate_generator"

logger = logging.getLogger(__name__)


def is_stateful(model: nn.Module) -> bool:
    """True if transformers refuses drafts for the model's class."""
    return getattr(type(model), "_is_stateful", False)


def why_not_drafts(model: nn.Module, now: bool = True) -> Optional[str]:
    """Reason why transformers' refusal of drafts stays, or None. now: as in `keeping`."""
    if not is_own(type(model), "generate", ASSISTED, GENERATOR):
        return "generate is not transformers' own"
    if PREPARE in model.__dict__:
        return "PEFT puts a trained prompt before that of the call"
    config = model.config.get_text_config(decoder=True)
    recurrent = [each for each in getattr(config, "layer_types", ()) or () if "linear" in each]
    if not recurrent or len(recurrent) != keeping(model, now):
        return "a layer with a recurrent state is not served"
    return None


def assisted(view: nn.Module, model: nn.Module, ids, *args, **given):
    """transformers' assisted decoding for a model and its view."""
    own = type(model)
    try:
        return drafted(model, ids, *args, **given)
    except NotServed as reason:
        logger.debug("drafts are left to transformers' loop: %s", reason)
    if not is_stateful(model):
        return getattr(own, ASSISTED)(model, ids, *args, **given)
    cache = cache_among(given)[1]
    if cache is not None and len(ids) == 1:  # else transformers raises
        if not _takes_drafts(cache) or given.get("inputs_embeds") is not None:
            kept = {name: x for name, x in given.items() if name not in HELPERS}
            return getattr(own, LOOP)(model, ids, *args, **kept)
        go_back(cache)
    return getattr(own, ASSISTED)(view, ids, *args, **given)


def generator(view: nn.Module, own: type, *args, **given):
    """The candidate generator of a view, in the place of that of the model's class."""
    mtp = given.get("assistant_model")
    if type(mtp) is Mtp:
        slots = given["generation_config"].max_length + 2 * mtp.count
        return MtpDrafts(view.viewed, mtp, slots)
    found = getattr(own, GENERATOR)(view, *args, **given)
    return Few(found) if is_stateful(view.viewed) else found


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
        if self.first:
            self.first = False
            return input_ids, None
        length = input_ids.shape[1]
        self.drafted = min(ids.shape[1] - length, MOST)
        return ids[:, : length + MOST], None if logits is None else logits[:, :MOST]

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

    after [B, T, ...]: the states after each token of the latest call, at most MOST + 1.
    """

    @named_like(own)
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

    return Layer


def _plain(own: type) -> Any:
    return own.__new__(own)
