"""Launching a Triton kernel whose compiled code is known already.

`kernel[grid](...)` looks at every argument to find the compiled code again, `compiled[grid](...)`
prepares for launch hooks: 34 us a launch of 19 arguments (H200 machine, 2026-11-21, Triton 3.6.0),
more than a decoding kernel runs. A `Prepared` keeps what the first launch found and calls the code
itself; Triton's launch hooks (its profiler Proton has some) see the first launch alone.
"""

import copy
import functools
from typing import Any, Optional, Tuple

import torch
from triton.runtime import driver


class Place:
    """Where something lies inside a tensor, for launches: all that they ask of a tensor."""

    __slots__ = ("at", "dtype")

    def __init__(self, at: int, dtype: torch.dtype):
        self.at, self.dtype = at, dtype

    def data_ptr(self) -> int:
        return self.at


def address(x: Optional[torch.Tensor]) -> Optional[int]:
    return None if x is None else x.data_ptr()


def specialized_on(x: Optional[torch.Tensor]):
    """What Triton compiles for of a pointer: its type, whether it is there and 16-byte aligned."""
    return None if x is None else (x.dtype, x.data_ptr() % 16 == 0)


def aligned(tensors) -> bool:
    """Whether all begin at a multiple of 16 bytes: what kernels are compiled for, of what the facts
    of a call do not tell."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    return bits % 16 == 0


def steps(x: torch.Tensor) -> tuple:
    """Strides of B, T and heads of x [B, T, heads, ..].

    0 for a batch of one, whose stride means nothing but would make a kind of its own for each T.
    """
    batch, token, head = x.stride()[:3]
    return (batch if x.shape[0] > 1 else 0, token, head)


class Prepared:
    """One kernel with its constexprs and options, for arguments of one kind."""

    __slots__ = ("kernel", "constexprs", "options", "compiled", "run", "code")

    def __init__(self, kernel, constexprs: tuple, options: tuple):
        self.kernel, self.constexprs, self.options = kernel, constexprs, dict(options)
        self.compiled: Any = None
        self.run: Any = None
        self.code: tuple = ()

    def launch(self, grid: Tuple[int, int, int], *args) -> None:
        if self.run is None:
            self.compiled = compiled = self.kernel[grid](*args, *self.constexprs, **self.options)
            if compiled is not None:  # the interpreter compiles nothing
                self.code = (compiled.function, compiled.packed_metadata, None, None, None)
                self.run = compiled.run
        else:
            active = driver.active
            stream = active.get_current_stream(active.get_current_device())
            self.run(*grid, stream, *self.code, *args, *self.constexprs)

    def at(self, *pointers: Optional[torch.Tensor]):
        """What to launch with for the pointers: once it is compiled their addresses, which spares
        Triton a call of the driver for each."""
        return pointers if self.run is None else map(address, pointers)

    def launch_at(self, grid: Tuple[int, int, int], pointers: tuple, *numbers) -> None:
        self.launch(grid, *self.at(*pointers), *numbers)


@functools.lru_cache(maxsize=4096)
def prepare(kernel, constexprs: tuple, options: tuple, *kind) -> Prepared:
    """The Prepared for calls of a kind: one for each set of values here.

    constexprs: the kernel's last arguments. options: ("num_warps", 4) and the like.
    kind: whatever else Triton compiles code for or a launch depends on: the device, dtypes, which
    optional arguments are None, which pointers are aligned to 16 bytes, integers that the kernel
    does not name in do_not_specialize.
    """
    return Prepared(kernel, constexprs, options)


def launch(kernel, size: int, pointers: tuple, strides: tuple, numbers: tuple, constexprs: tuple,
    num_warps: int,
) -> None:  # fmt: skip
    """The kernel with `size` programs, if there are any. Its parameters in their order: pointers,
    tuples of strides, numbers that it does not specialize on, constexprs."""
    if size == 0:
        return
    kind = (pointers[0].device, *map(specialized_on, pointers), strides)
    prepared = prepare(kernel, constexprs, (("num_warps", num_warps),), *kind)
    prepared.launch_at((size, 1, 1), pointers, *strides, *numbers)


def last_step(run, grid, stream, code, arguments: tuple) -> Optional[tuple]:
    """What Triton's launcher comes to: a function, and what that takes between the stream and the
    arguments; None where this Triton does it otherwise. Launches nothing."""
    taken: list = []
    try:
        watched = copy.copy(run)
        last, watched.launch = run.launch, lambda *step: taken.extend(step)
        watched(*grid, stream, *code, *arguments)
    except AttributeError:
        return None
    place = len(taken) - len(arguments)
    middle = tuple(taken[4:place])
    if tuple(taken[:4]) != (*grid, stream) or tuple(taken[place:]) != arguments:
        return None
    # no memory that was allocated for this launch
    plain = all(x is None or isinstance(x, (int, tuple)) for x in middle)
    return (last, middle) if plain else None


class Program:
    """A Prepared at one grid on one device, for any pointers of one kind: dtypes, which are None.

    The kernel's parameters are pointers, then numbers, then constexprs. The pointers are handed on
    as addresses, which spares Triton a call of the driver for each.
    """

    __slots__ = ("prepared", "grid", "numbers", "rest", "index", "only", "step", "middle")

    def __init__(
        self, kernel, size: int, numbers: tuple, constexprs: tuple, options: tuple, device
    ):
        self.prepared = Prepared(kernel, constexprs, options)
        self.grid, self.numbers, self.rest = (size, 1, 1), numbers, numbers + constexprs
        self.index = device.index
        self.only = device.type != "cuda" or torch.cuda.device_count() == 1
        self.step: Any = None
        self.middle: tuple = ()

    def __call__(self, *pointers: Optional[torch.Tensor]) -> None:
        if not self.only and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(*pointers)
        addresses = [None if x is None else x.data_ptr() for x in pointers]
        bits = 0
        for place in addresses:
            if place is not None:
                bits |= place
        if self.step is None or bits & 15:
            return self._first(pointers, addresses, bits)
        stream = driver.active.get_current_stream(self.index)
        self.step(*self.grid, stream, *self.middle, *addresses, *self.rest)

    def _first(self, pointers: tuple, addresses: list, bits: int) -> None:
        prepared = self.prepared
        if bits & 15:  # rare, and other code: Triton finds it
            prepared.kernel[self.grid](*pointers, *self.rest, **prepared.options)
            return
        prepared.launch(self.grid, *pointers, *self.numbers)
        if prepared.run is not None:
            arguments = (*addresses, *self.rest)
            found = last_step(prepared.run, self.grid, 0, prepared.code, arguments)
            self.step, self.middle = found or (prepared.run, prepared.code)
