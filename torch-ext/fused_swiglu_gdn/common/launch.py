"""Launching a Triton kernel whose compiled code is known already.

`kernel[grid](...)` looks at every argument to find the compiled code again, `compiled[grid](...)`
prepares for launch hooks: 34 us a launch of 19 arguments (H200 machine, 2026-11-21, Triton 3.6.0),
more than a decoding kernel runs. A `Prepared` keeps what the first launch found and calls the code
itself; Triton's launch hooks (its profiler Proton has some) see the first launch alone.
"""

import functools
from typing import Any, Optional, Tuple

import torch
from triton.runtime import driver


def specialized_on(x: Optional[torch.Tensor]):
    """What Triton compiles for of a pointer: its type, whether it is there and 16-byte aligned."""
    return None if x is None else (x.dtype, x.data_ptr() % 16 == 0)


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

    def launch_at(self, grid: Tuple[int, int, int], pointers: tuple, *numbers) -> None:
        """launch(grid, *pointers, *numbers), with addresses for the pointers once it is compiled:
        that spares Triton a call of the driver for each."""
        if self.run is not None:
            pointers = [None if x is None else x.data_ptr() for x in pointers]
        self.launch(grid, *pointers, *numbers)


@functools.lru_cache(maxsize=4096)
def prepare(kernel, constexprs: tuple, options: tuple, *kind) -> Prepared:
    """The Prepared for calls of a kind: one for each set of values here.

    constexprs: the kernel's last arguments. options: ("num_warps", 4) and the like.
    kind: whatever else Triton compiles code for or a launch depends on: the device, dtypes, which
    optional arguments are None, which pointers are aligned to 16 bytes, integers that the kernel
    does not name in do_not_specialize.
    """
    return Prepared(kernel, constexprs, options)


class Program:
    """A Prepared at one grid on one device, for any pointers of one kind: dtypes, which are None.

    The kernel's parameters are pointers, then numbers, then constexprs. The pointers are handed on
    as addresses, which spares Triton a call of the driver for each.
    """

    __slots__ = ("prepared", "grid", "numbers", "rest", "device")

    def __init__(
        self, kernel, size: int, numbers: tuple, constexprs: tuple, options: tuple, device
    ):
        self.prepared = Prepared(kernel, constexprs, options)
        self.grid, self.numbers, self.rest = (size, 1, 1), numbers, numbers + constexprs
        self.device = device.index

    def __call__(self, *pointers: Optional[torch.Tensor]) -> None:
        """Launches on the device, which is the current one."""
        addresses, bits = [], 0
        for x in pointers:
            address = None if x is None else x.data_ptr()
            addresses.append(address)
            bits |= address or 0
        prepared = self.prepared
        if bits % 16:  # rare, and other code: Triton finds it
            prepared.kernel[self.grid](*pointers, *self.rest, **prepared.options)
        elif prepared.run is None:
            prepared.launch(self.grid, *pointers, *self.numbers)
        else:
            stream = driver.active.get_current_stream(self.device)
            prepared.run(*self.grid, stream, *prepared.code, *addresses, *self.rest)
