"""Checks of what is shared by several processes."""

from typing import List, Sequence, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .context import CpContext
from .exchange import has


def lengths(cu_seqlens: Union[Tensor, Sequence[int]], batch_size: int) -> List[int]:
    """The cumulative lengths of the whole stream as numbers."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                "cu_seqlens must be integers of shape [N + 1], got "
                f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
            )
        values = cu_seqlens.tolist()
    else:
        values = _ints(cu_seqlens)
    if not values or values[0] != 0 or any(b < a for a, b in zip(values, values[1:])):
        raise ValueError(f"cu_seqlens must start with 0 and never decrease, got {values}")
    if not isinstance(batch_size, int) or batch_size < 1 or values[-1] % batch_size:
        raise ValueError(
            f"batch_size must be rows that the {values[-1]} tokens fill, got {batch_size!r}"
        )
    row = values[-1] // batch_size
    if not set(range(0, values[-1] + 1, row or 1)) <= set(values) and batch_size > 1:
        raise ValueError(f"cu_seqlens must have a border after every row of {row} tokens")
    return values


def _ints(cu_seqlens: object) -> List[int]:
    try:
        return [int(x) for x in cu_seqlens]
    except (TypeError, ValueError):
        raise TypeError(
            f"cu_seqlens must be a tensor or ints, got {type(cu_seqlens).__name__}"
        ) from None


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
    """A tensor has the tokens that are here: as rows of the batch, or as one."""
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
    """Where a context's tensors are to be."""
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type != "cpu":
        return cu_seqlens.device
    if has(group, "cuda:nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
