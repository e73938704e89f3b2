"""Facts about a device that do not change while a process runs."""

import contextlib
import functools
import os
import threading
from typing import NamedTuple, Optional, Tuple

import torch


class Chip(NamedTuple):
    """What kernels and their tuning ask of a GPU."""

    name: str  # with underscores for spaces, as configs/ files carry it
    capability: Optional[Tuple[int, int]]  # of CUDA; None for AMD GPUs
    multiprocessors: int


pretended: Optional[Chip] = None  # what every tensor is taken to be on: runtime/recording.py


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" or pretended is not None


@functools.cache
def has_gpu() -> bool:
    """This machine has a GPU. Asked of NVML or AMD's library, so that the process can still fork:
    torch.cuda.device_count() starts CUDA where these do not know (MIG slices, some containers)."""
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
    """The device's name with underscores for spaces, as configs/ files carry it."""
    if pretended is not None:
        return pretended.name
    return torch.cuda.get_device_name(index).replace(" ", "_")


_NOTHING = contextlib.nullcontext()
_thread = threading.local()


def on(device: torch.device):
    """A context in which the device is current; nothing is switched where it already is."""
    if device.type != "cuda":
        return _NOTHING
    if not hasattr(_thread, "has_context"):
        _make_context(device)
    return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def _make_context(device: torch.device) -> None:
    """Gives this thread its CUDA context, as a thread's first call of CUDA's runtime does.

    Tensor maps are encoded by the driver, which does not: a thread of autograd's that has called
    nothing else yet would fail.
    """
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()
    _thread.has_context = True


def from_host(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x, which the host has just made, on a device: without a wait for what is queued there.

    While a CUDA graph is captured it is a plain copy, which CUDA refuses: a replay would read
    memory that the host has given to others.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@functools.cache
def _is_at_least(index: int, major: int) -> bool:
    found = capability(index)
    return found is not None and found >= (major, 0)


def takes_ptx(device: torch.device) -> bool:
    """Whether a kernel may hold PTX, as of Ampere: not on AMD GPUs, nor under the interpreter."""
    return is_gpu(device) and _is_at_least(device.index, 8)


def is_amd(device: torch.device) -> bool:
    return is_gpu(device) and capability(device.index) is None


def overlaps_launches(device: torch.device) -> bool:
    """Whether a launch may begin before the one that it follows has ended (Hopper and later).

    A kernel that lets the next launch begin has waited itself, or was not launched early: what is
    older than it has ended. What a kernel reads before it waits must not be of the launch before,
    whichever that is: it may be states of a layer, so what writes those last lets no launch begin;
    it may not be weights, which anybody may just have made.
    """
    return is_gpu(device) and _is_at_least(device.index, 9)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Whether warpgroups multiply by wgmma, which is Hopper's own: later chips have others."""
    found = capability(device.index) if is_gpu(device) else None
    return found is not None and found[0] == 9


def has_tensor_memory(device: torch.device) -> bool:
    """Whether Triton keeps accumulators in tensor memory, of which a program has 512 columns."""
    found = capability(device.index) if is_gpu(device) else None
    return found is not None and found[0] == 10
