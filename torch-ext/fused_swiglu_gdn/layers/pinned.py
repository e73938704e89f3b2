"""Pins what a module was recognised by, to detect later changes."""

from types import CodeType, FunctionType
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .own_code import NotOwn, codes_in, look_at_torch


class Pinned:
    """The functions of which a forward consists."""

    patched: Optional[str] = None  # what had been patched before

    def __init__(
        self,
        names: Tuple[Tuple[dict, str, object], ...],  # (namespace, name, value)
        codes: Tuple[Tuple[FunctionType, CodeType], ...],  # reloading tools replace codes
        methods: Tuple[str, ...] = (),  # that the forward calls of its module
    ):
        self.names, self.codes, self.methods = names, codes, methods

    def unchanged(
        self, module: Optional[nn.Module] = None, guards: Tuple[Tuple[str, object], ...] = ()
    ) -> bool:
        """True if none has been patched since, the module has no methods of its own, and its
        attributes at these paths still have the values by which it was recognised."""
        if module is not None:
            attributes = module.__dict__
            for name in self.methods:
                if name in attributes:
                    return False
            for path, value in guards:
                found = attributes[path] if path in attributes else found_at(module, path)
                if found is not value and found != value:
                    return False
        for namespace, name, value in self.names:
            if namespace.get(name) is not value:
                return False
        for function, code in self.codes:
            if function.__code__ is not code:
                return False
        return True


def torchs_own(function: FunctionType) -> Pinned:
    """Pins the names in a function's code that are found in its module and in torch.

    `patched` says which of torch's functions is replaced at present, if any.
    """
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
    """The attribute of a module at a path such as "config.use_rope", or None."""
    value = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
