"""Replacements of a model's own methods, which live in its __dict__."""

import weakref
from types import MethodType

from torch import nn


class InPlace:
    """Replaces a method of a model.

    A copy of a model gets a replacement of its own; a pickle of a model has the model's own method.
    """

    name = ""  # of the method

    def __init__(self, model: nn.Module):
        self.of = weakref.ref(model)

    @property
    def model(self) -> nn.Module:
        model = self.of()
        if model is None:
            raise RuntimeError(
                "the model is gone: keep it, and call kernelize(copy, cuda_graphs=True) for a copy"
            )
        return model

    def __deepcopy__(self, memo):
        model = memo.get(id(self.of()))
        return self if model is None else type(self)(model)

    def __reduce__(self):
        return getattr, (self.model, self.name)


def take_back(module: nn.Module, kind: type) -> bool:
    """Restores a module's own method if a replacement of this kind is set on it, or what a pickle
    has in its place; returns whether it was a replacement."""
    value, own = module.__dict__.get(kind.name), getattr(type(module), kind.name, None)
    found = isinstance(value, kind)
    if found or isinstance(value, MethodType) and value == MethodType(own, module):
        delattr(module, kind.name)
    return found
