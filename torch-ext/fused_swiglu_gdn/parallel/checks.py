"""Checks of arguments that are shared by several ranks."""

import operator
from collections.abc import Iterable, Mapping
from typing import List, Sequence, Union

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.checks import has_shape_of, is_int, is_tensor, readable
from .context import CpContext
from .exchange import has


def lengths(name: str, cu_seqlens: Union[Tensor, Sequence[int]], batch_size: int) -> List[int]:
    """The cumulative lengths of the whole stream as a list of ints."""
    values = ints(name, cu_seqlens)
    if not values or values[0] != 0 or any(b < a for a, b in zip(values, values[1:])):
        raise ValueError(f"{name} must start with 0 and never decrease, got {values}")
    is_int("batch_size", batch_size, 1)
    if values[-1] % batch_size:
        raise ValueError(
            f"batch_size must be rows that the {values[-1]} tokens fill, got {batch_size}"
        )
    row = values[-1] // batch_size
    if not set(range(0, values[-1] + 1, row or 1)) <= set(values) and batch_size > 1:
        raise ValueError(f"{name} must have a border after every row of {row} tokens, got {values}")
    return values


def ints(name: str, values: object) -> List[int]:
    """The values of a tensor [N + 1] of integers, or of a sequence of ints."""
    if isinstance(values, Tensor):
        if values.ndim != 1:
            raise ValueError(f"{name} must have shape [N + 1], got {list(values.shape)}")
        is_of_ints(name, values)
        has_values(name, values)
        return values.tolist()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a tensor or a list of ints, got {type(values).__name__}")
    values = list(values)
    for x in values:
        if isinstance(x, bool) or not hasattr(x, "__index__"):
            raise TypeError(f"{name} must be a tensor or a list of ints, got {x!r} in it")
    return [operator.index(x) for x in values]


def is_copy(name: str, x: object, first: str, y: object) -> None:
    """Checks that x has the integers of y, whose values are read on a CPU only."""
    if not isinstance(y, Tensor):
        kind = type(y).__name__
        raise TypeError(f"{first} must be a torch.Tensor where {name} is given, got {kind}")
    for which, values in ((first, y), (name, x)):
        is_tensor(which, values)
        is_of_ints(which, values)
        has_values(which, values)
    has_shape_of(name, x, first, y)
    if readable(y) and x.tolist() != y.tolist():
        raise ValueError(f"{name} must have the values of {first}, {y.tolist()}, got {x.tolist()}")


def has_values(name: str, x: Tensor) -> None:
    if x.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on meta")


def is_of_ints(name: str, x: Tensor) -> None:
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise TypeError(f"{name} must be of an integer dtype, got {x.dtype}")


def is_group(group: object, name: str = "group") -> None:
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup, got {type(group).__name__}"
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(f"{name} must be a process group: call init_process_group first")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} must have this process among its own")


def is_context(cp_context: object) -> None:
    if not isinstance(cp_context, CpContext):
        raise TypeError(
            f"cp_context must come from build_cp_context, got {type(cp_context).__name__}"
        )


def holds_tokens(cp: CpContext, name: str, rows: int, tokens: int) -> None:
    """Checks that a tensor has the local tokens, as rows of the batch or as one row."""
    if rows * tokens != cp.tokens or rows not in (1, cp.batch_size):
        raise ValueError(
            f"{name} must have the {cp.tokens} tokens that cp_context has in this process, as "
            f"{cp.batch_size} rows, got {rows} rows of {tokens}"
        )


def lengths_are_its_own(cp: CpContext, cu_seqlens: object) -> None:
    if cu_seqlens is not None and cu_seqlens is not cp.cu_seqlens:
        raise ValueError("cu_seqlens must be None or cp_context.cu_seqlens with cp_context")


def is_absent(name: str, value: object) -> None:
    if isinstance(value, Tensor) or value:
        raise ValueError(f"{name} must not be given with cp_context")


def device_of(cu_seqlens: object, group) -> torch.device:
    """The device for a context's tensors."""
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type != "cpu":
        return cu_seqlens.device
    if has(group, "cuda:nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
