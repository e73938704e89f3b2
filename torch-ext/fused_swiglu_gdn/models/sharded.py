"""Models whose weights are sharded when kernelize looks at them: FSDP2 and ZeRO-3.

FSDP2 gathers a module's weights before its forward, so what counts is what they are there: plain
tensors. ZeRO-3 gathers them by hooks on every module, so a kernel that reads weights cannot be sure
of them.
"""

import contextlib
import sys
from typing import Dict, Iterator, Optional

import torch
from torch import nn


@contextlib.contextmanager
def as_gathered(model: nn.Module) -> Iterator[None]:
    """Inside, weights that FSDP2 shards are tensors without values, of the whole weight's shape.

    Served layers look at their weights in every call, so one that stays sharded there (as with
    tensor parallelism below FSDP2) is left to the module's own forward.
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
    """Modules that fully_shard was called on, or a module around them."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for module in model.modules():
        if isinstance(module, kind):
            yield from module.modules()


def _gathered_in_forward(x: object) -> bool:
    """A DTensor as fully_shard makes it of a plain tensor: sharded over one dimension of a mesh,
    and with two (hybrid sharding) a replica along the other."""
    placements = getattr(x, "placements", None)
    if placements is None or not hasattr(x, "device_mesh"):
        return False
    *replicas, last = placements
    return len(replicas) < 2 and last.is_shard() and all(p.is_replicate() for p in replicas)


def _stand_in(x: torch.Tensor, known: Dict[int, torch.Tensor]) -> torch.Tensor:
    """A plain tensor with the facts of x and the memory of one row."""
    if id(x) not in known:
        row = torch.empty(x.shape[-1:], dtype=x.dtype, device=x.device_mesh.device_type)
        known[id(x)] = row.expand(x.shape).requires_grad_(x.requires_grad)
    return known[id(x)]


def why_partitioned(module: nn.Module) -> Optional[str]:
    """Its weights are somewhere else until a hook of DeepSpeed brings them."""
    partitioned = any(hasattr(x, "ds_id") for x in module.parameters())
    return "is partitioned by ZeRO-3" if partitioned else None
