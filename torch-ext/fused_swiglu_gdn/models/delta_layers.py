"""Conditions on Gated DeltaNet and Kimi Delta Attention layers before a trial: on their
classes, their convolution and their vectors."""

from typing import Dict, Optional

import torch
from torch import nn

from ..gdn_layer.checks import MAX_TAPS
from ..layers.own_code import peeled
from ..layers.pinned import found_at
from ..layers.plain import why_not_tensor
from .code import Refused, refuse_odd_class
from .facts import Facts


def is_depthwise(part: nn.Module) -> bool:
    return isinstance(part, nn.Conv1d) and part.groups == part.in_channels == part.out_channels


def index_among(values: dict) -> str:
    """The attribute that is a layer's index in the cache, by its name: the trial tries it."""
    numbers = [name for name, value in values.items() if type(value) is int and "idx" in name]
    return "layer_idx" if "layer_idx" in numbers or not numbers else numbers[0]


def refuse_hooks(kind: type, conv: str) -> None:
    """Raises Refused for a forward whose decorators call hooks of other parts than the convolution,
    whose weight ours reads."""
    hooked = sorted(peeled(kind.forward).hooked - {conv})
    if hooked:
        raise Refused(f"its forward calls hooks of {', '.join(hooked)}")


def refuse_reads(module: nn.Module, kind: type, facts: Facts, *more: str) -> None:
    """Raises Refused for a forward that reads what no guard can compare, or whose class is odd."""
    known = {*module._modules, *module._parameters, "training"}
    for path in sorted(facts.reads.difference(facts.values)):
        name = path.split(".")[0]
        if name not in known and (found_at(module, path) is not None or not hasattr(module, name)):
            raise Refused(f"its forward reads {path}")
    refuse_odd_class(kind, [*module._modules, *module._parameters], *more)


def why_not_plain(name: str, conv: nn.Module, vectors: Dict[str, torch.Tensor]) -> Optional[str]:
    """Why kernels cannot read the convolution of this name or the vectors, or None."""
    tensors = {**vectors, f"{name}.weight": conv.weight, f"{name}.bias": conv.bias}
    for label, x in tensors.items():
        reason = why_not_tensor(x)
        if reason is not None:
            return f"{label} {reason}"
    taps = conv.weight.shape[-1]
    if type(conv) is not nn.Conv1d or conv.weight.shape[1:] != (1, taps):
        return f"{name} is not a depthwise nn.Conv1d of {taps} taps"
    if not 2 <= taps <= MAX_TAPS:
        return f"its convolution has {taps} taps"
    return None
