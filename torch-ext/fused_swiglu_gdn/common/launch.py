"""Launching a Triton kernel whose compiled code is known already.

`kernel[grid](...)` looks at every argument to find the compiled code again: 34 us a launch with 19
arguments, 60 us with tensor descriptors among them (H200 machine, 2026-11-21, Triton 3.6.0), more
than a decoding kernel runs. A `Prepared` keeps what the first launch found.
"""

import functools
from typing import Any, Optional, Tuple

import torch


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

    __slots__ = ("kernel", "constexprs", "options", "compiled")

    def __init__(self, kernel, constexprs: tuple, options: tuple):
        self.kernel, self.constexprs, self.options = kernel, constexprs, dict(options)
        self.compiled: Any = None

    def launch(self, grid: Tuple[int, int, int], *args) -> None:
        if self.compiled is None:  # the interpreter compiles nothing and leaves it so
            self.compiled = self.kernel[grid](*args, *self.constexprs, **self.options)
        else:
            self.compiled[grid](*args, *self.constexprs)

    def launch_at(self, grid: Tuple[int, int, int], pointers: tuple, *numbers) -> None:
        """launch(grid, *pointers, *numbers), with addresses for the pointers once it is compiled:
        that spares Triton a call of the driver for each."""
        if self.compiled is not None:
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
    """A Prepared at one grid, for any pointers of one kind: dtypes, and which of them are None.

    The kernel's parameters are pointers, then numbers, then constexprs. The pointers are handed on
    as addresses, which spares Triton a call of the driver for each.
    """

    __slots__ = ("prepared", "grid", "numbers", "rest", "run")

    def __init__(self, kernel, size: int, numbers: tuple, constexprs: tuple, options: tuple):
        self.prepared = Prepared(kernel, constexprs, options)
        self.grid, self.numbers, self.rest = (size, 1, 1), numbers, numbers + constexprs
        self.run: Any = None

    def __call__(self, *pointers: Optional[torch.Tensor]) -> None:
        addresses, bits = [], 0
        for x in pointers:
            address = None if x is None else x.data_ptr()
            addresses.append(address)
            bits |= address or 0
        if bits % 16:  # rare, and other code: Triton finds it
            prepared = self.prepared
            prepared.kernel[self.grid](*pointers, *self.rest, **prepared.options)
        elif self.run is None:
            self.prepared.launch(self.grid, *pointers, *self.numbers)
            if self.prepared.compiled is not None:
                self.run = self.prepared.compiled[self.grid]
        else:
            self.run(*addresses, *self.rest)
