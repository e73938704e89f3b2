"""What the checks share. Messages say which argument, what was expected, and what came."""

from typing import Dict, Optional, Sequence

import torch

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def has_shape(name: str, x: object, dims: str, sizes: Dict[str, int]) -> None:
    """x is a tensor whose shape is `dims`, e.g. "B T H K".

    A size met for the first time is added to `sizes`; a known one must agree.
    """
    is_tensor(name, x)
    names = dims.split()
    shape = x.shape
    if len(shape) == len(names) and all(
        sizes.get(dim, size) == size for dim, size in zip(names, shape)
    ):
        sizes.update(zip(names, shape))
        return
    expected = [str(sizes[dim]) if dim in sizes else dim for dim in names]
    raise ValueError(
        f"{name} must have shape [{', '.join(names)}] = [{', '.join(expected)}], got {list(shape)}"
    )


def has_dtype(name: str, x: torch.Tensor, allowed: Sequence[torch.dtype], why: str = "") -> None:
    if x.dtype not in allowed:
        names = ", ".join(str(dtype).replace("torch.", "") for dtype in allowed)
        raise TypeError(f"{name} must be of dtype {names}{why}, got {x.dtype}")


def is_floating(name: str, x: torch.Tensor) -> None:
    has_dtype(name, x, FLOATING)


def agrees(name: str, x: Optional[torch.Tensor], first: str, y: torch.Tensor) -> None:
    """x, if given, has the dtype and device of y."""
    if x is None:
        return
    if x.dtype != y.dtype:
        raise TypeError(f"{name} must have the dtype of {first}, {y.dtype}, got {x.dtype}")
    same_device(name, x, first, y)


def same_device(name: str, x: Optional[torch.Tensor], first: str, y: torch.Tensor) -> None:
    if x is not None and x.device != y.device:
        raise ValueError(f"{name} must be on the device of {first}, {y.device}, got {x.device}")


def is_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def is_cu_seqlens(name: str, cu_seqlens: object, total: int, like: torch.Tensor) -> None:
    """Cumulative lengths [N + 1], 0 first and `total` last, never decreasing.

    Values are read on the CPU only: on a GPU that would stop the host, so there the kernels clamp.
    """
    is_tensor(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"{name} must have shape [N + 1], got {list(cu_seqlens.shape)}")
    has_dtype(name, cu_seqlens, (torch.int32, torch.int64))
    same_device(name, cu_seqlens, "the inputs", like)
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[0]}")
    if values[-1] != total:
        raise ValueError(f"{name} must end with the number of tokens, {total}, got {values[-1]}")
    for n, (a, b) in enumerate(zip(values, values[1:])):
        if b < a:
            raise ValueError(f"{name} must not decrease, got {b} after {a} at place {n + 1}")
