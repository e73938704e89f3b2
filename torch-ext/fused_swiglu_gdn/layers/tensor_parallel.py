"""Linears and MLPs that transformers has sharded for tensor parallelism
(`DistributedConfig(tp_plan="auto")`).

A linear has a forward that converts inputs and outputs to their placements, and calls the module's
own with this process's shards of the parameters in between. Of an MLP, gate and up hold rows
[N / P, K] of their weights and down columns [D, N / P], as DTensors. Together they compute the sum
over ranks of down_r(act(gate_r(x)) * up_r(x)): one sum in the forward, and one of x's gradient.
They are recognised by those placements alone.
"""

import functools
import operator
from types import CellType, FunctionType, MethodType
from typing import Callable, NamedTuple, Optional, Tuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..projection.call import MAX_TOKENS
from ..projection.project import project
from ..runtime.dtypes import HALF
from ..swiglu.api import fused_swiglu, fused_swiglu_mlp, silu_mul
from .own_code import cells_of, is_in_its_file
from .plain import HOOKS, PLAIN_TENSORS

HOME = "transformers.distributed.tensor_parallel"
OWN = "original_forward"  # the variable of the forward around that holds the module's own


def own_of_shards(module: nn.Module, forward: object) -> Optional[MethodType]:
    """The module's own forward, where `forward` is the one that transformers has put around it."""
    if type(forward) is not FunctionType or forward.__module__ != HOME:
        return None
    own = cells_of(forward).get(OWN) if is_in_its_file(forward, "transformers") else None
    return own if getattr(own, "__self__", None) is module else None


def around(forward: FunctionType, inner: Callable) -> FunctionType:
    """Returns such a forward, around another one than the module's own."""
    cells = zip(forward.__code__.co_freevars, forward.__closure__)
    closure = tuple([CellType(inner) if name == OWN else cell for name, cell in cells])
    return FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, closure
    )


def local(x: Optional[Tensor]) -> Optional[Tensor]:
    """Returns this process's shard of a DTensor, and any other tensor as it is."""
    return x.to_local().detach() if hasattr(x, "placements") else x


class Shards(NamedTuple):
    """The weights of an MLP as DTensors, and the group of ranks that share them."""

    w_gate: Tensor  # [N, K], this process has rows [N / P, K]
    w_up: Tensor  # [N, K], the same rows
    w_down: Tensor  # [D, N], this process has columns [D, N / P]
    b_gate: Optional[Tensor]  # [N]
    b_up: Optional[Tensor]  # [N]
    b_down: Optional[Tensor]  # [D], alike in all processes
    group: object

    def local(self) -> Tuple[Optional[Tensor], ...]:
        """Returns this rank's parts; their gradients become DTensors of the same placements."""
        return tuple([
            x.to_local(grad_placements=x.placements) if hasattr(x, "placements") else x
            for x in self[:6]
        ])  # fmt: skip


# by gate: the forward, weight and bias of each of the three as they were looked at, and their
# Shards, which are read in every call. A forward holds its module, which would never be freed, so
# there is a weak reference to it; of parameters torch moves none that has one
_found: WeakKeyDictionary = WeakKeyDictionary()
NOT_BARE = frozenset(("weight", "bias", "_call_impl", "_hf_hook"))


def shards(gate: object, up: object, down: object) -> Optional[Shards]:
    """The shards of an MLP whose three projections are these modules, or None."""
    if not type(gate) is type(up) is type(down) is nn.Linear:
        return None
    facts: list = []
    for attributes in (gate.__dict__, up.__dict__, down.__dict__):
        # else a call of the module is more than one of its forward with its parameters
        if any(map(attributes.get, HOOKS)) or not NOT_BARE.isdisjoint(attributes):
            return None
        parameters = attributes["_parameters"]
        facts += (attributes.get("forward"), parameters.get("weight"), parameters.get("bias"))
    known, found = _found.get(gate, ((), None))
    before = [x() if type(x) is ref else x for x in known]
    if found is None or not all(map(operator.is_, before, facts)):
        found = _shards(gate, up, down)
        if found is not None:
            _found[gate] = [ref(x) if type(x) is FunctionType else x for x in facts], found
    return found


