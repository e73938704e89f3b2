"""Models whose weights are sharded when kernelize examines them: FSDP2 and ZeRO-3.

FSDP2 gathers a module's weights before its forward, so they are plain tensors there. ZeRO-3 gathers
them by hooks on every module, so a kernel that reads weights cannot rely on them.
"""

import contextlib
import sys
from typing import Dict, Iterator, Optional

import torch
from torch import nn

from .serving import named_modules


@contextlib.contextmanager
def as_gathered(model: nn.Module) -> Iterator[None]:
    """Replaces weights that FSDP2 shards by tensors without values, of the whole weight's shape.

    Replaced layers check their weights at every call, so one that stays sharded in the forward (as
    with tensor parallelism below FSDP2) runs the module's own forward.
    """
    kept, stand_ins = [], {}
    for module in _below_fsdp(model):
        for name, x in module._parameters.items():
            if _gathered_in_forward(x):
                kept.append((module, name, x))
    try:
        for module, name, x in kept:
            module._parameters[name] = _stand_in(x, stand_ins)
        yield
    finally:
        for module, name, x in kept:
            module._parameters[name] = x


def _below_fsdp(model: nn.Module) -> Iterator[nn.Module]:
    """Yields modules on which fully_shard was called, and the modules inside them."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for _, module in named_modules(model):
        if isinstance(module, kind):
            for _, inside in named_modules(module):
                yield inside


def _gathered_in_forward(x: object) -> bool:
    """True for a DTensor that fully_shard made of a plain tensor.

    It is sharded over one dimension of a mesh, and with two (hybrid sharding) replicated along the
    other.
    """
    placements = getattr(x, "placements", None)
    if placements is None or not hasattr(x, "device_mesh"):
        return False
    *replicas, last = placements
    return len(replicas) < 2 and last.is_shard() and all(p.is_replicate() for p in replicas)


def _stand_in(x: torch.Tensor, known: Dict[int, torch.Tensor]) -> torch.Tensor:
    """A plain tensor with shape, dtype and device of x, and the memory of one row."""
    if id(x) not in known:
        row = torch.empty(x.shape[-1:], dtype=x.dtype, device=x.device_mesh.device_type)
        known[id(x)] = row.expand(x.shape).requires_grad_(x.requires_grad)
    return known[id(x)]


def why_partitioned(module: nn.Module) -> Optional[str]:
    """Reason if its weights are elsewhere until a hook of DeepSpeed gathers them, or None."""
    for _, part in named_modules(module):
        for x in part._parameters.values():
            if hasattr(x, "ds_id"):
                return "is partitioned by ZeRO-3"
    return None
