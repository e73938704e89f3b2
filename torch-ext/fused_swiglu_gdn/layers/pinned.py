"""What was looked at when a module was recognised, and may be changed afterwards."""

from types import CodeType, FunctionType
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .own_code import NotOwn, codes_in, look_at_torch


class Pinned:
    """The functions that a forward consists of."""

    patched: Optional[str] = None  # what had been patched before

    def __init__(
        self,
        names: Tuple[Tuple[dict, str, object], ...],  # (namespace, name, value)
        codes: Tuple[Tuple[FunctionType, CodeType], ...],  # reloading tools replace codes
        methods: Tuple[str, ...] = (),  # that the forward calls of its module
    ):
        self.names, self.codes, self.methods = names, codes, methods

    def unchanged(self, module: Optional[nn.Module] = None) -> bool:
        """Nobody has patched them since, nor given this module methods of its own."""
        if module is not None:
            for name in self.methods:
                if name in module.__dict__:
                    return False
        for namespace, name, value in self.names:
            if namespace.get(name) is not value:
                return False
        for function, code in self.codes:
            if function.__code__ is not code:
                return False
        return True


def torchs_own(function: FunctionType) -> Pinned:
    """What a function finds in its module and in torch by the names in its code, as that is at
    present; `patched` says for which of torch's functions somebody else's stands, if any."""
    names = sorted({name for code in codes_in(function.__code__) for name in code.co_names})
    spaces = function.__globals__, vars(torch), vars(F)
    values = tuple(
        (space, name, space[name]) for space in spaces for name in names if name in space
    )
    pinned = Pinned(values, ((function, function.__code__),))
    for name in names:
        try:
            look_at_torch(name)
        except NotOwn as error:
            pinned.patched = f"its forward {error}"
            break
    return pinned


def found_at(module: nn.Module, path: str) -> object:
    """The attribute of a module at "config.use_rope"; None where there is none."""
    value = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def has_values(module: nn.Module, guards: Tuple[Tuple[str, object], ...]) -> bool:
    """The module's attributes are those by which it was recognised."""
    attributes = module.__dict__
    for path, value in guards:
        found = attributes[path] if path in attributes else found_at(module, path)
        if found is not value and found != value:
            return False
    return True
