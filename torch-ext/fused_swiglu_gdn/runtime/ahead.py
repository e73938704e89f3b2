"""Compiles kernels in several threads before they are launched.

Triton compiles a kernel where it is first launched, and the C code that launches it, one after
another: ten seconds for what a prompt needs.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator

import torch
from triton.runtime import driver

from .device import on
from .launch import Launch, is_watched, watched
from .maps import RawPointer

MOST_THREADS = 16


@contextlib.contextmanager
def compiled_ahead() -> Iterator[None]:
    """Compiles the kernels that this thread launches inside, without starting them.

    The outputs of those launches are left uninitialised. Other threads compile; the context ends
    when all kernels are compiled.
    """
    met = set()
    with _compilers() as pool:

        def take(launch: Launch, tensors: tuple) -> bool:
            key = launch.key(tensors)
            if key not in met and _is_missing(launch, tensors):
                met.add(key)
                _submit(pool, launch, tensors)
            return True

        with watched(take):
            yield


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Starts the kernels that this thread launches inside when the context ends, in their order;
    those that have not been compiled are compiled by several threads before.

    For calls in which only kernels read what kernels write. Where launches are watched or captured
    in a CUDA graph, they start where they are.
    """
    if is_watched() or torch.cuda.is_current_stream_capturing():
        yield
        return
    waiting = []

    def take(launch: Launch, tensors: tuple) -> bool:
        waiting.append((launch, tensors))  # which keeps the tensors
        return True

    with watched(take):
        yield
    missing = {}
    for launch, tensors in waiting:
        if _is_missing(launch, tensors):
            missing[launch.key(tensors)] = launch, tensors
    if len(missing) > 1:
        with _compilers() as pool:
            for launch, tensors in missing.values():
                _submit(pool, launch, tensors)
    for launch, tensors in waiting:
        launch(*tensors)


def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))


def _is_missing(launch: Launch, tensors: tuple) -> bool:
    return 0 not in launch.grid and launch.kept(tensors) is None


def _submit(pool: ThreadPoolExecutor, launch: Launch, tensors: tuple) -> None:
    """Has a thread compile a launch; no memory waits for it."""
    if launch.device.type == "cuda":
        driver.active.get_current_device()  # Triton's driver is made by one thread
    places = [None if x is None else RawPointer(x.data_ptr(), x.dtype) for x in tensors]
    pool.submit(_compile, launch, places)


def _compile(launch: Launch, places: list) -> None:
    """Compiles a launch as its first call does, and leaves the code in Triton's memory cache.

    A kernel that does not compile raises its error again at the real launch.
    """
    with on(launch.device):
        options = dict(launch.options)
        code = launch.kernel.warmup(*launch.arguments(tuple(places)), grid=launch.grid, **options)
        getattr(code, "run", None)  # a property: it makes the launcher and loads the code
