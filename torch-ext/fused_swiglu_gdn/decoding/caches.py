"""transformers' caches: their classes, their layers, and what Python counts in them."""

import inspect
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import nn

CACHES = "transformers.cache_utils"
CACHE_NAMES = ("cache", "past_key_values")  # of a model's argument, newest releases first
LINEAR = "LinearAttentionLayer"  # cache layers with a recurrent state
LAYERS = {
    "StaticLayer", "StaticSlidingWindowLayer", LINEAR, "DummyLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
}  # fmt: skip
KINDS, SIZES = "mm_token_type_ids", ("image_grid_thw", "video_grid_thw")  # arguments of models
COUNT = "cumulative_length_int"  # of a sliding layer: the tokens in it, which Python counts


def cache_among(given: dict) -> Tuple[Optional[str], Any]:
    """(name, cache) of the argument of a model that is its cache; both None without one."""
    for name in CACHE_NAMES:
        if given.get(name) is not None:
            return name, given[name]
    return None, None


def drop_kinds(inputs: dict) -> dict:
    """Takes the kinds of all tokens of a text out of the inputs of its latest ones, to which
    releases before 5.23 hand them: a model reads them beside the sizes of images alone, and a graph
    cannot have an input that grows."""
    ids, kinds = inputs.get("input_ids"), inputs.get(KINDS)
    if kinds is not None and ids is not None and kinds.shape[-1] > ids.shape[-1]:
        if all(inputs.get(name) is None for name in SIZES):
            del inputs[KINDS]
    return inputs


def cache_name(module: nn.Module) -> str:
    """The name of a module's argument that takes the cache."""
    known = inspect.signature(module.forward).parameters  # of a served or decorated one its own
    return next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[-1])


def is_of(x: Any, *names: str) -> bool:
    """True for a cache, or a layer of one, of one of these classes of transformers."""
    return type(x).__module__ == CACHES and type(x).__name__ in names


def named_like(own: type) -> Callable:
    """A decorator of a class of layers that takes the place of `own` in caches. It has no other
    base: Python changes no object's class to one with another layout."""

    def named(kind: type) -> type:
        for name in ("__name__", "__qualname__", "__module__"):
            setattr(kind, name, getattr(own, name))
        return kind

    return named


def linear_layers(cache: Any) -> List[Any]:
    """The layers that have a recurrent state and nothing else."""
    return [layer for layer in cache.layers if is_of(layer, LINEAR)]


def lengths_of(layers: List[Any]) -> List[torch.Tensor]:
    """The number of tokens, a tensor [], in each layer that has attention over a static cache."""
    found = [getattr(layer, "cumulative_length", None) for layer in layers]
    return [length for length in found if isinstance(length, torch.Tensor)]


def set_count(cache: Any, tokens: int) -> None:
    """Sets what Python counts of the cache."""
    for layer in cache.layers:
        if hasattr(layer, COUNT):
            setattr(layer, COUNT, tokens)


def full_windows(cache: Any) -> List[Any]:
    """The layers of a cache whose sliding windows are full."""
    sliding = [layer for layer in cache.layers if hasattr(layer, COUNT)]
    return [layer for layer in sliding if getattr(layer, COUNT) >= layer.max_cache_len]


def slides(cache: Any, slots: int) -> bool:
    """True if a layer's window becomes full: a round of several tokens then fills it in another
    way than one token does."""
    return any(getattr(layer, "max_cache_len", slots) < slots for layer in cache.layers)


def is_empty(cache: Any) -> bool:
    """True if no token is in the cache."""
    for layer in cache.layers:
        if getattr(layer, "is_initialized", False):
            return False
        if any(getattr(layer, "has_previous_state", {}).values()):
            return False
    return True


def why_not_cache(cache: Any) -> Optional[str]:
    """Reason why a step on the cache cannot be captured, or None."""
    if not is_of(cache, "StaticCache"):
        return f"its cache is a {type(cache).__name__}, not a StaticCache"
    if cache.offloading:
        return "its cache is offloaded"
    for layer in cache.layers:
        if not is_of(layer, *LAYERS):
            return f"its cache has a layer that is a {type(layer).__name__}"
        if getattr(layer, "record_past", False):
            return "its cache records the past"
    return None


def takes_back(cache: Any) -> bool:
    """True if tokens can be taken back from a static cache: it has attention, which knows the
    length, and recurrent states in layers of their own."""
    others = [layer for layer in cache.layers if "Linear" in type(layer).__name__]
    known = all(is_of(layer, LINEAR) and layer.number_of_states == 1 for layer in others)
    return known and bool(lengths_of(cache.layers))


def why_not_yet(cache: Any) -> Optional[str]:
    """Reason if state that the first step creates does not exist yet, or None."""
    for layer in cache.layers:
        made = getattr(layer, "is_initialized", True)
        if not made or not all(getattr(layer, "has_previous_state", {}).values()):
            return "no prompt went through its cache"
    return None
