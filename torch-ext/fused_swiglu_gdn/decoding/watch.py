"""Detects changes that invalidate a captured graph.

A replay runs no Python, so modules and cache layers must hold the same objects at the same
addresses as at the capture. `Watch` compares them in tens of microseconds, at every call.
"""

import gc
import sys
from collections import deque
from itertools import chain
from operator import itemgetter
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Iterable, List, Optional, Sequence, Set

import torch
from torch import nn

from ..layers.plain import named_modules
from ..layers.replay import HeldStates
from .caches import COUNT

PACKAGE = __name__.rsplit(".", 2)[0]
HOOK = f"{PACKAGE}.decoding.rehearsal"  # the key of its hook, which is in no pickle
PLAIN = (bool, int, float, str)
# transformers' tables of functions by name, by what they are called in the files of models
REGISTRIES = ("ALL_ATTENTION_FUNCTIONS", "ALL_EXPERTS_FUNCTIONS")

TORCHS = set(nn.Module().__dict__) - {"training"}  # attributes of every module
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
READ = ("_parameters", "_buffers", "_modules", *HOOKS)  # those that a call without gradients reads
LISTS = (list, set, deque)
CONTAINERS = (dict, *LISTS, tuple, frozenset)
MOST = 4096  # entries of a container that are compared; of a larger one their number is
# what has no attributes to look into, and packages whose objects a forward does not read
NO_ATTRIBUTES = (type(None), *PLAIN, torch.Tensor, torch.dtype, torch.device, type, FunctionType,
                 ModuleType)  # fmt: skip
OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "triton", "kernels", "accelerate",
          PACKAGE.partition(".")[0]}  # fmt: skip

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
    """The values of dicts, lists and sets, and the addresses of tensors among them.

    sized: those of them whose lengths are compared, too: else a value may move from the end of one
    to the beginning of the next.
    """

    def __init__(self, tables: List[dict], lists: Sequence = (), sized: Sequence = ()):
        self.walked = [t for t in tables if _is_walked(t)]
        self.others = [t for t in tables if not _is_walked(t)]
        self.tables, self.lists, self.sized = self.walked + self.others, lists, sized
        self.sizes = list(map(len, sized))
        self.values = self.values_now()
        self.tensors = [i for i, x in enumerate(self.values) if isinstance(x, torch.Tensor)]
        self.places: List[Optional[int]] = [None] * len(self.values)
        for i in self.tensors:
            self.places[i] = self.values[i].data_ptr()

    def values_now(self) -> list:
        # the collector's walk takes a quarter of the time that a view of each dict does
        found = gc.get_referents(*self.walked, *self.lists)
        return found + list(_values(map(dict.values, self.others)))

    def holds(self) -> bool:
        """True if all objects are the same or equal, and tensors have the same addresses."""
        now = self.values_now()
        try:
            if now != self.values or list(map(len, self.sized)) != self.sizes:
                return False
        except (RuntimeError, ValueError):  # another tensor in place of one: no truth value
            return False
        if _same_places is not None:
            return _same_places(now, self.places, self.tensors)
        return all([now[i].data_ptr() == self.places[i] for i in self.tensors])


def _is_empty(table: Any) -> bool:
    """True for an empty container, and for one that holds only rehearsal's hook.

    Rehearsal adds and removes that hook at prompts, also those of another thread.
    """
    return not table or len(table) == 1 and isinstance(table, dict) and HOOK in table


class Reached:
    """The containers that are reached from some values, at any depth, through containers, modules
    and attributes of plain objects.

    What cannot be looked into: __slots__, what functions close over, objects of Python's own
    library and of the packages of OTHERS.
    """

    def __init__(self, seen: Iterable[int]):
        self.seen = set(seen)  # ids of what is not to be looked into
        self.full: list = []  # containers with entries
        self.empty: list = []
        self.large: list = []
        self.modules: List[nn.Module] = []

    def add(self, values: Iterable[object]) -> None:
        left = [x for x in values if not isinstance(x, NO_ATTRIBUTES)]
        while left:
            x = left.pop()
            if id(x) in self.seen:
                continue
            self.seen.add(id(x))
            if isinstance(x, nn.Module):
                more = [m for _, m in named_modules(x) if m is x or id(m) not in self.seen]
                self.seen.update(map(id, more))
                self.modules += more
            elif isinstance(x, CONTAINERS):
                self._hold(x)
                if len(x) <= MOST:
                    inner = x.values() if isinstance(x, dict) else x
                    left += [y for y in inner if not isinstance(y, NO_ATTRIBUTES)]
            elif _has_attributes(x):
                self._hold(x.__dict__)
                left.append(x.__dict__)
                self.seen.discard(id(x.__dict__))

    def _hold(self, container: Any) -> None:
        if isinstance(container, (tuple, frozenset)):
            return  # they cannot change
        large = len(container) > MOST
        (self.large if large else self.empty if _is_empty(container) else self.full).append(
            container
        )


def _has_attributes(x: object) -> bool:
    """True for an object whose attributes may change what a forward computes."""
    kind = type(x)
    if kind is SimpleNamespace:
        return True
    root = kind.__module__.partition(".")[0]
    configures = kind.__name__ != "GenerationConfig"  # that is what generate reads
    return root not in OTHERS and configures and isinstance(getattr(x, "__dict__", None), dict)


def _inner(attributes: dict) -> List[dict]:
    """The dicts with entries among the attributes."""
    values = [x.states if isinstance(x, HeldStates) else x for x in attributes.values()]
    return [x for x in values if isinstance(x, dict) and not _is_empty(x)]


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
        self.modules = [module for _, module in named_modules(model)]
        self.own, self.held = [], []  # of modules: (function that reads what torch's have not, of)
        tables: List[dict] = []
        self.empty: list = []
        reached = Reached(map(id, self.modules))
        for module in self.modules:  # modules that only a container has are appended
            kind, attributes = type(module), module.__dict__
            reads_linear = kind is nn.Linear and "forward" not in attributes
            for name in ("_parameters", *HOOKS) if reads_linear else READ:
                table = attributes[name]
                (self.empty if _is_empty(table) else tables).append(table)
            if reads_linear:
                continue  # a call reads parameters and hooks alone
            names = [name for name in attributes if name not in TORCHS]
            self.own.append((itemgetter(*names), attributes))
            tensors = [n for n in names if isinstance(attributes[n], torch.Tensor)]
            self.held += [(attributes, n, attributes[n]) for n in tensors]
            reached.add([attributes[name] for name in names])
            self.modules += reached.modules
            reached.modules.clear()
        self.kinds = list(map(type, self.modules))
        self.all = [m.__dict__ for m in self.modules]
        self.sizes = list(map(len, self.all))
        self.code = Code(set(self.kinds))
        self.empty += reached.empty
        dicts = [x for x in reached.full if isinstance(x, dict)]
        lists = [x for x in reached.full if not isinstance(x, dict)]
        self.read = self._read()
        self.places = [x.data_ptr() for _, _, x in self.held]
        sized = reached.full + reached.large
        self.watch = Watch(tables + dicts + self.code.tables, lists, sized)
        self.plain = self._plain()

    def _read(self) -> list:
        return [read(attributes) for read, attributes in self.own]

    def holds(self) -> bool:
        if any(self.empty) and not all(map(_is_empty, self.empty)):
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
        self.full_then = self.full()

    def full(self) -> List[bool]:
        """Flags of the sliding layers: one that is full computes something else."""
        return [table[COUNT] >= table["max_cache_len"] for table, _ in self.counting]

    def windows_hold(self) -> bool:
        """True if the same sliding layers are full."""
        return self.full() == self.full_then

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
