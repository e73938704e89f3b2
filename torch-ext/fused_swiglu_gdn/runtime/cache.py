"""Caches of plans from call to call, and bounds on their size.

A short call costs the host more than the GPU. A call that passed the checks and found its kernel
and launches keeps them for later calls with the same facts.
"""

import weakref
from operator import itemgetter
from typing import Any, Callable, Optional

import torch
import torch.autograd.forward_ad as forward_ad

from . import dispatch

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # another torch: nothing is kept
    TensorGuards = None

_grad_enabled = torch.is_grad_enabled
MOST, ALIKE = 1024, 16  # values of a CallCache; of one shape of the first tensor and its options


def keep(table: dict, key, value):
    """Stores a value under its key and returns it; a dict with MOST entries is emptied first."""
    if len(table) >= MOST:
        table.clear()
    table[key] = value
    return value


class Bound:
    """A limit on the total number of entries of many holders; at the limit all of them are emptied.

    A server meets new lengths all the time, each with a plan of its own, so a bound for each holder
    alone would not bound the sum.
    """

    def __init__(self, most: int):
        self.most, self.count = most, 0
        self.holders: weakref.WeakSet = weakref.WeakSet()

    def count_one(self, holder) -> None:
        """Counts an entry that the holder is about to add. A holder has a method forget()."""
        if self.count >= self.most:
            for each in list(self.holders):
                each.forget()
            self.count = 0
        self.count += 1
        self.holders.add(holder)


class _Repeated:
    """Guards for a call that passes one tensor object several times, which TensorGuards always
    reject."""

    def __init__(self, *tensors: torch.Tensor):
        self.firsts = self._firsts(tensors)
        self.guards = _guards(*[tensors[i] for i in sorted(set(self.firsts))])

    @staticmethod
    def _firsts(tensors) -> list:
        """For each tensor the first index at which the same object occurs."""
        return list(map(list(map(id, tensors)).index, map(id, tensors)))

    def check(self, *tensors) -> bool:
        if self._firsts(tensors) != self.firsts:
            return False
        return self.guards.check(*[tensors[i] for i in sorted(set(self.firsts))])


class _Varying:
    """Guards for a call of some tensors with one dimension each whose size is the same in all of
    them, at least 2, and may be another one in the next call.

    Strides of the dimensions before it may be others, too. dims: for each tensor the dimension, or
    None.
    """

    def __init__(self, tensors: tuple, dims: list):
        sizes, strides = [], []
        for x, dim in zip(tensors, dims):
            sizes.append([None if i == dim else n for i, n in enumerate(x.shape)])
            before = 0 if dim is None else dim
            strides.append([None if i < before else n for i, n in enumerate(x.stride())])
        self.guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        first, *self.others = [(i, dim) for i, dim in enumerate(dims) if dim is not None]
        self.place, self.dim = first

    def check(self, *tensors) -> bool:
        if not self.guards.check(*tensors):
            return False
        size = tensors[self.place].size(self.dim)
        for i, dim in self.others:
            if tensors[i].size(dim) != size:
                return False
        return size > 1


def _guards(*tensors: torch.Tensor, dims: Optional[list] = None):
    """Guards for a call like this one; dims: for each tensor the dimension that varies, or None."""
    repeated = len(set(map(id, tensors))) < len(tensors)
    if dims and not repeated:
        sizes = {x.shape[dim] for x, dim in zip(tensors, dims) if dim is not None}
        if len(sizes) == 1 and min(sizes) > 1:
            return _Varying(tensors, dims)
    if repeated:
        return _Repeated(*tensors)
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _picking(places: list) -> Callable[[tuple], tuple]:
    """Returns a function that picks these indices of a tuple, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1))


def _autocast_dtype(x: torch.Tensor) -> Optional[torch.dtype]:
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


class CallCache:
    """A cache of one value, such as a plan, for each set of facts of a call.

    Two calls match if they have as many tensors, the same ones None, the same facts of the others
    (type, sizes, strides, dtype, device, requires_grad, active modes of torch), equal options of
    equal types (1, 1.0 and True differ), the same grad mode and the same autocast dtype. torch's
    own guards compare the facts in a microsecond.

    varying: {index of a tensor, not the first: dimension}. The sizes of these dimensions, if all
    are the same and at least 2, are not among the facts, nor are strides of dimensions before them.
    alike: how many calls with the same shape of the first tensor and the same options are kept.
    """

    __slots__ = ("_rows", "_count", "_varying", "_alike")

    def __init__(self, varying: Optional[dict] = None, alike: int = ALIKE):
        self._rows: dict = {}
        self._count = 0
        self._varying, self._alike = varying, alike

    def find(self, tensors: tuple, options: tuple, public: bool = False) -> Any:
        """Returns the value kept for a matching call, or None.

        public: of a public call, for which fast_path_ok() must hold as well.
        """
        if public:  # fast_path_ok() without a call
            if dispatch.forced is not None or dispatch.records or forward_ad._current_level >= 0:
                return None
            if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
                return None
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
        """Stores a value for a call that find() missed, unless it is None, and returns it."""
        if value is None or TensorGuards is None:
            return value
        if self._count >= MOST:
            self.cache_clear()
        key = (len(tensors), tensors[0].shape, options, torch.is_grad_enabled())
        try:
            others = self._rows.get(key, ())
        except TypeError:  # an option that cannot be hashed
            return value
        absent = tuple([i for i, x in enumerate(tensors) if x is None])
        present = [i for i, x in enumerate(tensors) if x is not None]
        there, dims = _picking(present), self._varying and [*map(self._varying.get, present)]
        types, autocast = list(map(type, options)), _autocast_dtype(tensors[0])
        row = (absent, there, _guards(*there(tensors), dims=dims).check, types, autocast, value)
        self._rows[key] = [row, *others[: self._alike - 1]]
        self._count += len(others) < self._alike
        return value

    def cache_clear(self) -> None:
        self._rows.clear()
        self._count = 0

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))


def fast_path_ok() -> bool:
    """True if a cached plan may run a public call.

    That excludes tracing, recording, a forced implementation and modes that torch's guards do not
    see, such as FakeTensorMode and forward-mode derivatives.
    """
    if dispatch.forced is not None or dispatch.records:
        return False
    if forward_ad._current_level >= 0 or torch.compiler.is_dynamo_compiling():
        return False
    # an export that is not by dynamo traces in a mode
    return not torch._C._len_torch_dispatch_stack()
