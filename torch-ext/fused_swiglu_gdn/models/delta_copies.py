"""Copies of a class, and of the functions that its forward consists of, by which a trial runs a
layer of a delta rule: in place of kernels they find transformers' own functions in torch."""

import inspect
from types import CellType, FunctionType
from typing import Callable, Dict, NamedTuple

import torch
from torch import nn

from ..layers.own_code import peeled, undispatched
from ..layers.pins import names_in
from .facts import Facts


class Packing(NamedTuple):
    """The keywords with lengths, or an index, of packed sequences that functions of a layer get."""

    of_rule: str
    of_convolution: str


class Copies:
    """`kind` and `forward`: the copies of a class and of its forward."""

    def __init__(self, kind: type, facts: Facts, packing: Packing):
        self.made: dict = {}
        self.packing = packing
        self.own = set(facts.functions)
        self.classes: Dict[type, type] = {}
        for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
            self.classes[base] = self.copied(base)
        self.kind, self.forward = self.classes[kind], self.function(facts.forward)

    def copied(self, base: type) -> type:
        hidden = ("__dict__", "__weakref__")
        members = {n: v for n, v in vars(base).items() if n not in hidden}
        bases = tuple(self.classes.get(each, each) for each in base.__bases__)
        made = type(base)(base.__name__, bases, members)
        self.classes[base] = made
        for name, value in members.items():
            static = isinstance(value, staticmethod)
            own = value.__func__ if static else value
            found = self.value(own)
            if found is not own:
                setattr(made, name, staticmethod(found) if static else found)
        return made

    def value(self, value: object) -> object:
        plain = undispatched(value)
        if plain is not value:
            return of_each(plain, self.packing)
        if not isinstance(value, FunctionType):
            return value
        inner = peeled(value).forward
        return self.function(inner) if inner in self.own else value

    def variable(self, value: object) -> object:
        """A free variable: of a decorator, what it is around."""
        if isinstance(value, FunctionType) and value in self.own:
            return self.function(value)
        return self.classes.get(value, value) if isinstance(value, type) else value

    def function(self, function: FunctionType) -> FunctionType:
        if function not in self.made:
            space, code = dict(function.__globals__), function.__code__
            cells = [CellType(self.variable(c.cell_contents)) for c in function.__closure__ or ()]
            made = FunctionType(code, space, function.__name__, function.__defaults__, tuple(cells))
            made.__kwdefaults__ = function.__kwdefaults__
            self.made[function] = made
            for name in names_in(code).intersection(space):
                space[name] = self.value(space[name])
        return self.made[function]


def of_each(function: FunctionType, packing: Packing) -> Callable:
    """A convolution of transformers, or its rule, which keep no packed sequences apart, for one
    after another."""
    known = inspect.signature(function).parameters
    first = next(iter(known))

    def computed(*args, **words):
        given = dict(zip(known, args))
        given.update({n: x for n, x in words.items() if n in known})
        x = given.get(first)
        rule = isinstance(x, torch.Tensor) and x.ndim == 4
        what = words.get(packing.of_rule if rule else packing.of_convolution)
        if what is None:
            return function(**given)
        with torch._C.DisableTorchFunction():
            lengths = (what.diff() if what.ndim == 1 else what[0].bincount()).tolist()
        dim, names = (1 if rule else -1), [first]
        if rule:
            names = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
        pieces = zip(*(given[n].split(lengths, dim) for n in names))
        found = [function(**{**given, **dict(zip(names, piece))}) for piece in pieces]
        return (torch.cat([x for x, _ in found], 1), None) if rule else torch.cat(found, -1)

    return computed
