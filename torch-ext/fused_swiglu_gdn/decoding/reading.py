"""A model that reads a text into a static cache, by transformers' preparation of its inputs."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, List

import torch
from torch import nn

from .caches import cache_among, drop_kinds
from .static_cache import check_length


class Reader:
    """given: the model's arguments in generate's loop, a static cache among them. ids [1, T]: the
    prompt."""

    def __init__(self, model: nn.Module, ids: torch.Tensor, given: dict):
        self.model, self.ids, self.given = model, ids, given
        self.name, self.cache = cache_among(given)
        self.out: Any = None  # the model's output for the prompt

    def prompt(self) -> Any:
        """Reads the prompt; returns the model's output. The host waits for it."""
        model, given = self.model, self.given
        inputs = model.prepare_inputs_for_generation(self.ids, is_first_iteration=True, **given)
        self.out = model(**inputs, return_dict=True)
        check_length(self.cache, self.ids.shape[1])
        self.given = model._update_model_kwargs_for_generation(
            self.out, dict(given), num_new_tokens=1
        )
        return self.out

    def inputs(self, ids: torch.Tensor, before: List[int]) -> dict:
        """transformers' inputs for tokens ids [1, T] behind those before them."""
        T, model = ids.shape[1], self.model
        since = len(before) + T - self.ids.shape[1] - 1
        given = dict(self.given)
        if since:
            own = model._update_model_kwargs_for_generation
            given = own(self.out, given, num_new_tokens=since)
        text = torch.cat([ids.new_tensor([before]), ids], 1)
        found = model.prepare_inputs_for_generation(
            text, next_sequence_length=T, is_first_iteration=False, **given
        )
        if "logits_to_keep" in found:
            found["logits_to_keep"] = T
        found.pop(self.name, None)
        return {**drop_kinds(found), "return_dict": True}


def inner_of(model: nn.Module) -> nn.Module:
    """The decoder of a model: what has its layers, embedding and tables of positions."""
    inner = model.model
    return getattr(inner, "language_model", inner)


@contextlib.contextmanager
def last_hidden(model: nn.Module):
    """Around a call of the model: yields an object whose `states` are then [B, T, H], those behind
    the decoder's last norm. Calls of other threads leave them alone."""
    found, thread = SimpleNamespace(states=None), threading.get_ident()

    def keep(module, args, output):
        if threading.get_ident() == thread:
            found.states = output[0]

    handle = inner_of(model).register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()
