"""Recognises the LoRA modules of the peft package by the identity of their class."""

import functools
import sys
from typing import Optional

from torch import nn

from ..layers import lora
from ..layers.own_code import is_in_its_file
from .serving import own_class

HOME = "peft.tuners.lora.layer"


@functools.cache
def _is_pefts(kind: type) -> bool:
    """True for PEFT's Linear, with its forward as its file has it."""
    module = sys.modules.get(HOME)
    own = getattr(module, "Linear", None)
    return kind is own and is_in_its_file(kind.__dict__.get("forward"), "peft")


def is_lora(kind: type) -> bool:
    """True if a class may be one of PEFT's LoRA modules around a linear layer."""
    return kind.__module__.startswith("peft.tuners.lora.") and kind.__name__.startswith("Linear")


def lora_linear(module: nn.Module) -> Optional[tuple]:
    """(layer, reason why it is left alone or None, form) of a module with adapters, else None."""
    own = own_class(module)
    if not _is_pefts(own):
        return None
    if getattr(module, "fan_in_fan_out", False):
        return lora.LAYER, "its weight is transposed (fan_in_fan_out)", None
    return lora.LAYER, None, own


def note_of(module: nn.Module) -> Optional[str]:
    """The remark about a served module, or None."""
    dropouts = module._modules.get("lora_dropout")
    if own_class(module).__module__ != HOME or dropouts is None:
        return None
    drops = any([getattr(x, "p", 0.0) > 0 for x in dropouts._modules.values()])
    return "dropout by masks of its own (docs/training.md)" if drops else None
