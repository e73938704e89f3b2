"""Compiles kernels in several threads before they are launched.

Triton compiles a kernel where it is first launched, and the C code that launches it, one after
another: ten seconds for what a prompt needs.
"""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator

from triton.runtime import driver

from .device import on
from .launch import Launch, watched
from .maps import RawPointer

MOST_THREADS = 16


@contextlib.contextmanager
def compiled_ahead() -> Iterator[None]:
    """Compiles the kernels that this thread launches inside, without starting them.

    The outputs of those launches are left uninitialised. Other threads compile; the context ends
    when all kernels are compiled.
    """
    here, met = threading.get_ident(), set()
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:

        def take(launch: Launch, tensors: tuple) -> bool:
            if threading.get_ident() != here:
                return False
            if not met and launch.device.type == "cuda":
                driver.active.get_current_device()  # Triton's driver is made by one thread
            key = launch.key(tensors)
            if key not in met and 0 not in launch.grid and launch.kept(tensors) is None:
                met.add(key)
                # no memory waits for the compiler
                pool.submit(_compile, launch, [None if x is None else _place(x) for x in tensors])
            return True

        with watched(take):
            yield


def _place(x) -> RawPointer:
    return RawPointer(x.data_ptr(), x.dtype)


def _compile(launch: Launch, places: list) -> None:
    """Compiles a launch as its first call does, and leaves the code in Triton's memory cache.

    A kernel that does not compile raises its error again at the real launch.
    """
    with on(launch.device):
        options = dict(launch.options)
        code = launch.kernel.warmup(*launch.arguments(tuple(places)), grid=launch.grid, **options)
        getattr(code, "run", None)  # a property: it makes the launcher and loads the code
