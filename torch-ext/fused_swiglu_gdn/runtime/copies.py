"""Calls with tensors that kernels take only as copies, and tensors made like them."""

import functools
from typing import Callable, Collection, Optional

import torch
from torch import Tensor

from .ops import contiguous, dense


def on_copies(prepare: Callable, call, copied: Callable) -> Optional[Callable]:
    """prepare(call), where the kernels take no tensors but those that copied(*tensors) returns."""
    run = prepare(type(call)(*copied(*call.tensors), call.options))
    return None if run is None else lambda *tensors: run(*copied(*tensors))


def on_dense(prepare: Callable, call, *apart: str) -> Optional[Callable]:
    """prepare(call), where the kernels need a contiguous last dimension of all tensors but some.

    apart: the names of those that they take as they are.
    """
    named = list(zip(call._fields, call.tensors))
    places = [i for i, (name, x) in enumerate(named) if name not in apart and dense(x) is not x]
    return on_contiguous(prepare, call, places)


def on_contiguous(prepare: Callable, call, places: Collection[int]) -> Optional[Callable]:
    """prepare(call), where the kernels need the tensors at these places of the call contiguous."""
    if not places:
        return prepare(call)

    def copied(*tensors):
        return [contiguous(x) if i in places else x for i, x in enumerate(tensors)]

    return on_copies(prepare, call, copied)


def contiguous_like(x: Tensor, dtype: Optional[torch.dtype] = None) -> Callable[[Tensor], Tensor]:
    """A function that makes an empty contiguous tensor for tensors with the strides of x.

    That is empty_like if its result is contiguous, which costs the host half of what empty costs.
    """
    more: dict = {} if dtype in (None, x.dtype) else {"dtype": dtype}
    if not torch.empty_like(x, device="meta").is_contiguous():
        more["memory_format"] = torch.contiguous_format
    return functools.partial(torch.empty_like, **more) if more else torch.empty_like
