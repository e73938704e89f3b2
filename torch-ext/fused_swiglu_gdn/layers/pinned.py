"""What was looked at when a module was recognised, and may be changed afterwards."""

from types import CodeType, FunctionType
from typing import Optional, Tuple

from torch import nn


class Pinned:
    """The functions that a forward consists of."""

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
