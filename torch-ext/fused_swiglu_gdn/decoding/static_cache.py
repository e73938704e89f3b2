"""A static cache for calls of generate that ask for no kind of cache.

A graph reads and writes a cache at fixed addresses, while the cache that transformers makes unless
it is asked for another grows with every token. Where the caller never sees the cache, and how long
the sequences may become is known, one of that length takes its place before the prompt.
"""

import sys
from typing import Any

import torch
from torch import nn

from .caches import CACHES, cache_among, is_empty, is_of, why_not_cache
from .capture import Graph
from .graph_rules import PREPARE, why_not_model, why_not_now

# what a call asks for, if it asks for a cache of its own or for what no replay gives
ASKED = (
    "cache_implementation", "is_assistant", "output_attentions", "output_hidden_states",
    "prefill_chunk_size", "return_dict_in_generate",
)  # fmt: skip
PAYS = 16  # new tokens: a graph is captured for each call of generate (graphs.py has the times)
# Over the slots of a static cache attention cannot be told to be causal, and a prompt takes longer.
# An estimate for an H200: 5 ms more a layer for 8192 tokens, and .3 ms a layer saved by a replay.
# At this limit, 8,192 tokens and 32 new ones, generate takes .64 of its eager time
# (generate_plain.json: Llama of 8 layers).
PAIRS = 2**21  # pairs of a prompt's tokens that a new token pays for
PART = 8  # of the device's memory, which the cache may take


class TooLong(Exception):
    """A prompt has put more tokens into a cache than it has ids."""


def with_static_cache(
    model: nn.Module, ids: torch.Tensor, config: Any, given: dict, more: int = 0
) -> dict:
    """Returns the arguments of generate's loop, a static cache among them for an empty dynamic one.

    They are returned as they are if the caller holds the cache or receives it, if tokens would not
    be replays, or if a graph would not pay.

    ids [B, T]: of the prompt. config: the GenerationConfig of the call. more: slots behind those of
    the longest text.
    """
    (name, cache), slots = cache_among(given), getattr(config, "max_length", None)
    if not is_of(cache, "DynamicCache") or not is_its_own(model, cache, given):
        return given
    if ids.ndim != 2 or type(slots) is not int or given.get("use_cache") is False:
        return given
    if model.training or any(getattr(config, each, None) for each in ASKED):
        return given
    (B, T), slots = ids.shape, slots + more
    new = slots - T
    if new < PAYS or B * T * T > new * PAIRS:
        return given
    if not getattr(model, "_can_compile_fullgraph", False) or why_not_now(ids.device) is not None:
        return given
    found = sys.modules[CACHES].StaticCache(config=model.config, max_cache_len=slots)
    if why_not_cache(found) is not None:
        return given
    if _bytes(model, found, B * slots) > Graph.memory(ids.device) / PART:
        return given
    changed = {**given, name: found}
    graphed = type(model)._valid_auto_compile_criteria(model, changed, config)
    return changed if graphed and why_not_model(model) is None else given


def is_its_own(model: nn.Module, cache: Any, given: dict) -> bool:
    """True if a cache is empty, made for this call of generate, and of a prompt of ids alone."""
    held = getattr(cache, "_is_user_defined", False) or getattr(cache, "offloading", False)
    # PEFT's method puts a trained prompt before that of the call
    odd = PREPARE in model.__dict__ or given.get("inputs_embeds") is not None
    return not held and not odd and is_empty(cache)


def check_length(cache: Any, tokens: int) -> None:
    """Raises TooLong if a prompt of so many tokens has filled another number of slots, as a model
    does that adds tokens of its own: the last ones would have none. The host waits for the
    answer."""
    if int(cache.get_seq_length()) != tokens:
        raise TooLong


def _bytes(model: nn.Module, cache: Any, slots: int) -> int:
    """Counts the bytes of keys and values for this many slots in all layers that have them.

    Latent attention keeps C latents and R rotary channels, and while a token runs the keys and
    values of all its heads in one layer (transformers' expand_kv, and its copy of the keys).
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = sum(hasattr(layer, "max_cache_len") for layer in cache.layers)
    numbers = 2 * layers * heads * dim
    C = getattr(config, "kv_lora_rank", None)
    if C:
        N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        numbers = layers * (C + R) + config.num_attention_heads * (2 * N + V + R)
    return numbers * slots * model.dtype.itemsize
