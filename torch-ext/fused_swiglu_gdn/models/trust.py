"""Authors of a forward's code: transformers' own classes are tried (trial.py), any other where the
user has named it in kernelize(model, trust=[..]).

What people run is transformers' own code. Whether another call of any Python function might do
something else than those that were tried has no answer, so other people's code is not tried
unasked.
"""

import contextlib
import contextvars
import sys
from types import FunctionType
from typing import Dict, Iterator, Optional, Tuple

from torch import nn

from ..layers.pinned import Pins
from .code import Refused
from .pins import Walk, is_of, wrapped_in

PACKAGES = ("transformers", "torch", "kernels", "accelerate")
_named: contextvars.ContextVar = contextvars.ContextVar("named", default=())


@contextlib.contextmanager
def trusting(kinds: Tuple[type, ...]) -> Iterator[None]:
    """In this thread the user has named these classes."""
    token = _named.set(tuple(kinds))
    try:
        yield
    finally:
        _named.reset(token)


def is_named(kind: type) -> bool:
    return kind in _named.get()


class Code:
    """The forward, or another method, of a class that may be tried."""

    def __init__(
        self,
        kind: type,
        method: str = "forward",
        named: bool = False,
        ends: frozenset = frozenset(),
    ):
        self.walk = walk = Walk(kind, method, named, ends)
        self.pins: Pins = walk.pins()
        space = next((s for s in walk.spaces if method in s), {})
        chain = [f for f in wrapped_in(space.get(method)) if isinstance(f, FunctionType)]
        inner = [f for f in chain if f.__code__.co_name == method]
        self.inner: Optional[FunctionType] = (inner or chain or [None])[-1]
        self.known: object = None  # what else follows from it: facts.py
        self.why: Optional[str] = None if named else self.why_not_own(space.get(method))

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
            return _patched(walk.foreign) if _is_home(kind) else other
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


def _is_home(kind: type) -> bool:
    """The class stands in a module of transformers."""
    home = sys.modules.get(kind.__module__)
    return kind.__module__.startswith("transformers.") and home is not None


_codes: Dict[tuple, Code] = {}


def code_of(
    kind: type, method: str = "forward", named: Optional[bool] = None, ends: frozenset = frozenset()
) -> Code:
    """The method's code, if it may be tried; raises Refused. ends: functions that are not looked
    into (Walk)."""
    named = is_named(kind) if named is None else named
    known = _codes.get((kind, method, named, ends))
    if known is None or not known.pins.unchanged():
        if not issubclass(kind, nn.Module) or kind is nn.Module:
            raise Refused("its class has no forward")
        known = _codes[kind, method, named, ends] = Code(kind, method, named, ends)
    if known.why is not None:
        raise Refused(known.why, (known.pins,))
    return known
