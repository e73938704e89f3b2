"""Facts about a device that do not change while a process runs."""

import contextlib
import functools
import os
import sys
import threading
from typing import Iterator, NamedTuple, Optional, Tuple

import torch


class Chip(NamedTuple):
    """The facts about a GPU on which kernels and their tuning depend."""

    name: str  # with underscores for spaces, as configs/ files carry it
    capability: Optional[Tuple[int, int]]  # of CUDA; None for AMD GPUs
    multiprocessors: int


pretended: Optional[Chip] = None  # what every tensor is taken to be on: pretending()


@contextlib.contextmanager
def pretending(chip: Optional[Chip]) -> Iterator[None]:
    """Treats CPU tensors as if they were on this chip, or on none."""
    global pretended
    if chip is pretended:
        yield
        return
    forget()
    before, pretended = pretended, chip
    try:
        yield
    finally:
        pretended = before
        forget()


def forget() -> None:
    """Clears the package's caches of facts about the device and of calls."""
    package = __package__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear) and not isinstance(value, type):
                    clear()


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" or pretended is not None


@functools.cache
def has_gpu() -> bool:
    """True if this machine has a GPU.

    NVML or AMD's library answers, so that the process can still fork: torch.cuda.device_count()
    starts CUDA where these give no count (MIG slices, some containers).
    """
    if pretended is not None or not torch.backends.cuda.is_built():
        return pretended is not None
    if torch.cuda.is_initialized():
        return torch.cuda.device_count() > 0
    library, driver = "nvml", "/dev/nvidiactl"
    if torch.version.hip is not None:
        library, driver = "amdsmi", "/dev/kfd"
    count = getattr(torch.cuda, f"_device_count_{library}", lambda: -1)()
    return count > 0 or count < 0 and os.path.exists(driver)


@functools.cache
def capability(index: int) -> Optional[Tuple[int, int]]:
    """CUDA compute capability of a GPU by its index; None for AMD GPUs."""
    if pretended is not None:
        return pretended.capability
    if torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(index)


@functools.cache
def multiprocessor_count(index: int) -> int:
    if pretended is not None:
        return pretended.multiprocessors
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def name(index: int) -> str:
    """The device's name with underscores for spaces, as in the names of configs/ files."""
    if pretended is not None:
        return pretended.name
    return torch.cuda.get_device_name(index).replace(" ", "_")


_NOTHING = contextlib.nullcontext()
_thread = threading.local()


def on(device: torch.device):
    """A context in which the device is current; it is empty if the device is current already."""
    if device.type != "cuda":
        return _NOTHING
    if not hasattr(_thread, "has_context"):
        _make_context(device)
    return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def _make_context(device: torch.device) -> None:
    """Creates this thread's CUDA context, as a thread's first call of the CUDA runtime does.

    The driver encodes tensor maps and does not create a context: encoding would fail in a thread of
    autograd that has not called the runtime yet.
    """
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()
    _thread.has_context = True


def from_host(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies x, which the host has just made, to a device without waiting for work queued there.

    During the capture of a CUDA graph it is a plain copy, which CUDA refuses: a replay would read
    memory that the host has reused.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def _cuda_capability(device: torch.device) -> Tuple[int, int]:
    """The compute capability; (0, 0) for AMD GPUs, and where there is no GPU."""
    return (capability(device.index) if is_gpu(device) else None) or (0, 0)


def takes_ptx(device: torch.device) -> bool:
    """True if kernels may contain PTX for Ampere: not on AMD GPUs, nor under the interpreter."""
    return _cuda_capability(device) >= (8, 0)


def is_amd(device: torch.device) -> bool:
    return is_gpu(device) and capability(device.index) is None


def overlaps_launches(device: torch.device) -> bool:
    """True if a launch may begin before its predecessor has ended (Hopper and later).

    A kernel that lets its successor begin has waited itself, or was not launched early, so all
    older kernels have ended. What a kernel reads before it waits must not be written by its
    predecessor, whichever kernel that is. A layer's states may be read before, because the kernel
    that writes them last does not let its successor begin; weights may not, for any kernel may have
    written them.
    """
    return _cuda_capability(device) >= (9, 0)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """True if the tensor cores take wgmma instructions, which only Hopper has."""
    return _cuda_capability(device)[0] == 9


def has_e4m3(device: torch.device) -> bool:
    """True if kernels can convert to and from e4m3; so they can in the interpreter."""
    return not is_gpu(device) or _cuda_capability(device) >= (8, 9)


def has_tensor_memory(device: torch.device) -> bool:
    """True if Triton keeps accumulators in tensor memory, of which a program has 512 columns."""
    return _cuda_capability(device)[0] == 10
