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
def is_lora(kind: type) -> bool:
    """True for one of these classes, with its forward as its file has it."""
    own = kind.__name__ in HOMES.get(kind.__module__, ())
    own = own and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return own and is_in_its_file(kind.__dict__.get("forward"), "peft")


def lora_linear(module: nn.Module) -> tuple:
    """(layer, reason why it is left alone or None, form) of a module that is_lora."""
    if getattr(module, "fan_in_fan_out", False):
        return lora.LAYER, "its weight is transposed (fan_in_fan_out)", None
    return lora.LAYER, None, own_class(module)


def note_of(module: nn.Module) -> Optional[str]:
    """The remark about a served module, or None."""
    dropouts = module._modules.get("lora_dropout")
    if dropouts is None or not is_lora(own_class(module)):
        return None
    drops = any([getattr(x, "p", 0.0) > 0 for x in dropouts._modules.values()])
    return "dropout by masks of its own (docs/training.md)" if drops else None
