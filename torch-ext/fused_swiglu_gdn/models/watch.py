"""Detects changes that invalidate a captured graph.

A replay runs no Python, so modules and cache layers must hold the same objects at the same
addresses as at the capture. `Watch` compares them in tens of microseconds, at every call.
"""

import gc
import sys
from itertools import chain
from operator import itemgetter
from typing import Any, List, Optional, Sequence, Set

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..layers.replay import HeldStates
from .serving import HOOK

PLAIN = (bool, int, float, str)
COUNT = "cumulative_length_int"  # of a sliding layer: the tokens in it, which Python counts
# transformers' tables of functions by name, by what they are called in the files of models
REGISTRIES = ("ALL_ATTENTION_FUNCTIONS", "ALL_EXPERTS_FUNCTIONS")

TORCHS = set(nn.Module().__dict__) - {"training"}  # attributes of every module

_values = chain.from_iterable
# torch's own comparison of many addresses, in builds for CUDA; 10 ns a tensor
_same_places = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def _is_walked(table: dict) -> bool:
    """True if the garbage collector visits exactly the values of the dict, in order.

    That fails if a key is not a string, or if the object itself holds its attributes (Python 3.13).
    """
    found = gc.get_referents(table)
    return bool(found) and list(map(id, found)) == list(map(id, table.values()))


class Watch:
    """The values of dicts and lists, and the addresses of tensors among them."""

    def __init__(self, tables: List[dict], lists: Sequence[list] = ()):
        self.walked = [t for t in tables if _is_walked(t)]
        self.others = [t for t in tables if not _is_walked(t)]
        self.tables, self.lists = self.walked + self.others, lists
        self.values = self.values_now()
        self.members = list(map(tuple, lists))
        self.tensors = [i for i, x in enumerate(self.values) if isinstance(x, torch.Tensor)]
        self.places: List[Optional[int]] = [None] * len(self.values)
        for i in self.tensors:
            self.places[i] = self.values[i].data_ptr()

    def values_now(self) -> list:
        # the collector's walk takes a quarter of the time that a view of each dict does
        return gc.get_referents(*self.walked) + list(_values(map(dict.values, self.others)))

    def holds(self) -> bool:
        """True if all objects are the same or equal, and tensors have the same addresses."""
        now = self.values_now()
        try:
            if now != self.values or list(map(tuple, self.lists)) != self.members:
                return False
        except (RuntimeError, ValueError):  # another tensor in place of one: no truth value
            return False
        if _same_places is not None:
            return _same_places(now, self.places, self.tensors)
        return all(now[i].data_ptr() == self.places[i] for i in self.tensors)


def _inner(attributes: dict) -> List[dict]:
    """The non-empty dicts among the attributes, without dicts that hold only rehearsal's hook.

    Rehearsal adds and removes that hook at prompts, also those of another thread.
    """
    values = [x.states if isinstance(x, HeldStates) else x for x in attributes.values()]
    return [x for x in values if isinstance(x, dict) and x and list(x) != [HOOK]]


class Code:
    """The functions that modules of some classes run.

    These are functions of the classes, of the files that define them, without torch's, and those
    that transformers looks up by name.
    """

    def __init__(self, kinds: Set[type]):
        bases = set(chain.from_iterable(kind.__mro__ for kind in kinds)) - {nn.Module}
        bases = [x for x in bases if x in kinds or "forward" in vars(x) or "__call__" in vars(x)]
        self.tables = [gc.get_referents(vars(base))[0] for base in bases]  # behind their proxies
        files = {base.__module__ for base in bases if not base.__module__.startswith("torch.")}
        self.read = []  # (function that reads a file's functions, of, what it read)
        for file in [vars(sys.modules[name]) for name in files if name in sys.modules]:
            names = [n for n, x in file.items() if callable(x) and not isinstance(x, type)]
            if names:  # a script's variables change all the time
                read = itemgetter(*names)
                self.read.append((read, file, read(file)))
            for registry in filter(None, map(file.get, REGISTRIES)):
                self.tables += [registry._local_mapping, registry._global_mapping]

    def holds(self) -> bool:
        try:
            return all([read(file) == before for read, file, before in self.read])
        except KeyError:
            return False


