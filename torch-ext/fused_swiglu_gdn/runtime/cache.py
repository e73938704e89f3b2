"""What is remembered between calls, and bounds on it.

A short call costs the host more than the GPU. Whoever passed the checks, found a kernel and its
launches for a call need not do so again for calls like it.
"""

import weakref
from operator import itemgetter
from typing import Any, Callable, Optional

import torch
import torch.autograd.forward_ad as forward_ad

from . import dispatch

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # another torch
    TensorGuards = None

_grad_enabled = torch.is_grad_enabled
MOST, ALIKE = 1024, 16  # values of a CallCache; of one shape of the first tensor and its options


def keep(table: dict, key, value):
    """Adds a value under its key, and returns it; a dict that has grown large starts anew."""
    if len(table) >= MOST:
        table.clear()
    table[key] = value
    return value


class Bound:
    """A limit on what many holders keep together: past it all of them forget.

    A server meets ever new lengths, each with a plan of its own; what plans keep must not add up.
    """

    def __init__(self, most: int):
        self.most, self.count = most, 0
        self.holders: weakref.WeakSet = weakref.WeakSet()

    def count_one(self, holder) -> None:
        """The holder, which has a method forget(), is about to keep one thing more."""
        if self.count >= self.most:
            for each in list(self.holders):
                each.forget()
            self.count = 0
        self.count += 1
        self.holders.add(holder)


class _Facts:
    """What TensorGuards compares, but for modes of torch; where there are no TensorGuards."""

    def __init__(self, *tensors: torch.Tensor):
        self.facts = self._of(tensors)

    @staticmethod
    def _of(tensors) -> list:
        return [(type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors]

    def check(self, *tensors) -> bool:
        return all(isinstance(x, torch.Tensor) for x in tensors) and self.facts == self._of(tensors)


class _Repeated:
    """Guards for tensors of which some are the same object, which TensorGuards never let pass."""

    def __init__(self, *tensors: torch.Tensor):
        self.firsts = self._firsts(tensors)
        self.guards = _guards(*[tensors[i] for i in sorted(set(self.firsts))])

    @staticmethod
    def _firsts(tensors) -> list:
        """For each tensor the first place where it stands."""
        return list(map(list(map(id, tensors)).index, map(id, tensors)))

    def check(self, *tensors) -> bool:
        if self._firsts(tensors) != self.firsts:
            return False
        return self.guards.check(*[tensors[i] for i in sorted(set(self.firsts))])


def _guards(*tensors: torch.Tensor):
    if TensorGuards is None:
        return _Facts(*tensors)
    if len(set(map(id, tensors))) < len(tensors):
        return _Repeated(*tensors)
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _picking(places: list) -> Callable[[tuple], tuple]:
    """What lies at these places of a tuple, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1))


def _autocast_dtype(x: torch.Tensor) -> Optional[torch.dtype]:
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


class CallCache:
    """A value for each kind of call: a plan that serves it, or that its checks were passed.

    Calls are alike that have as many tensors, the same ones missing and the same facts of the
    others (type, sizes, strides, dtype, device, whether a gradient is needed, what modes of torch
    are on), equal options of equal types (1, 1.0 and True differ), the same grad mode and
    autocast's dtype. torch's own guards compare the facts in a microsecond.
    """

    __slots__ = ("_rows", "_count")

    def __init__(self):
        self._rows: dict = {}
        self._count = 0

    def find(self, tensors: tuple, options: tuple) -> Any:
        """The value of a call like this one, or None."""
        try:
            rows = self._rows[len(tensors), tensors[0].shape, options, _grad_enabled()]
            for absent, there, check, types, autocast, value in rows:
                for place in absent:
                    if tensors[place] is not None:
                        break
                else:  # 1, 1.0 and True are equal, but their types are not
                    if check(*there(tensors)) and types == list(map(type, options)):
                        if autocast is None or autocast is _autocast_dtype(tensors[0]):
                            return value
        except (AttributeError, KeyError, TypeError, RuntimeError):
            return None  # of a wrong type, or sparse: checks will say so
        return None

    def keep(self, tensors: tuple, options: tuple, value: Any) -> Any:
        """Keeps the value of a call that find() had none for, if it is not None; returns it."""
        if value is None:
            return None
        if self._count >= MOST:
            self.cache_clear()
        key = (len(tensors), tensors[0].shape, options, torch.is_grad_enabled())
        try:
            others = self._rows.get(key, ())
        except TypeError:  # an option that cannot be hashed
            return value
        absent = tuple([i for i, x in enumerate(tensors) if x is None])
        there = _picking([i for i, x in enumerate(tensors) if x is not None])
        types, autocast = list(map(type, options)), _autocast_dtype(tensors[0])
        row = (absent, there, _guards(*there(tensors)).check, types, autocast, value)
        self._rows[key] = [row, *others[: ALIKE - 1]]
        self._count += 1
        return value

    def get(self, make: Callable, tensors: tuple, options: tuple) -> Any:
        """The value of a call like this one, or else make(*tensors, *options), which is kept."""
        value = self.find(tensors, options)
        return self.keep(tensors, options, make(*tensors, *options)) if value is None else value

    def cache_clear(self) -> None:
        self._rows.clear()
        self._count = 0

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))


def undisturbed() -> bool:
    """Whether a plan may serve a public call: nothing is traced, recorded or forced, and torch has
    no modes that its guards do not see, as FakeTensorMode or forward derivatives."""
    if dispatch.forced is not None or dispatch.records or TensorGuards is None:
        return False
    if forward_ad._current_level >= 0:
        return False
    return not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
