"""Conditions under which a CUDA graph of a decoding step would compute something else.

Each function returns the reason, or None if a graph may be used.
"""

from typing import Any, Optional

import torch
from torch import nn

from ..layers.plain import PLAIN_TENSORS, named_modules, told, torch_unpatched
from . import rehearsal
from .capture import Graph
from .watch import PLAIN
from .windows import why_not_windows

# modules of hooks that do nothing in a replay: transformers' records outputs on request, ours wait
# for a prompt, and keep hidden states in the call of their own thread
IDLE = ("transformers.utils.output_capturing", rehearsal.__name__, f"{__package__}.reading")
PREPARE = "prepare_inputs_for_generation"


def why_not_model(model: nn.Module) -> Optional[str]:
    """Reason why a step of the model cannot be captured, or why a replay would omit something."""
    devices, kinds, ropes = set(), set(), set()
    for name, module in named_modules(model):
        attributes = module.__dict__
        if "_hf_hook" in attributes:
            return f"{name or 'the model'} has an accelerate hook (offloading, or several devices)"
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) not in IDLE:
                return f"{name or 'the model'} has a hook, which a graph would not call"
        rope = attributes.get("rope_type")
        ropes.update(rope.values() if isinstance(rope, dict) else [rope])
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
    if "dynamic" in ropes:
        return "its rope_type is dynamic, which reads positions on the host"
    return Graph.why_not(devices.pop())


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