class ModelWatch:
    """The parameters, modules, attributes, classes and hooks of a model and its configurations."""

    def __init__(self, model: nn.Module):
        self.modules = list(model.modules())
        self.kinds = list(map(type, self.modules))
        self.code = Code(set(self.kinds))
        self.all = [m.__dict__ for m in self.modules]
        self.sizes = list(map(len, self.all))
        self.hooks = RemovableHandle.next_id  # it grows with every hook that is registered
        configs = {id(m.config): m.config for m in self.modules if "config" in m.__dict__}
        tables = [config.__dict__ for config in configs.values() if hasattr(config, "__dict__")]
        tables += self.code.tables
        lists: List[list] = []
        self.own, self.held = [], []  # of modules: (function that reads what torch's have not, of)
        for kind, attributes in zip(self.kinds, self.all):
            tables += _inner(attributes)
            if kind is nn.Linear and "forward" not in attributes:
                continue  # a call reads parameters and hooks alone
            lists += [x for x in attributes.values() if isinstance(x, list)]
            names = [name for name in attributes if name not in TORCHS]
            self.own.append((itemgetter(*names), attributes))
            tensors = [n for n in names if isinstance(attributes[n], torch.Tensor)]
            self.held += [(attributes, n, attributes[n]) for n in tensors]
        self.read = self._read()
        self.places = [x.data_ptr() for _, _, x in self.held]
        self.watch = Watch(tables, lists)
        self.plain = self._plain()

    def _read(self) -> list:
        return [read(attributes) for read, attributes in self.own]

    def holds(self) -> bool:
        if self.hooks != RemovableHandle.next_id:
            return False
        if list(map(type, self.modules)) != self.kinds or list(map(len, self.all)) != self.sizes:
            return False
        if not self.code.holds():
            return False
        # equal is not the same to tensors
        if any([attributes.get(name) is not x for attributes, name, x in self.held]):
            return False
        if [x.data_ptr() for _, _, x in self.held] != self.places:
            return False
        try:
            return self._read() == self.read and self.watch.holds()
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or a tensor has come
            return False

    def _plain(self) -> list:
        values = chain(self.watch.values_now(), *[a.values() for _, a in self.own])
        return [x for x in values if x.__class__ in PLAIN]

    def counts_on(self) -> bool:
        """True if some number or flag has changed."""
        return self._plain() != self.plain


class CacheWatch:
    """The layers of a static cache: their tensors, and their state in Python."""

    def __init__(self, cache: Any):
        self.layers = list(cache.layers)
        attributes = [layer.__dict__ for layer in self.layers]
        self.watch = Watch([t for x in attributes for t in (x, *_inner(x))])
        self.counting = []  # a layer's attributes, and where its count stands among the values
        before = 0
        for table in self.watch.tables:
            if COUNT in table:
                self.counting.append((table, before + list(table).index(COUNT)))
            before += len(table)

    def is_full(self) -> bool:
        """True if a sliding layer is full, after which it computes something else."""
        return any([table[COUNT] >= table["max_cache_len"] for table, _ in self.counting])

    def holds(self, cache: Any) -> bool:
        if cache.layers != self.layers:
            return False
        for attributes, place in self.counting:  # a count is no change: steps and reset() set it
            self.watch.values[place] = attributes[COUNT]
        return self.watch.holds()

    def advance(self) -> None:
        """Advances the counts as Python does in a step."""
        for attributes, _ in self.counting:
            attributes[COUNT] += 1

    def counts(self) -> List[int]:
        return [attributes[COUNT] for attributes, _ in self.counting]

    def set_counts(self, counts: List[int]) -> None:
        for (attributes, _), count in zip(self.counting, counts):
            attributes[COUNT] = count
