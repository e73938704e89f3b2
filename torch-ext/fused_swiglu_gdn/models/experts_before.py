"""The implementation of experts before ours, for the calls that ours does not serve."""

import inspect
from typing import Callable, Dict, Optional

import torch
from torch import nn

from ..layers.own_code import cells_of
from .code import Refused
from .serving import say_once

BEFORE = "_experts_implementation_before"  # attribute of a module of experts that is served

_loops: Dict[type, Callable] = {}  # over the experts, as the classes have it


def loop_of(kind: type, table: object) -> Callable:
    """The class's own loop over its experts, for which transformers' table has other functions;
    raises Refused."""
    loop = kind.forward  # FP8Experts are decorated once more for each model that is loaded
    while getattr(loop, "__closure__", None) and cells_of(loop).get("experts_interface") is table:
        loop = cells_of(loop)["original_forward"]
    if loop is kind.forward:
        raise Refused("transformers does not choose the implementation of this class")
    _loops[kind] = loop
    return loop


def fall_back(
    self: nn.Module, table: dict, reason: Optional[str], *args: object, **named: object
) -> torch.Tensor:  # [T, H]
    """Computes a module of experts by the implementation that was chosen before ours, or by
    transformers' grouped_mm where that was ours. reason: what the user should know."""
    kind, name = type(self), self.__dict__.get(BEFORE) or "grouped_mm"
    # transformers' other functions refuse static scales
    loops = name == "eager" or getattr(self, "activation_scheme", None) == "static"
    if reason is not None and not torch.compiler.is_compiling():
        by = "own loop" if loops else name
        say_once(f"{kind.__name__} is computed by transformers' {by}: {reason}")
    forward = (_loops.get(kind) or inspect.unwrap(kind.forward)) if loops else table[name]
    return forward(self, *args, **named)
