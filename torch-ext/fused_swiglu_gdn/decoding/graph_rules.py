"""Conditions under which a CUDA graph of a decoding step would compute something else.

Each function returns the reason, or None if a graph may be used.
"""

from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import nn

from ..layers.plain import PLAIN_TENSORS, named_modules, told, torch_unpatched
from . import rehearsal
from .capture import Graph
from .watch import PLAIN
from .windows import why_not_windows

IDLE = ("transformers.utils.output_capturing", rehearsal.__name__)  # modules of hooks
CACHES = "transformers.cache_utils"
CACHE_NAMES = ("cache", "past_key_values")  # of a model's argument, newest releases first
PREPARE = "prepare_inputs_for_generation"
LINEAR = "LinearAttentionLayer"  # cache layers with a recurrent state
LAYERS = (
    "StaticLayer", "StaticSlidingWindowLayer", LINEAR, "DummyLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
)  # fmt: skip


def cache_among(given: dict) -> Tuple[Optional[str], Any]:
    """(name, cache) of the argument of a model that is its cache; both None without one."""
    found = ((name, given[name]) for name in CACHE_NAMES if given.get(name) is not None)
    return next(found, (None, None))


def why_not_model(model: nn.Module) -> Optional[str]:
    """Reason why a step of the model cannot be captured, or why a replay would omit something."""
    devices, kinds = set(), set()
    for name, module in named_modules(model):
        attributes = module.__dict__
        if "_hf_hook" in attributes:
            return f"{name or 'the model'} has an accelerate hook (offloading, or several devices)"
        if not all(map(_is_idle, _hooks(module))):
            return f"{name or 'the model'} has a hook, which a graph would not call"
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                devices.add(told(x, "device"))
                kinds.add(type(x))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    if getattr(model, "_tp_size", None) not in (None, 1):
        return "tensor parallel"
    if kinds - set(PLAIN_TENSORS):
        return f"its weights are {(kinds - set(PLAIN_TENSORS)).pop().__name__}s"
    if len(devices) != 1:
        return "it is on several devices" if devices else "it has no weights"
    if "dynamic" in _rope_types(model):
        return "its rope_type is dynamic, which reads positions on the host"
    return Graph.why_not(devices.pop())


def _hooks(module: nn.Module) -> List[Callable]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_idle(hook: Callable) -> bool:
    """True for transformers' hook, which records outputs on request, and for our hook that waits
    for a prompt."""
    return getattr(hook, "__module__", None) in IDLE


def _rope_types(model: nn.Module) -> set:
    found = set()
    for _, module in named_modules(model):
        kind = module.__dict__.get("rope_type")
        found |= set(kind.values()) if isinstance(kind, dict) else {kind}
    return found


def why_not_cache(cache: Any) -> Optional[str]:
    """Reason why a step on the cache cannot be captured, or None."""
    kind = type(cache)
    if (kind.__module__, kind.__name__) != (CACHES, "StaticCache"):
        return f"its cache is a {kind.__name__}, not a StaticCache"
    if cache.offloading:
        return "its cache is offloaded"
    for layer in cache.layers:
        kind = type(layer)
        if kind.__module__ != CACHES or kind.__name__ not in LAYERS:
            return f"its cache has a layer that is a {kind.__name__}"
        if getattr(layer, "record_past", False):
            return "its cache records the past"
    return None


def why_not_states(cache: Any) -> Optional[str]:
    """Reason why recurrent states of the cache are not in layers that are known, or None."""
    for layer in cache.layers:
        kind = type(layer).__name__
        if "Linear" in kind and (kind != LINEAR or layer.number_of_states != 1):
            return f"its cache has a layer that is a {kind}"
    return None


def why_not_yet(cache: Any) -> Optional[str]:
    """Reason if state that the first step creates does not exist yet, or None."""
    for layer in cache.layers:
        made = getattr(layer, "is_initialized", True)
        if not made or not all(getattr(layer, "has_previous_state", {}).values()):
            return "no prompt went through its cache"
    return None


# why single calls of a cache that has a graph are eager; not worth a word
PROMPT, GRADIENTS, AUTOCAST = "it is not one token", "gradients are on", "autocast is on"
WATCHED = "modules are patched, traced or captured by others"
PASSING = (PROMPT, GRADIENTS, AUTOCAST, WATCHED)


def why_eager(model: nn.Module, cache: Any, inputs: dict) -> Optional[str]:
    """Reason why this call must run eagerly, or None."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] != 1:
        return PROMPT
    reason = why_not_now(ids.device)
    if reason is None and model.training:
        return "the model is in training mode"
    return reason or _why_not_inputs(model, inputs) or why_not_windows(cache, inputs)


def why_not_now(device: torch.device) -> Optional[str]:
    """Reason why every call must run eagerly in torch's current modes, or None."""
    if torch.is_grad_enabled():
        return GRADIENTS
    if torch.is_autocast_enabled(device.type):
        return AUTOCAST
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return WATCHED if traced or Graph.busy() or not torch_unpatched() else None


def _why_not_inputs(model: nn.Module, inputs: dict) -> Optional[str]:
    for name in ("output_hidden_states", "output_attentions"):
        if inputs.get(name) or getattr(model.config, name, False):
            return f"{name} is asked for, which the next token would overwrite"
    if inputs.get("return_dict") is False:
        return "return_dict is False"
    for name, value in inputs.items():
        for x in value.values() if isinstance(value, dict) else (value,):
            if not (x is None or isinstance(x, torch.Tensor) or x.__class__ in PLAIN):
                return f"{name} is a {type(x).__name__}"
            if name == "attention_mask" and x is not None and x.ndim != 4:
                return f"attention_mask has {x.ndim} dimensions, not 4"
    return None
