"""Authors of a forward's code: transformers' own classes are tried (trial.py), any other where the
user has named it in kernelize(model, trust=[..]).

What people run is transformers' own code. Whether another call of any Python function might do
something else than those that were tried has no answer, so other people's code is not tried
unasked.
"""

import contextlib
import contextvars
from typing import Dict, Iterator, Optional, Tuple

from torch import nn

from ..layers.own_classes import Code
from ..layers.pins import Walk
from .code import Refused

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
        known = _codes[kind, method, named, ends] = Code(Walk(kind, method, named, ends))
    if known.why is not None:
        raise Refused(known.why, (known.pins,))
    return known
