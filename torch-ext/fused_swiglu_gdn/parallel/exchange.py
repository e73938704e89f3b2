"""Collectives; every rank of the group calls the same ones in the same order."""

import functools
from typing import Callable, List, Optional
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

WIRE = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that NCCL has; others go as bytes


_backends: WeakKeyDictionary = WeakKeyDictionary()  # by group: torch asks itself for long


def size(group) -> int:
    return (dist.group.WORLD if group is None else group).size()


def rank(group) -> int:
    return (dist.group.WORLD if group is None else group).rank()


def has(group, backend: str) -> bool:
    """True if the group has this backend, such as "cuda:nccl", for a type of device.

    A group that was made without a backend, or with several, has one for each type.
    """
    group = dist.group.WORLD if group is None else group
    found = _backends.get(group)
    if found is None:
        found = _backends[group] = dist.get_backend_config(group).split(",")
    return backend in found


@functools.cache
def _one_tensor(name: str, owner=dist) -> Callable:
    """The collective on one tensor for all ranks, under the name that this torch has for it."""
    older = {"all_gather": "_allgather_base", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(owner, f"{name}_single", None) or getattr(owner, older[name])


@functools.cache
def _gathering(at_once: bool) -> object:
    """Options of an all-gather; at_once: it runs on the caller's own stream, who waits for it."""
    options = dist.distributed_c10d.AllgatherOptions()
    if hasattr(options, "asyncOp"):  # from torch 2.8 on
        options.asyncOp = not at_once
    return options


def all_gather(own: Tensor, group) -> Tensor:
    """Gathers [..] of every rank, of one shape, to [P, ..]."""
    return start_all_gather(own, group, at_once=True)()


def start_all_gather(own: Tensor, group, at_once: bool = False) -> Callable[[], Tensor]:
    """Starts an all_gather and returns a function that finishes it; launches in between overlap
    it.

    at_once: there are none. torch's own function checks for longer than the collective takes the
    host, so the group's method is called.
    """
    P = size(group)
    if P == 1:
        return lambda: own.unsqueeze(0)
    group = dist.group.WORLD if group is None else group
    by_host = has(group, f"{own.device.type}:gloo")  # gloo moves bytes of the host
    own = own.contiguous()
    as_it_is = own.dtype in WIRE and not by_host
    wire = own if as_it_is else own.view(-1).view(torch.uint8)
    wire = wire.cpu() if by_host else wire
    everyone = wire.new_empty((P, *own.shape) if as_it_is else P * wire.numel())
    gather = _one_tensor("all_gather", type(group))
    work = gather(group, everyone, wire, _gathering(at_once))

    def end() -> Tensor:
        if work is not None:
            work.wait()
        if as_it_is:
            return everyone
        return everyone.to(own.device).view(own.dtype).view(P, *own.shape)

    return end


def sum_scatter(parts: Tensor, group) -> Tensor:
    """Sums [P, ..] over the ranks in fp32 and returns this rank's part [..]."""
    if size(group) == 1:
        return parts[0]
    wide = parts.to(torch.promote_types(parts.dtype, torch.float32)).contiguous()
    if has(group, f"{parts.device.type}:gloo"):
        total = wide.to("cpu", copy=True)  # which gloo overwrites
        dist.all_reduce(total, group=group)
        own = total[dist.get_rank(group)].to(parts.device)
    else:
        own = torch.empty_like(wide[0])
        _one_tensor("reduce_scatter")(own, wide, group=group)
    return own.to(parts.dtype)


def agrees(group) -> bool:
    """True if the ranks compare their arguments before a collective.

    That blocks the host, so with NCCL it happens only if torch is set to debug its collectives
    (TORCH_DISTRIBUTED_DEBUG), and never during the capture of a CUDA graph; gloo blocks the host
    anyway.
    """
    if size(group) == 1:
        return False
    if not has(group, "cuda:nccl"):
        return True
    debugged = dist.get_debug_level() != dist.DebugLevel.OFF
    return debugged and not torch.cuda.is_current_stream_capturing()


def agreed(make: Callable, facts: Callable, group, what: str):
    """Returns make(). If it raises on some rank, or facts(made) differ, all ranks raise."""
    error, made = None, None
    try:
        made = make()
    except Exception as raised:  # whatever it is, the others are not to wait
        error = raised
    if not agrees(group):
        if error is not None:
            raise error
        return made
    own = (None if error is None else str(error), None if error else facts(made))
    everyone: List[Optional[tuple]] = [None] * size(group)
    dist.all_gather_object(everyone, own, group=group)
    if error is not None:
        raise error
    for rank, (message, theirs) in enumerate(everyone):
        if message is not None:
            raise ValueError(f"{what}, in process {rank} of the group: {message}")
        if theirs != own[1]:
            raise ValueError(
                f"{what} must be alike in all processes of the group, "
                f"got {own[1]} here and {theirs} in process {rank}"
            )
    return made
