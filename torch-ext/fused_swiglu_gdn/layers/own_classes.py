"""Classes and functions of transformers with their own code: whose authors they are, and what was
found about them, until that is patched."""

import sys
from types import FunctionType
from typing import Callable, Dict, List, Optional

import torch
from torch import nn

from .pinned import Pinned
from .pins import PACKAGES, Walk, is_of, pin_objects, why_unsteady


def wrapped_in(forward: object) -> List[object]:
    """All functions that a forward consists of: decorators and what they hold, outermost first."""
    found, left = [], [forward]
    while left:
        function = left.pop(0)
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if function in found:
            continue
        found.append(function)
        if not isinstance(function, FunctionType):
            inner = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
            left += [] if inner is None else [inner]
            continue
        # a decorator: __wrapped__ alone could say anything
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if isinstance(value, FunctionType) and name != "__class__":
                left.append(value)
    return found


class Code:
    """The forward, or another method, of a class that may be tried."""

    def __init__(self, walk: Walk):
        self.walk, method = walk, walk.method
        if walk.named:
            pin_objects(walk)
        self.pins: Pinned = walk.pins()
        space = next((s for s in walk.spaces if method in s), {})
        chain = [f for f in wrapped_in(space.get(method)) if isinstance(f, FunctionType)]
        inner = [f for f in chain if f.__code__.co_name == method]
        self.inner: Optional[FunctionType] = (inner or chain or [None])[-1]
        self.known: object = None  # what else follows from it: facts.py
        self.why: Optional[str] = (
            why_unsteady(walk) if walk.named else self.why_not_own(space.get(method))
        )

    def why_not_own(self, forward: object) -> Optional[str]:
        """Why the method is not transformers' own code, or None."""
        kind, walk = self.walk.kind, self.walk
        name = kind.__name__
        other = (
            f"{name} is no class of transformers: if you know what it computes, name it, "
            f"kernelize(model, trust=[{name}])"
        )
        if walk.patched is not None:
            return _patched(walk.patched)
        if walk.foreign is not None:
            home = kind.__module__.startswith("transformers.") and kind.__module__ in sys.modules
            return _patched(walk.foreign) if home else other
        for function in wrapped_in(forward):
            home = type(function).__module__ if not isinstance(function, FunctionType) else None
            if home and home.split(".")[0] not in (*PACKAGES, "functools"):
                return other
        if self.inner is None or not is_of(self.inner.__code__, "transformers"):
            return other
        return None


def _patched(what: str) -> str:
    if what == "forward":
        return "its forward is patched: it is not transformers' own"
    return f"its forward calls {what}, which is patched: it is not transformers' or torch's own"


class Answers:
    """Results of find(kind, code) for classes of transformers with their own code, or functions
    where code_of is code_of_function; None for any other, and where it raises. It is asked once,
    and again after a patch of that code."""

    def __init__(self, find: Callable, code_of: Optional[Callable] = None):
        self.find, self.code_of = find, code_of or code_of_class
        self.pins: Dict[type, Pinned] = {}
        self.found: Dict[type, object] = {}

    def of(self, kind: type) -> object:
        if torch.compiler.is_compiling():  # what is known is a constant; files cannot be read
            return self.found.get(kind)
        pins = self.pins.get(kind)
        if pins is None or not pins.unchanged():
            code = self.code_of(kind)
            self.pins[kind], self.found[kind] = code.pins, self._asked(kind, code)
        return self.found[kind]

    def _asked(self, kind: type, code: Code) -> object:
        if code.why is not None:
            return None
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                return self.find(kind, code)
            except Exception:  # whatever a class raises for small inputs
                return None


def code_of_class(kind: type) -> Code:
    """The code of a class's forward."""
    return Code(Walk(kind))


def code_of_function(function: FunctionType) -> Code:
    """The code of a function, with all that it calls by name."""
    return code_of_class(type("Function", (nn.Module,), {"forward": function}))
