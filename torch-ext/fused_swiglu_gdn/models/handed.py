"""Stubs of what attention hands its tensors to, a cache and the registry of attention functions,
and probe modules whose attributes are stubs."""

import contextlib
import sys
import threading
from typing import Dict

import torch
from torch import nn

from ..layers.pinned import found_at
from .opaque import Opaque, name_of
from .stand_ins import random


class Cache(Opaque):
    """An argument whose update returns other tensors of twice the length."""

    def __init__(self, name: str):
        self.__dict__.update(opaque_name=name, calls=[])

    def again(self) -> "Cache":
        return Cache(name_of(self))

    def update(self, *args, **more):
        k, v, index, *rest = (*args, *map(more.pop, UPDATED[len(args) :]))
        # copies: what follows may write to them
        for values, places in ((rest, range(len(rest))), (more, list(more))):
            for at in places:
                if type(values[at]) is dict:
                    values[at] = dict(values[at])
        self.calls.append((k, v, index, rest, more))
        return torch.cat([k * 0.5, k], -2), torch.cat([v * 0.25, v], -2)


class Store(Opaque):
    """An argument under whose keys keys and values are stored, and found."""

    def __init__(self, name: str, *sizes):
        self.__dict__.update(opaque_name=name, sizes=sizes, calls=[], taken=False)

    def again(self) -> "Store":
        return Store(name_of(self), *self.__dict__["sizes"])

    def __setitem__(self, key, value):
        self.calls.append((key, value))

    def __getitem__(self, key):
        B, D, dtype = self.__dict__["sizes"]
        found = tuple(random(B, 2, 6, D, seed=seed, dtype=dtype) for seed in (31, 32))
        self.calls.append((key, found))
        self.__dict__["taken"] = True
        return found


UPDATED = ("key_states", "value_states", "layer_idx")  # as caches call what they are updated with


class Interface:
    """Stub of the registry of attention functions, and of the function that it returns.

    Its calls are None in the log of the parts' calls.
    """

    def __init__(self, log: list):
        self.calls, self.asked, self.log = [], [], log

    def get_interface(self, attn_implementation, default):
        self.asked.append((attn_implementation, default))
        return self

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        B, H, T, _ = query.shape
        out = random(B, T, H, value.shape[-1], seed=11, dtype=query.dtype).clone()
        self.log.append(None)
        self.calls.append((module, query, key, value, attention_mask, kwargs, out))
        return out, "weights"


_registry = threading.Lock()


@contextlib.contextmanager
def asked_by_this_thread(trial):
    """Makes transformers' registry return the trial's current `interface` in this thread."""
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    me, attributes, kind = threading.get_ident(), registry.__dict__, type(registry)
    with _registry:
        kept, own = attributes.get("get_interface"), registry.get_interface
        item, has_item = kind.__getitem__, "__getitem__" in vars(kind)

        def get_interface(*args, **kwargs):
            mine = threading.get_ident() == me
            return (trial.interface.get_interface if mine else own)(*args, **kwargs)

        def element(self, name):
            mine = self is registry and threading.get_ident() == me
            return trial.interface.get_interface(name, None) if mine else item(self, name)

        attributes["get_interface"], kind.__getitem__ = get_interface, element
        try:
            yield
        finally:
            if has_item:
                kind.__getitem__ = item
            else:
                del kind.__getitem__
            del attributes["get_interface"]
            if kept is not None:
                attributes["get_interface"] = kept


class Watched:
    """An object with other values at some paths, which notes all others that it is asked for."""

    def __init__(self, owner: object, path: str, seen: set, values: Dict[str, object]):
        self.__dict__["watched"] = owner, path, seen, values

    def __getattr__(self, name: str):
        owner, path, seen, values = self.__dict__["watched"]
        path = f"{path}.{name}"
        if path in values:
            return values[path]
        seen.add(path)
        found = getattr(owner, name)
        plain = isinstance(found, (dict, list, tuple, set, torch.Tensor)) or callable(found)
        if plain or not hasattr(found, "__dict__"):
            return found
        return Watched(found, path, seen, values)


def attributes_of(module: nn.Module, paths, values: Dict[str, object], seen: set) -> dict:
    """Attributes of a probe module: these values by their paths; objects on the way to the paths
    note in `seen` what else they are asked for."""
    made: Dict[str, object] = {}
    for path in (*paths, *values):
        name, _, more = path.partition(".")
        if not more:
            if path in values:
                made[name] = values[path]
        elif name not in made:
            made[name] = Watched(module.__dict__[name], name, seen, values)
    return made


def readable(module: nn.Module, path: str) -> bool:
    """True if the module has an attribute at the path for which a check may substitute a value."""
    if path == "training" or path.split(".")[0] in (*module._modules, *module._buffers):
        return False
    return found_at(module, path) is not None
