"""Launching again what has been launched before.

For every launch Triton encodes a map of each tensor descriptor (3 us each with what it takes to
describe them, H200 machine, 2026-11-21, Triton 3.6.0) and builds the arguments of its launcher.
Models launch with the same addresses again and again, so a `Replay` keeps those arguments by all
that they depend on: the next launch is one call. Nothing is kept alive, and nothing that is kept
can be wrong: it holds addresses, and the map of an address, sizes and strides is the same whatever
lies there.
"""

import copy
import inspect
from typing import Any, Callable, Dict, List, Tuple

import torch
import triton

from .facts import Bound
from .launch import Prepared

LIMIT = 512  # launches kept by one Replay: 2 KB each
BOUND = Bound(8192)  # by all of them


def _keeping(compiled, kept: List[tuple]) -> Tuple[Any, Callable]:
    """Triton's launcher for one call, which leaves its last step's arguments in `kept`; that step.

    The same from Triton 3.5 to 3.9: `run.launch` is the last step, wrapped where there are
    descriptors in a function that replaces them with their maps.
    """
    run = copy.copy(compiled.run)
    last, has_descriptors = run.launch, inspect.isfunction(run.launch)
    if has_descriptors:
        last = inspect.getclosurevars(last).nonlocals["launcher"]

    def keep(*arguments):
        kept.append(arguments)
        last(*arguments)

    run.launch = keep
    if has_descriptors:
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        meta = compiled.metadata.tensordesc_meta
        run.launch = wrap_handle_tensordesc(keep, compiled.src.signature, meta)
    return run, last


class Replay:
    """A Prepared at one grid, whose launches are kept."""

    __slots__ = ("prepared", "grid", "index", "kept", "last", "keeps", "__weakref__")

    def __init__(self, prepared: Prepared, grid: Tuple[int, int, int], where: torch.device):
        self.prepared, self.grid, self.index = prepared, grid, where.index
        self.kept: Dict[tuple, tuple] = {}
        self.last: Any = None
        self.keeps = where.type == "cuda" and torch.version.hip is None

    def __call__(self, key: tuple, arguments: Callable[[], tuple]) -> None:
        """Launches with arguments(), which follow from `key` and from what this Replay is for.

        The device is current.
        """
        if not self.keeps or self.prepared.compiled is None:
            self.prepared.launch(self.grid, *arguments())
            return
        stream = triton.runtime.driver.active.get_current_stream(self.index)
        kept = self.kept.get((stream, key))
        if kept is not None:
            self.last(*kept)
        else:
            self._first((stream, key), arguments())

    def _first(self, key: tuple, arguments: tuple) -> None:
        prepared, found = self.prepared, []
        compiled = prepared.compiled
        try:
            if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
                raise AttributeError("memory that Triton allocates for each launch")
            run, self.last = _keeping(compiled, found)
        except (AttributeError, KeyError, ImportError):  # not how this Triton launches
            self.keeps = False
            prepared.launch(self.grid, *arguments)
            return
        # tensors would be kept alive
        arguments = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        run(*self.grid, key[0], *prepared.code, *arguments, *prepared.constexprs)
        BOUND.count_one(self)
        if len(self.kept) >= LIMIT:
            self.kept.clear()
        self.kept[key] = found[0]

    def forget(self) -> None:
        self.kept.clear()
