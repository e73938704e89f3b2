"""State that code of a class which a user has named reads, besides its arguments and its module."""

from types import CodeType, FunctionType, ModuleType
from typing import Iterator, Optional, Tuple

import torch
from torch import nn

from .pinned import ABSENT
from .pins import OTHERS, OWN, Walk, is_of, names_in

# modules whose answers change by themselves, or with what other threads do
CHANGE = {"datetime", "gc", "inspect", "os", "random", "sys", "threading", "time"}
KNOWN = (ModuleType, FunctionType, nn.Module, torch.Tensor)
LOOK_UP = {"__dict__", "eval", "exec", "globals", "locals", "vars"}


def _named_in(walk: Walk) -> Iterator[Tuple[CodeType, dict]]:
    """Code objects that are not of transformers or torch, each with the globals of its function."""
    for function in walk.walked:
        if not is_of(function.__code__, *OWN, *OTHERS):
            yield function.__code__, function.__globals__


def why_unsteady(walk: Walk) -> Optional[str]:
    """A reason why no trial says what the next call computes, or None."""
    for code, space in _named_in(walk):
        names = names_in(code)
        for name in sorted(names & LOOK_UP):
            return f"its forward looks names up by {name}"
        for name in sorted(names.intersection(space)):
            home = _home(space[name])
            if home in CHANGE:
                return f"its forward asks {home}, whose answers may change from call to call"
    return None


def _home(value: object) -> str:
    """The module that a value is, or of which it is."""
    if isinstance(value, ModuleType):
        return value.__name__
    return str(getattr(value, "__module__", None) or type(value).__module__)


def pin_objects(walk: Walk) -> None:
    """Pins attributes of classes and other objects among the globals, also those that only their
    class has."""
    for code, space in _named_in(walk):
        names, seen = names_in(code), set()
        left = [space[name] for name in sorted(names.intersection(space))]
        for value in left:  # appended to while iterating
            if id(value) in seen or isinstance(value, KNOWN):
                continue
            seen.add(id(value))
            kind = value if isinstance(value, type) else type(value)
            if kind.__module__.split(".")[0] in (*OWN, *OTHERS, "builtins"):
                continue
            spaces = list(map(vars, kind.__mro__[:-1]))
            if kind is not value and hasattr(value, "__dict__"):
                spaces.insert(0, vars(value))
            for name in sorted(names.intersection(set().union(*spaces))):
                for inside in spaces:  # what is set later in one hides those behind it
                    walk.pin(inside, name, inside.get(name, ABSENT))
                    left.append(inside.get(name))
