"""Launching a compiled kernel again, without what Triton does for each call.

kernel[grid](...) looks at every argument to find the program that was compiled for such arguments,
which takes longer than decoding a token (docs/gdn_decode.md). Where a caller knows all that its
program depends on, it keeps a Program for it and calls that.
"""

from typing import Optional

import torch


class Program:
    """kernel[(size,)](*pointers, *numbers, **constants, **options) for any pointers of one kind.

    The dtypes of the pointers and which of them are None must be the same at each call, as must
    the current device. The kernel's parameters are in that order: pointers, numbers, constants.
    """

    __slots__ = ("kernel", "grid", "numbers", "constants", "options", "rest", "run")

    def __init__(self, kernel, size: int, numbers: tuple, constants: dict, options: dict):
        self.kernel, self.grid = kernel, (size, 1, 1)
        self.numbers, self.constants, self.options = numbers, constants, options
        self.rest = numbers + tuple(constants.values())
        self.run = None

    def __call__(self, *pointers: Optional[torch.Tensor]) -> None:
        addresses, bits = [], 0
        for x in pointers:
            address = None if x is None else x.data_ptr()
            addresses.append(address)
            bits |= address or 0
        if self.run is not None and bits % 16 == 0:
            self.run(*addresses, *self.rest)
            return
        compiled = self.kernel[self.grid](
            *pointers, *self.numbers, **self.constants, **self.options
        )
        # Triton assumes of a pointer what it saw of the first: that it is a multiple of 16, or not
        if compiled is not None and bits % 16 == 0:
            self.run = compiled[self.grid]
