"""Launches without Triton's binder.

The binder looks at every argument of every launch to find the compiled kernel: 20 us with 20
arguments, 60 us with tensor descriptors among them. Whoever can name in a short key all that a
kernel is specialized on (types, absent arguments, constexprs, the device, and the alignment of each
pointer that is specialized on it) need not pay for that twice.
"""


class Launcher:
    """launch(grid, key, args, **options) is kernel[grid](*args, **options)."""

    def __init__(self, kernel):
        self._kernel = kernel
        self._compiled = {}

    def __call__(self, grid: tuple, key: tuple, args: tuple, **options) -> None:
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*args, **options)
        else:
            compiled[grid](*args)