def _shards(gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Optional[Shards]:
    parts = [_linear(module) for module in (gate, up, down)]
    if None in parts:
        return None
    (w_gate, b_gate, *split), (w_up, b_up, *same), (w_down, b_down, *joined) = parts
    mesh, P = w_gate.device_mesh, w_gate.device_mesh.size()
    alike = mesh == w_up.device_mesh == w_down.device_mesh and mesh.ndim == 1
    if not alike or w_gate.shape != w_up.shape or w_gate.shape[0] % P:
        return None  # shares that differ would be served in some processes alone
    if not all(map(_from_all_to_shards, (split, same, joined[::-1]))):
        return None
    rows = [x is None or _is_shard(x, 0) for x in (w_gate, w_up, b_gate, b_up)]
    if not all(rows) or not _is_shard(w_down, 1) or not (b_down is None or _is_replica(b_down)):
        return None
    return Shards(w_gate, w_up, w_down, b_gate, b_up, b_down, mesh.get_group())


def _linear(module: nn.Linear) -> Optional[tuple]:
    """weight, bias, placement of the input and of the output of a sharded linear, or None.

    The sharding must be transformers' and the module otherwise unchanged.
    """
    attributes, parameters = module.__dict__, module._parameters
    forward, weight = attributes.get("forward"), parameters.get("weight")
    if not hasattr(weight, "placements"):
        return None
    own = own_of_shards(module, forward)
    if getattr(own, "__func__", None) is not nn.Linear.forward:
        return None
    cells = cells_of(forward)
    style = cells.get("self")
    if cells.get("mesh") != weight.device_mesh or not getattr(style, "use_local_output", False):
        return None
    layouts = [getattr(style, f"{side}_layouts", None) for side in ("input", "output")]
    return None if None in layouts else (weight, parameters.get("bias"), *layouts)


def _from_all_to_shards(layouts) -> bool:
    """True for the layouts of a replica and of shards of the last dimension."""
    first, last = layouts
    return first.is_replicate() and last.is_shard() and last.dim == -1


def _is_shard(x: object, dim: int) -> bool:
    placements = getattr(x, "placements", ())
    return len(placements) == 1 and placements[0].is_shard(dim) and _is_plain(x)


def _is_replica(x: object) -> bool:
    if type(x) in PLAIN_TENSORS:
        return True
    placements = getattr(x, "placements", ())
    return len(placements) == 1 and placements[0].is_replicate() and _is_plain(x)


def _is_plain(x: Tensor) -> bool:
    """True if the DTensor's shards are plain tensors."""
    return type(x.to_local().detach()) in PLAIN_TENSORS


@functools.cache
def _by_sums() -> object:
    """The options of a sum that the caller waits for, as torch makes them."""
    options = dist.AllreduceOptions()
    if hasattr(options, "asyncOp"):  # from torch 2.8 on
        options.asyncOp = False
    return options


def sum_over_ranks(y: Tensor, group: object) -> None:
    """Sums y over the ranks, in place: dist.all_reduce without its checks, which take the host
    longer than what it hands over."""
    work = group.allreduce([y], _by_sums())
    if work is not None:
        work.wait()


class _Copies(torch.autograd.Function):
    """The identity of x, a copy of which is on every rank: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        sum_over_ranks(total, ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Sums y over the ranks, in place."""

    @staticmethod
    def forward(ctx, y, group):
        ctx.mark_dirty(y)
        sum_over_ranks(y, group)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _gated(x: Tensor, w_gate, w_up, b_gate, b_up, activation: str) -> Tensor:
    """act(gate(x)) * up(x) of this rank's rows, which are too few for the one launch's tiles of 33
    to MAX_TOKENS tokens."""
    if 32 * x.shape[-1] < x.numel() <= MAX_TOKENS * x.shape[-1] and b_gate is b_up is None:
        both = project(x, [w_gate, w_up])
        if both is not None:
            return silu_mul(*both, activation=activation)
    return fused_swiglu(x, w_gate, w_up, b_gate, b_up, activation=activation)


def _part(z: Tensor, w_down: Tensor) -> Tensor:
    """Part of down's sum that this rank has, z w_down^T; of a few tokens in fp32, so that it is
    rounded once: the time of such a message is that of its latency."""
    if z.dtype in HALF and z.numel() <= MAX_TOKENS * z.shape[-1]:
        y = project(z, [w_down], fp32=True)
        if y is not None:
            return y[0]
        if z.is_cuda and z.numel() and hasattr(torch.ops.aten.mm, "dtype"):
            y = torch.mm(z.reshape(-1, z.shape[-1]), w_down.t(), out_dtype=torch.float32)
            return y.view(*z.shape[:-1], -1)
    return F.linear(z, w_down)


def mlp_on_shards(x: Tensor, found: Shards, activation: str) -> Tensor:
    """down(act(gate(x)) * up(x)), [..., K] -> [..., D], equal on all ranks."""
    if not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
        # to_local would take 3 us for each
        parts = [x if x is None else getattr(x, "_local_tensor", x) for x in found[:6]]
        w_gate, w_up, w_down, b_gate, b_up, b_down = parts
        z = _gated(x, w_gate, w_up, b_gate, b_up, activation)
        y = _part(z, w_down)
        sum_over_ranks(y, found.group)
        y = y if b_down is None else y.add_(b_down)
        return y if y.dtype is z.dtype else y.to(z.dtype)
    w_gate, w_up, w_down, b_gate, b_up, b_down = found.local()
    if torch.is_grad_enabled() and x.requires_grad:
        x = _Copies.apply(x, found.group)
    y = fused_swiglu_mlp(x, w_gate, w_up, w_down, b_gate, b_up, None, activation=activation)
    y = y.contiguous()
    if torch.is_grad_enabled():
        y = _Sum.apply(y, found.group)
    else:
        sum_over_ranks(y, found.group)
    return y if b_down is None else y + b_down
