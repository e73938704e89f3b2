"""Launching with tensor maps that have been encoded before.

Triton encodes a map of each tensor descriptor at every launch: about 3 us each, and a prefill has
eleven, or eighteen where it is cut. Models call with the same addresses again and again, so `Tiles`
keeps the maps by address. Nothing is kept alive, and nothing that is kept can be wrong: the map of
an address, sizes and strides is the same whatever lies there.
"""

import functools
import inspect
from typing import Any, Optional, Tuple

from triton.runtime import driver

from ..common.launch import Prepared, _last_step, address, prepare
from .gluon_compat import Descriptor

LIMIT = 512  # maps kept for one tensor


class Tiles:
    """The tensors that a kernel moves by the copy engine, and their maps, for calls of one kind."""

    __slots__ = ("how", "kept")

    def __init__(self, *how: tuple):
        """how: shape, strides, box and layout of each tensor."""
        self.how = how
        self.kept: Tuple[dict, ...] = tuple({} for _ in how)

    def described(self, tensors) -> list:
        """As Triton takes them."""
        return [Descriptor(x, *how) for x, how in zip(tensors, self.how)]

    def encoded(self, tensors, encode) -> list:
        """As Triton's launcher takes them in the end."""
        found: list = []
        for i, x in enumerate(tensors):
            kept, place = self.kept[i], x.data_ptr()
            mapped = kept.get(place)
            if mapped is None:
                if len(kept) >= LIMIT:
                    kept.clear()
                mapped = kept[place] = encode(i, Descriptor(x, *self.how[i]))
            found += mapped
        return found


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
            *grid, stream, *self.middle, *tiles.encoded(tensors, self._encode),
            *map(address, pointers), *numbers, *self.prepared.constexprs,
        )  # fmt: skip

    def _launch_as_usual(self, grid, descriptors: list, pointers: tuple, numbers: tuple) -> None:
        prepared = self.prepared
        prepared.launch(grid, *descriptors, *prepared.at(*pointers), *numbers)
        if self.index is None and prepared.run is not None:
            self.index = descriptors[0].base.device.index
            places = map(address, pointers)
            self._find((*descriptors, *places, *numbers, *prepared.constexprs), grid)

    def _find(self, arguments: tuple, grid) -> None:
        """Triton's last step, where this Triton has one as those before it."""
        compiled = self.prepared.compiled
        found = _last_step(self.prepared.run, grid, 0, self.prepared.code, arguments)
        try:
            from triton.backends.nvidia.driver import wrap_handle_tensordesc

            encoding, middle = found
            step = inspect.getclosurevars(encoding).nonlocals["launcher"]
            kinds = [s for s in compiled.src.signature.values() if str(s).startswith("tensordesc")]
            metas = compiled.metadata.tensordesc_meta
            base = 4 + len(middle)  # arguments before the kernel's own
            for kind, meta in zip(kinds, metas):
                taken: list = []  # filled anew by each call of the encoder
                keep = functools.partial(_keep, taken, base)
                self.encoders.append((wrap_handle_tensordesc(keep, {0: kind}, [meta]), taken, base))
        except (AttributeError, ImportError, KeyError, TypeError):
            return
        self.step, self.middle = step, middle

    def _encode(self, i: int, descriptor: Descriptor) -> list:
        encoder, taken, base = self.encoders[i]
        taken.clear()
        encoder(*(0,) * base, descriptor)
        return list(taken)


def _keep(taken: list, base: int, *step) -> None:
    taken += step[base:]


@functools.lru_cache(maxsize=4096)
def tiled(kernel, constexprs: tuple, options: tuple, *kind) -> TiledKernel:
    """The TiledKernel for calls of a kind, as common/launch.prepare has it."""
    return TiledKernel(prepare(kernel, constexprs, options, *kind))
