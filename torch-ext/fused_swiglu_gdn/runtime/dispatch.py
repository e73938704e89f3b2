"""The choice of implementation, made in this module alone.

A family is a room and a module, such as "gdn.chunk". The kernel module `gdn/<folder>/chunk.py`
exports `prepare_<operation>(call)`, which returns a function of the call's tensors, or None for a
call that its kernels do not compute. A call goes to the first of FOLDERS that is for the device
and returns one, else to the plain-torch reference. Kernel modules are imported here alone, and
only when a device of theirs is met, so the package loads without Triton or with an old one.
"""

import contextlib
import functools
import importlib
import logging
from typing import Callable, Dict, Iterator, Optional, Tuple

import torch

from . import device

logger = logging.getLogger(__name__)

# kernels, the least CUDA capability that they are for, and the first that they are not for; AMD
# GPUs are served by portable alone
FOLDERS: Tuple[Tuple[str, Tuple[int, int], Tuple[int, int]], ...] = (
    ("hopper", (9, 0), (10, 0)),
    ("tma", (10, 0), (99, 0)),
    ("portable", (8, 0), (99, 0)),
)
TMA = ("swiglu",)  # rooms whose hopper/ needs tensor descriptors only, as later chips have them


_PACKAGE = __package__.rpartition(".")[0]
forced: Optional[str] = None  # the only implementation that may serve: force()
records: list = []  # of served()


@functools.cache
def _module(folder: str, family: str):
    """The kernel module, or None if there is none or this Triton cannot load it."""
    room, module = family.split(".")
    if folder == "tma":
        return _module("hopper", family) if room in TMA else None
    name = f"{_PACKAGE}.{room}.{folder}.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, name.rpartition(".")[0]):  # the folder has no such kernels
            return None
        logger.warning("%s kernels for %s are not used: %s", folder, family, error)
    except (ImportError, AttributeError) as error:  # a Triton without what the module needs
        logger.warning("%s kernels for %s are not used: %s", folder, family, error)
    return None


@functools.cache
def _folders(device_type: str, index: Optional[int]) -> Tuple[str, ...]:
    """Folders of kernels for this device, best first."""
    if not device.is_gpu(torch.device(device_type)):
        return ()
    if device_type == "cuda" and index is None:
        index = torch.cuda.current_device()
    capability = device.capability(index)
    if capability is None:
        return ("portable",)
    served = tuple(folder for folder, least, end in FOLDERS if least <= capability < end)
    if not served:
        logger.warning("compute capability %d.%d is below 8.0: served by plain torch", *capability)
    return served


@torch.compiler.assume_constant_result
def has_kernels(family: str, operation: str, device_type: str, index: Optional[int]) -> bool:
    """True if any kernel of the operation exists for the device; a constant while tracing."""
    if forced == "reference":
        return False
    folders = _folders(device_type, index)
    modules = [_module(folder, family) for folder in folders]
    return any([_has(x, operation) for x in modules])


@functools.cache
def has_kernels_at(family: str, operation: str, where: torch.device) -> bool:
    """has_kernels(), remembered; not for what torch compiles."""
    return has_kernels(family, operation, where.type, where.index)


def serves(family: str, operation: str, x: torch.Tensor, compiling: Optional[bool] = None) -> bool:
    """True if a kernel may compute operation(x, ...), or an implementation is forced.

    Layers call it, for they can also run their original forward; they may pass whether torch
    compiles. No kernel computes in fp64.
    """
    if forced is not None:
        return True
    if x.dtype is torch.float64:
        return False
    where = x.device
    if torch.compiler.is_compiling() if compiling is None else compiling:
        return has_kernels(family, operation, where.type, where.index)
    return has_kernels_at(family, operation, where)


def prepare(
    family: str, operation: str, call, gradient: Optional[Tuple[str, str]] = None
) -> Optional[Callable]:
    """A function of the call's tensors by the first folder that computes the call, or None.

    It is for all calls with the same facts (runtime/cache.py). gradient: family and name of another
    operation that some folder must have as well.
    """
    where = call.device
    folders = [x for x in _folders(where.type, where.index) if forced in (None, x)]
    if gradient is None or any([_has(_module(x, gradient[0]), gradient[1]) for x in folders]):
        for folder in folders:
            module = _module(folder, family)
            found = None
            if _has(module, operation):
                found = getattr(module, f"prepare_{operation}")(call)
            if found is not None:
                recorded(operation, folder)
                return found
    recorded(operation, "reference")
    return None


def _has(module, operation: str) -> bool:
    return hasattr(module, f"prepare_{operation}")


def recorded(operation: str, implementation: str) -> None:
    """Adds a call to the records of served()."""
    for record in records:
        record.setdefault(operation, []).append(implementation)


@contextlib.contextmanager
def served() -> Iterator[Dict[str, list]]:
    """Records the implementation of each eager call inside: {"swiglu_fwd": ["hopper", ...],
    ...}."""
    record: Dict[str, list] = {}
    records.append(record)
    try:
        yield record
    finally:
        records[:] = [other for other in records if other is not record]


@contextlib.contextmanager
def force(implementation: str) -> Iterator[None]:
    """Restricts calls inside to one implementation, or the reference; for tests and benchmarks."""
    global forced
    before, forced = forced, implementation
    try:
        yield
    finally:
        forced = before
