"""Launching with tensor maps that have been encoded before.

Triton encodes a map of each tensor descriptor at every launch: about 3 us each, and a prefill has
eleven, or eighteen where it is cut. Models call with the same addresses again and again, so `Tiles`
keeps the maps by address. Nothing is kept alive, and nothing that is kept can be wrong: the map of
an address, sizes and strides is the same whatever lies there.
"""

import functools
import inspect
from typing import Any, Optional, Tuple

import torch
from triton.runtime import driver

from .facts import Bound
from .gluon import Descriptor
from .launch import Prepared, address, last_step, prepare

LIMIT = 64  # maps kept for one tensor: half a KB each
BOUND = Bound(32768)  # for all


class Tiles:
    """The tensors that a kernel moves by the copy engine, and their maps, for calls of one kind."""

    __slots__ = ("how", "kept", "latest", "__weakref__")

    def __init__(self, *how: tuple):
        """how: shape, strides, box and layout of each tensor."""
        self.how = how
        self.kept: Tuple[dict, ...] = tuple({} for _ in how)
        self.latest: tuple = ([], [])  # addresses and what encoded() gave for them

    def described(self, tensors) -> list:
        """As Triton takes them."""
        return [Descriptor(x, *how) for x, how in zip(tensors, self.how)]

    def encoded(self, tensors, encoders) -> list:
        """As Triton's launcher takes them in the end."""
        places = [x.data_ptr() for x in tensors]
        before, found = self.latest
        if places == before:
            return found
        found = []
        for i, place in enumerate(places):
            kept = self.kept[i]
            mapped = kept.get(place)
            if mapped is None:
                BOUND.count_one(self)
                if len(kept) >= LIMIT:
                    kept.clear()
                mapped = kept[place] = encoders[i](Descriptor(tensors[i], *self.how[i]))
            found += mapped
        self.latest = (places, found)
        return found

    def forget(self) -> None:
        for kept in self.kept:
            kept.clear()


class TiledKernel:
    """A Prepared whose first parameters are descriptors, then pointers, numbers, constexprs."""

    __slots__ = ("prepared", "index", "step", "middle", "encoders")

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        self.index: Optional[int] = None  # of the device, once it has been launched
        self.step: Any = None  # Triton's own last one, behind the encoding
        self.middle: tuple = ()
        self.encoders: list = []

    def launch(self, grid, tiles: Tiles, tensors, pointers: tuple, *numbers) -> None:
        """The device is current. pointers: tensors or None."""
        if self.step is None:
            self._launch_as_usual(grid, tiles.described(tensors), pointers, numbers)
            return
        stream = driver.active.get_current_stream(self.index)
        self.step(
            *grid, stream, *self.middle, *tiles.encoded(tensors, self.encoders),
            *map(address, pointers), *numbers, *self.prepared.constexprs,
        )  # fmt: skip

    def _launch_as_usual(self, grid, descriptors: list, pointers: tuple, numbers: tuple) -> None:
        prepared = self.prepared
        prepared.launch(grid, *descriptors, *prepared.at(*pointers), *numbers)
        if self.index is None and prepared.run is not None:
            self.index = torch.cuda.current_device()
            places = map(address, pointers)
            self._find((*descriptors, *places, *numbers, *prepared.constexprs), grid)

    def _find(self, arguments: tuple, grid) -> None:
        """Triton's last step, where this Triton has one as those before it."""
        compiled = self.prepared.compiled
        found = last_step(self.prepared.run, grid, 0, self.prepared.code, arguments)
        try:
            from triton.backends.nvidia.driver import wrap_handle_tensordesc

            encoding, middle = found
            kinds = [s for s in compiled.src.signature.values() if str(s).startswith("tensordesc")]
            metas = compiled.metadata.tensordesc_meta
            step = encoding
            if kinds:
                step = inspect.getclosurevars(encoding).nonlocals["launcher"]
            base = 4 + len(middle)  # arguments before the kernel's own
            self.encoders = [
                functools.partial(_encoded, wrap_handle_tensordesc, kind, meta, base)
                for kind, meta in zip(kinds, metas or ())
            ]
        except (AttributeError, ImportError, KeyError, TypeError):
            return
        self.step, self.middle = step, middle


def _encoded(wrap, kind: str, meta, base: int, descriptor: Descriptor) -> list:
    """What Triton's wrapper of a last step with one descriptor hands on in its place."""
    taken: list = []
    wrap(lambda *step: taken.extend(step[base:]), {0: kind}, [meta])(*(0,) * base, descriptor)
    return taken


@functools.lru_cache(maxsize=4096)
def tiled(kernel, constexprs: tuple, options: tuple, *kind) -> TiledKernel:
    """The TiledKernel for calls of a kind, as runtime/launch.prepare has it."""
    return TiledKernel(prepare(kernel, constexprs, options, *kind))
