"""A few tokens over a cache: the slots of a static one, and the function that attends to them,
torch's SDPA or a faster kernel."""

import functools
import sys
from types import BuiltinFunctionType
from typing import Callable, Optional

import torch
import torch.nn.functional as F

from ..attention import ops
from ..attention.api import attention_with_kvcache
from ..runtime import device, dispatch
from ..runtime.dtypes import HALF
from .plain import PLAIN_TENSORS

KERNEL = (ops.FAMILY, "kvcache_attention")
# with any of these SDPA does something else than attention by its mask
NOT_PLAIN = ("cache", "output_attentions", "position_bias", "softcap")


def decodes(function, q, k, v, mask, past, slots, words: dict, rest: dict) -> Optional[Callable]:
    """The attention to call for `function` over a cache, where that is SDPA of a few tokens by at
    most a mask and a kernel is faster; or None.

    Over a static cache SDPA reads all slots, filled or not. Over one that grows cuDNN's SDPA builds
    a plan for each new length, some 40 ms; that was measured on Hopper alone.
    """
    B, T, _, D = q.shape
    if past is None or q.dtype not in HALF or D > 256 or v.shape[-1] != D:
        return None
    if T > 1 and (B > 1 or slots is None or mask is None):
        return None
    if mask is not None and not (mask.ndim == 4 and mask.shape[1:3] == (1, T)):
        return None
    if words.get("dropout") or rest.get("dropout") or not by_torch(function, words, rest):
        return None
    forced = dispatch.forced is not None
    if slots is not None:
        serves = mask is not None and (forced or dispatch.has_kernels_at(*KERNEL, q.device))
    else:
        serves = _fits(q, k, v, mask) and (forced or _makes_plans(q.device))
    return (attention_with_kvcache if T == 1 else _few_attended) if serves else None


def _few_attended(q, k, v, length, *, attention_mask, softmax_scale) -> torch.Tensor:
    """attention_with_kvcache of several tokens of one sequence: rows of one token over the same
    keys and values."""
    B, T, HQ, D = q.shape
    k, v = k.expand(T, -1, -1, -1), v.expand(T, -1, -1, -1)
    q, mask = q.reshape(T, 1, HQ, D), attention_mask.transpose(0, 2)
    out = attention_with_kvcache(q, k, v, length, attention_mask=mask, softmax_scale=softmax_scale)
    return out.view(B, T, HQ, D)


def _fits(q, k, v, mask) -> bool:
    """True if attention_with_kvcache takes these keys and values of a cache, [B, HK, S, D]."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not (type(k) in PLAIN_TENSORS and type(v) in PLAIN_TENSORS):
        return False
    B, _, HQ, D = q.shape
    if not (k.ndim == 4 and k.shape == v.shape and k.shape[::3] == (B, D) and k.shape[2]):
        return False
    if not (k.dtype is v.dtype is q.dtype and k.device == v.device == q.device):
        return False
    if mask is not None and not (
        mask.shape[0] in (1, B) and mask.shape[3] == k.shape[2] and mask.device == q.device
    ):
        return False
    return k.stride(3) == v.stride(3) == 1 and HQ % k.shape[1] == 0


def _makes_plans(where: torch.device) -> bool:
    """True if torch's SDPA may be cuDNN's on a Hopper GPU."""
    return _on_hopper(where) and torch.backends.cuda.cudnn_sdp_enabled()


@functools.cache
def _on_hopper(where: torch.device) -> bool:
    hopper = where.type == "cuda" and device.capability(where.index) == (9, 0)
    return hopper and dispatch.has_kernels_at(*KERNEL, where)


def by_torch(function, words: dict, rest: dict) -> bool:
    """True if `function` is transformers' call of torch's own SDPA, and makes no more than that."""
    sdpa = sys.modules.get("transformers.integrations.sdpa_attention")
    if function is not getattr(sdpa, "sdpa_attention_forward", None):
        return False
    if not isinstance(F.scaled_dot_product_attention, BuiltinFunctionType):
        return False  # somebody's own stands in for torch's
    if words.get("s_aux") is not None or rest.get("s_aux") is not None:
        return False  # sinks
    return not any(map(words.get, NOT_PLAIN)) and not any(map(rest.get, NOT_PLAIN))


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
