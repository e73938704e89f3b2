"""Forwards of Gated DeltaNet layers that are served: one of ours (gdn.py), by the names that a
class has for what it is given and for what it reads."""

import functools
from typing import Callable, Dict, FrozenSet, NamedTuple, Optional, Tuple

import torch

from .forward import Arguments, forward_by
from .pinned import Pinned, holds
from .plain import PLAIN_TENSORS

CACHE_NAMES = ("cache", "cache_params", "past_key_values")  # of a layer's argument


class Known(NamedTuple):
    """The properties that identify the forward of a class."""

    pinned: Pinned  # what a patch could replace
    own: FrozenSet[str]  # keywords that it does not know, or takes for others


KNOWN: Dict[type, Known] = {}  # by the classes whose modules are served


class GdnForm(NamedTuple):
    """A class of transformers' Gated DeltaNet layers that one of ours computes the same."""

    ours: type
    kind: type
    arguments: Arguments
    cache: Optional[str]  # the names of its arguments
    mask: Optional[str]
    guards: Tuple[Tuple[str, object], ...]  # attributes on which its forward depends, not ours
    view: Tuple[Tuple[str, Optional[str], object], ...]  # (our attribute, its own, or else a value)


@functools.cache
def _own_class(kind: type, ours: type) -> Optional[type]:
    """Returns the class whose forward stands behind ours in a class that is served."""
    for base in kind.__mro__:
        members = vars(base)
        if "served_as" in members:
            return base.__bases__[1]
        if members.get("forward", ours.forward) is not ours.forward:
            return base
    return None


@functools.lru_cache(maxsize=1024)
def forward_of(form: GdnForm) -> Callable:
    """The forward of a layer of ours for the modules of a class, with their names for what it is
    given and for what it reads: those are properties of the class that is served."""
    ours, guards, cache, mask = form.ours, form.guards, form.cache, form.mask

    def serve(self, x, given, rest):
        if not isinstance(x, torch.Tensor) or x.ndim != 3:
            return None
        if guards and not holds(self, guards):
            return None
        return ours.forward(self, x, given.get(cache), given.get(mask), **rest)

    forward = forward_by(form, serve, ours.__name__, compiled=True)
    forward.view = {n: value if own is None else _named(own) for n, own, value in form.view}
    return forward


def _named(own: str) -> property:
    return property(lambda layer: getattr(layer, own))  # torch.compile traces no attrgetter


@torch.compiler.assume_constant_result  # at the trace
def _is_patched(kind: type, ours: type) -> bool:
    """True if something of the class behind one that is served was patched since kernelize."""
    known = KNOWN.get(_own_class(kind, ours))
    return known is not None and not known.pinned.unchanged()


def patch_of(layer, ours: type, kwargs: dict) -> Optional[Callable]:
    """The forward of the layer's own class, if that or what it calls was patched since kernelize,
    if it knows one of the keywords by another name, or if the layer's weights are sharded in this
    call.

    A patch of a class or a module of transformers is meant to count.
    """
    if torch.compiler.is_compiling():
        kind = type(layer)
        if not hasattr(kind, "served_as"):
            return None
        known = [KNOWN[base].pinned for base in kind.__mro__ if base in KNOWN]
        same = all([pinned.unchanged_of(layer, ()) for pinned in known])
        return None if same and not _is_patched(kind, ours) else kind.forward
    own = _own_class(type(layer), ours)
    plain = type(layer.A_log) in PLAIN_TENSORS and type(layer.conv1d.weight) in PLAIN_TENSORS
    known = KNOWN.get(own)
    same = known is None or known.own.isdisjoint(kwargs) and known.pinned.unchanged(layer)
    if plain and same:
        return None
    if kwargs.get("cp_context") is not None:
        raise ValueError("cp_context must not be given to a layer that is patched or sharded")
    return own.forward
