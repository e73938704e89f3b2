"""Recognises the LoRA modules of the peft package by the identity of their class."""

import functools
import sys
from typing import Optional

from torch import nn

from ..layers import lora
from ..layers.own_code import is_in_its_file
from .serving import own_class

# modules of PEFT, and their classes whose forward is base_layer(x) + scaling B(A(dropout(x)))
HOMES = {
    "peft.tuners.lora.layer": ("Linear",),
    "peft.tuners.lora.bnb": ("Linear4bit", "Linear8bitLt"),
}


@functools.cache
def _is_pefts(kind: type) -> bool:
    """True for one of these classes, with its forward as its file has it."""
    own = kind.__name__ in HOMES.get(kind.__module__, ())
    own = own and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return own and is_in_its_file(kind.__dict__.get("forward"), "peft")


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
    if dropouts is None or own_class(module).__module__ not in HOMES:
        return None
    drops = any([getattr(x, "p", 0.0) > 0 for x in dropouts._modules.values()])
    return "dropout by masks of its own (docs/training.md)" if drops else None
