"""Tensor maps: how the copy engine sees a tensor. A map is encoded once for each address.

Triton encodes a map of each tensor descriptor at every launch: about 3 us each, and a prefill has
eleven, or eighteen where it is cut. Models call with the same addresses again and again, so a `Map`
keeps what it encoded by address. Nothing is kept alive, and nothing that is kept can be wrong: the
map of an address, sizes and strides is the same whatever lies there.
"""

from typing import Callable, Sequence, Union

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .cache import Bound

LIMIT = 64  # addresses kept by one Map: half a KB each
BOUND = Bound(32768)  # by all of them


class Place:
    """Where something lies inside a tensor, for launches: all that they ask of a tensor."""

    __slots__ = ("data_ptr", "dtype")

    def __init__(self, at: int, dtype: torch.dtype):
        self.data_ptr, self.dtype = at.__int__, dtype  # the quickest function that returns it


class Descriptor(TensorDescriptor):
    """A tensor descriptor whose checks `supports_...` has made: they cost 8 us a call."""

    def __post_init__(self):
        pass


class Map:
    """Shape, strides and box of the tensors that a kernel moves by the copy engine.

    layout: of the box in shared memory, for Gluon's descriptors (runtime/gluon.py).
    """

    __slots__ = ("shape", "strides", "box", "layout", "kind", "kept", "__weakref__")

    def __init__(self, shape: Sequence, strides: Sequence, box: Sequence, *layout, kind=Descriptor):
        self.shape, self.strides, self.box = list(shape), list(strides), list(box)
        self.layout, self.kind = layout, kind
        self.kept: dict = {}

    def described(self, x: Union[torch.Tensor, Place]):
        """As Triton takes it."""
        return self.kind(x, self.shape, self.strides, self.box, *self.layout)

    def encoded(self, x: Union[torch.Tensor, Place], encode: Callable, tag: str) -> list:
        """As Triton's launcher takes it in the end; `tag` says how `encode` encodes."""
        key = (x.data_ptr(), tag)
        found = self.kept.get(key)
        if found is None:
            BOUND.count_one(self)
            if len(self.kept) >= LIMIT:
                self.kept.clear()
            found = self.kept[key] = encode(self.described(x))
        return found

    def forget(self) -> None:
        self.kept.clear()
