"""Compiling by several threads, ahead of the launches.

Triton compiles a kernel where it is first launched, and the C code that launches it, one after
another: ten seconds for what a prompt needs.
"""

import collections
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator

from triton.runtime import driver

from .device import on
from .launch import Launch, watched
from .maps import Place

MOST_THREADS = 6  # more of them wait for each other in the part of Triton that is Python


@contextlib.contextmanager
def compiled_ahead() -> Iterator[None]:
    """Launches of this thread inside do not start, and what they would write is left as it is.
    Other threads compile their kernels; at the end all are compiled."""
    here, met = threading.get_ident(), set()
    # several kinds may have one code, which one thread is to compile: those that differ in numbers
    locks: dict = collections.defaultdict(threading.Lock)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:

        def take(launch: Launch, tensors: tuple) -> bool:
            if threading.get_ident() != here:
                return False
            if not met and launch.device.type == "cuda":
                driver.active.get_current_device()  # Triton's driver is made by one thread
            key = launch.key(tensors)
            if key not in met and 0 not in launch.grid:
                met.add(key)
                # no memory waits for the compiler
                places = [None if x is None else Place(x.data_ptr(), x.dtype) for x in tensors]
                alike = (id(launch.kernel), launch.constexprs, tuple(x is None for x in places))
                pool.submit(_compile, launch, places, locks[alike])
            return True

        with watched(take):
            yield


def _compile(launch: Launch, places: list, lock: threading.Lock) -> None:
    """As the first launch does; its code is then in Triton's memory. What cannot be compiled fails
    again where it is launched."""
    with lock, on(launch.device):
        options = dict(launch.options)
        code = launch.kernel.warmup(*launch.arguments(tuple(places)), grid=launch.grid, **options)
        getattr(code, "run", None)  # a property: it makes the launcher and loads the code
