"""The slots of a static cache that an update changes."""

import sys

import torch

from .plain import PLAIN_TENSORS


def slots_of(cache, index: int, k: torch.Tensor):
    """The layer of a static cache if an update with k changes its slots alone, or None."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or type(cache) not in (caches.Cache, caches.StaticCache):
        return None
    if not is_transformers_own(caches, cache, caches.StaticLayer) or torch.is_grad_enabled():
        return None
    if cache.layer_class_to_replicate is not None:
        return None
    layer = cache.layers[index] if index < len(cache.layers) else None
    if (
        type(layer) is not caches.StaticLayer
        or not layer.is_initialized
        or "update" in layer.__dict__
    ):
        return None
    keys, length = layer.keys, layer.cumulative_length
    if type(keys) not in PLAIN_TENSORS or keys.dtype is not k.dtype or keys.device != k.device:
        return None
    fits = keys.shape[0] == k.shape[0] and keys.shape[1] == k.shape[2] and length.device == k.device
    return layer if fits and k.shape[1] <= keys.shape[2] else None


def is_transformers_own(caches, cache, kind: type) -> bool:
    """True if updates of a cache are transformers' own, neither patched nor wrapped, and so are
    those of layers of this kind; nor is the cache offloaded."""
    for update in (type(cache).update, kind.update):
        code = getattr(update, "__code__", None)
        if getattr(code, "co_filename", None) != caches.__file__ or hasattr(update, "__wrapped__"):
            return False
    return "update" not in cache.__dict__ and not cache.offloading
