"""Tensor maps, which describe tensors to TMA, encoded once for each address.

Triton encodes a map of each tensor descriptor at every launch: about 3 us each, and a prefill has
eleven, or eighteen where it is cut. Models call with the same addresses again and again, so a `Map`
keeps the encoded maps by address. It keeps no tensor alive, and no entry can be stale: the map of
an address, sizes and strides does not depend on what is stored there.
"""

from typing import Callable, Sequence, Union

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .cache import Bound

LIMIT = 256  # addresses kept by one Map, more than the layers of a model: half a KB each
BOUND = Bound(32768)  # by all of them


class RawPointer:
    """A raw device address and a dtype: all that a launch needs of a tensor."""

    __slots__ = ("data_ptr", "dtype")

    def __init__(self, at: int, dtype: torch.dtype):
        self.data_ptr, self.dtype = at.__int__, dtype  # the quickest function that returns it


class Descriptor(TensorDescriptor):
    """A tensor descriptor without its checks, which cost 8 us a call; `supports_...` has made
    them."""

    def __post_init__(self):
        pass


class Map:
    """Shape, strides and box of tensors that a kernel moves by TMA.

    layout: of the box in shared memory, for Gluon's descriptors (runtime/gluon.py).
    """

    __slots__ = ("shape", "strides", "box", "layout", "kind", "kept", "__weakref__")

    def __init__(self, shape: Sequence, strides: Sequence, box: Sequence, *layout, kind=Descriptor):
        self.shape, self.strides, self.box = list(shape), list(strides), list(box)
        self.layout, self.kind = layout, kind
        self.kept: dict = {}

    def described(self, x: Union[torch.Tensor, RawPointer]):
        """The descriptor of x, as Triton takes it."""
        return self.kind(x, self.shape, self.strides, self.box, *self.layout)

    def encoded(self, x: Union[torch.Tensor, RawPointer], encode: Callable, tag: str) -> list:
        """The encoded map of x, as Triton's launcher takes it; `tag` identifies `encode`."""
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
