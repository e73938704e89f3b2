"""Compiled kernels, and the final functions with which several versions of Triton start them."""

import copy
import functools
import inspect
from typing import Any, Callable, Optional, Tuple

import torch
from triton.runtime import driver

ROCM = torch.version.hip is not None


def last_step(run, grid: tuple, code: tuple, arguments: tuple) -> Optional[tuple]:
    """Finds the function that Triton's launcher ends in, without launching anything.

    Returns (function, its arguments between the stream and the kernel's, whether it takes the
    kernel's as one tuple), or None if this Triton launches in another way or allocates memory at
    each launch.
    """
    taken: list = []
    try:
        watched = copy.copy(run)
        last, watched.launch = run.launch, lambda *step: taken.extend(step)
        watched(*grid, 0, *code, *arguments)
    except AttributeError:
        return None
    packed = bool(taken) and isinstance(taken[-1], tuple) and taken[-1] == arguments
    place = len(taken) - (1 if packed else len(arguments))
    middle = tuple(taken[4:place])
    given = taken[-1] if packed else tuple(taken[place:])
    if tuple(taken[:4]) != (*grid, 0) or given != arguments:
        return None
    return None if any(hasattr(x, "data_ptr") for x in middle) else (last, middle, packed)


def _encoded(wrap, kind: str, meta, base: int, packed: bool, descriptor) -> list:
    """The values that Triton's wrapper of a final function passes on in place of one descriptor."""
    taken: list = []
    step = wrap(lambda *given: taken.extend(given), {0: kind}, [meta])
    step(*(0,) * base, (descriptor,) if packed else descriptor)
    return list(taken[-1]) if packed else taken[base:]


class Code:
    """A compiled kernel and the functions that start it without Triton's binder.

    run: Triton's launcher, which takes grid, stream, `fixed` and the arguments, with descriptors.
    step: the function that `run` ends in, which takes grid, stream, `middle` and the arguments,
    with `encoders` applied to descriptors; None if it was not found.
    """

    __slots__ = (
        "kernel", "compiled", "run", "fixed", "stream_of", "step", "middle", "packed", "encoders",
    )  # fmt: skip

    def __init__(self, kernel, compiled, grid: tuple, arguments: tuple):
        self.kernel, self.compiled, self.run = kernel, compiled, compiled.run
        self.fixed = (compiled.function, compiled.packed_metadata, None, None, None)
        self.stream_of: Callable = driver.active.get_current_stream
        self.step: Any = None
        self.middle: tuple = ()
        self.packed = False
        self.encoders: Tuple[tuple, ...] = ()
        sizes = [getattr(compiled.metadata, f"{x}_scratch_size", 0) for x in ("global", "profile")]
        found = None if any(sizes) else last_step(self.run, grid, self.fixed, arguments)
        if found is None:
            return
        step, middle, self.packed = found
        try:
            step = self._without_encoding(step, 4 + len(middle))
        except (AttributeError, ImportError, KeyError, TypeError):
            return
        self.step, self.middle = step, middle

    def _without_encoding(self, step: Callable, base: int) -> Callable:
        """Returns the function behind the one that encodes descriptors, if any, and sets the
        encoders."""
        kinds = [str(s) for s in self.compiled.src.signature.values()]
        kinds = [kind for kind in kinds if kind.startswith("tensordesc")]
        if not kinds:
            return step
        from triton.backends.nvidia.driver import wrap_handle_tensordesc as wrap

        metas = self.compiled.metadata.tensordesc_meta
        if not metas:
            raise KeyError("descriptors without tensor maps")
        # `base` arguments stand before the kernel's own
        self.encoders = tuple(
            (functools.partial(_encoded, wrap, kind, meta, base, self.packed), f"{kind} {meta}")
            for kind, meta in zip(kinds, metas)
        )
        return inspect.getclosurevars(step).nonlocals["launcher"]
