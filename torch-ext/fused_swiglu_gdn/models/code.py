"""Signatures, and classes that find or call their parts in a way of their own."""

import inspect
from types import FunctionType, GetSetDescriptorType
from typing import Dict, Iterable, NamedTuple, Tuple

from torch import nn

from ..layers.pins import MACHINERY


class Signature(NamedTuple):
    """The arguments of a function beside its first one, in the order of its definition."""

    names: Tuple[str, ...]
    positional: Tuple[str, ...]
    positional_only: Tuple[str, ...]
    defaults: Dict[str, object]  # of those that have one
    several: bool  # it takes *args
    more: bool  # it takes **kwargs


def signature_of(function: FunctionType) -> Signature:
    """The signature of the function itself, whatever it wraps."""
    code, values = function.__code__, function.__defaults__ or ()
    count, known = code.co_argcount, code.co_varnames
    defaults = dict(zip(known[count - len(values) : count], values))
    defaults.update(function.__kwdefaults__ or {})
    return Signature(
        known[1 : count + code.co_kwonlyargcount],
        known[1:count],
        known[1 : code.co_posonlyargcount],
        defaults,
        bool(code.co_flags & inspect.CO_VARARGS),
        bool(code.co_flags & inspect.CO_VARKEYWORDS),
    )


class Refused(Exception):
    """A forward, or a module, is of no known form; the message says why. pins: those objects with
    which that is so, where it follows from them alone."""

    def __init__(self, why: str, pins: tuple = ()):
        super().__init__(why)
        self.pins = pins


def members_of(kind: type) -> dict:
    """A class's attributes as they stand there, found without running any code of the class."""
    found: dict = {}
    for base in reversed(kind.__mro__):
        found.update(base.__dict__)
    return found


def refuse_odd_class(kind: type, names: Iterable[str], *more: str) -> None:
    """Raises Refused if the class has some of MACHINERY, or `more` of it, of its own, or attributes
    that would hide those of a module by these names."""
    members, usual = members_of(kind), members_of(nn.Module)
    for name in (*more, *MACHINERY):
        found = members.get(name)
        of_python = name == "__dict__" and isinstance(found, GetSetDescriptorType)  # of a mixin
        if found is not usual.get(name) and not of_python:
            raise Refused(f"its class has a {name} of its own")
    for name in names:
        if members.get(name) is not None:
            raise Refused(f"its class has an attribute {name}")
