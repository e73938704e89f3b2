"""Sliding windows of a static cache that are full.

A layer whose window is full moves its slots one place to the left at each token and writes the last
one: the same work in every step, so that a graph can do it. transformers' code for it copies a
number from the host, which cannot be captured; while a step is captured, `moved` stands for it.
"""

import contextlib
import functools
from typing import Any, Iterator, Optional

import torch

from .caches import COUNT, full_windows

TOKENS = 3  # of the window that is tried


def moved(layer: Any, keys: torch.Tensor, values: torch.Tensor, *args, **options) -> tuple:
    """The update of a full layer with one token's keys and values [B, H, 1, D]."""
    for slots, new in ((layer.keys, keys), (layer.values, values)):
        slots[:, :, :-1] = slots[:, :, 1:].clone()
        slots[:, :, -1:] = new
    setattr(layer, COUNT, getattr(layer, COUNT) + 1)
    return layer.keys, layer.values


@functools.cache
def moves(kind: type, update: object) -> bool:
    """True if `update`, of a class of sliding layers, does what `moved` does."""
    own = next((base for base in kind.__mro__ if "update" in vars(base)), None)
    try:
        layers = [own(max_cache_len=TOKENS, sliding_window=TOKENS) for _ in range(2)]
        tokens = torch.arange(1.0, 49.0).view(2, 2, 6, 2).split(1, dim=2)
        for token in tokens[:TOKENS]:
            for layer in layers:
                layer.update(token, -token)
        for token in tokens[TOKENS:]:
            both = layers[0].update(token, -token), moved(layers[1], token, -token)
            if not all(map(torch.equal, *both)):
                return False
    except Exception:  # of another release
        return False
    states = [{n: x for n, x in vars(layer).items() if type(x) is int} for layer in layers]
    return states[0] == states[1]


def why_not_windows(cache: Any, inputs: dict) -> Optional[str]:
    """Reason why a step on sliding layers, which count in Python, cannot be captured, or None."""
    for layer in cache.layers:
        count = layer.__dict__.get(COUNT)
        if count is None:
            continue
        if inputs.get("position_ids") is None or inputs.get("attention_mask") is None:
            return "a model with sliding windows needs position_ids and attention_mask"
        kind = type(layer)
        full = count >= layer.max_cache_len
        if full and ("update" in layer.__dict__ or not moves(kind, kind.update)):
            return f"the sliding window of {layer.max_cache_len} tokens is full"
    return None


@contextlib.contextmanager
def moving(cache: Any) -> Iterator[None]:
    """Within it, full layers are updated by `moved`."""
    layers = full_windows(cache)
    for layer in layers:
        layer.update = functools.partial(moved, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.update
