"""Calls of a layer that CUDA graphs can serve in training, and its weights around a capture."""

import contextlib
from itertools import chain
from typing import List, Optional, Set

import torch
from torch import Tensor, nn

from ..decoding.graph_rules import IDLE
from ..decoding.watch import PLAIN, ModelWatch
from ..layers.plain import PLAIN_TENSORS, around_by_torch, told, why_hooked


class Eager(Exception):
    """Why a layer must run eagerly."""


# -- arguments


def key_of(value, tensors: list) -> tuple:
    """The facts that arguments share with others of one graph; their tensors are appended."""
    kind = type(value)
    if kind in PLAIN_TENSORS and value.layout is torch.strided:
        tensors.append(value)
        facts = value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        return (Tensor, *facts)
    if kind in (tuple, list):
        return (kind, *[key_of(x, tensors) for x in value])
    if kind is dict:
        return (kind, *[(name, key_of(x, tensors)) for name, x in value.items()])
    if value is None or kind in PLAIN or kind in (torch.Size, torch.dtype, torch.device):
        return kind, value
    hint = ": pass use_cache=False" if "Cache" in kind.__name__ else ""
    raise Eager(f"an argument is a {kind.__name__}{hint}")


def device_of(tensors: list) -> torch.device:
    """The one device of tensors: what the host reads of others would be part of a graph."""
    devices = {x.device for x in tensors}
    if len(devices) != 1:
        raise Eager("its arguments are on several devices" if devices else "it has no tensors")
    return devices.pop()


def filled(value, tensors) -> object:
    """The value with the next of the tensors in place of each of its own."""
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) is dict:
        return {name: filled(x, tensors) for name, x in value.items()}
    if type(value) in (tuple, list):
        return type(value)([filled(x, tensors) for x in value])
    return value


# -- what is asked before a capture


def why_not(watch: ModelWatch, device: torch.device) -> Optional[str]:
    """Reason why graphs would leave out something that a call of the layer does, or None."""
    layer, *_ = watch.modules
    for module in watch.modules:
        kind, attributes = type(module).__name__, module.__dict__
        if module is not layer:
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if any([getattr(hook, "__module__", None) not in IDLE for hook in hooks]):
                return f"its {kind} has a hook, which a graph would not call"
            if module._backward_hooks or module._backward_pre_hooks or "_hf_hook" in attributes:
                return f"its {kind} {why_hooked(module)}"
        if "_is_fsdp_managed_module" in attributes or around_by_torch(type(module)):
            return "its weights are sharded (FSDP)"
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is None:
                continue
            if type(x) not in PLAIN_TENSORS or hasattr(x, "ds_id"):
                return f"a weight of its {kind} is a {type(x).__name__} or partitioned"
            if told(x, "device") != device:
                return f"a weight of its {kind} is on {told(x, 'device')}, its input on {device}"
            if x._backward_hooks or hasattr(x, "main_grad"):
                return f"a weight of its {kind} has a hook or a main_grad"
    if any([told(x, "device") != device for _, _, x in watch.held]):
        return "it has tensors that are on other devices than its input"
    return None


class LayerState:
    """The facts of tensors and hooks that gradients depend on, beside those of a ModelWatch."""

    def __init__(self, watch: ModelWatch):
        layer, *parts = watch.modules
        every = [t for m in watch.modules for t in (m._parameters, m._buffers)]
        self.tables = [t for t in every if t]  # the watch sees when another one gets an entry
        self.hooks = [t for m in parts for t in (m._backward_hooks, m._backward_pre_hooks)]
        held = [x for _, _, x in watch.held]
        self.tensors = [x for x in (*_values(self.tables), *held) if x is not None]
        self.attributes = [x.__dict__ for x in self.tensors]
        self.ids, self.before = list(map(id, _values(self.tables))), self._facts()

    def _facts(self) -> list:
        with_main_grad = ["main_grad" in table for table in self.attributes]
        return [any(with_main_grad), [(x.requires_grad, x.stride()) for x in self.tensors]]

    def holds(self) -> bool:
        """True if tensors are the same, neither transposed nor frozen since, and no part has a hook
        for its gradients."""
        same = list(map(id, _values(self.tables))) == self.ids  # an equal number is another one
        return same and not any(self.hooks) and self._facts() == self.before


def _values(tables: List[dict]) -> chain:
    return chain.from_iterable(map(dict.values, tables))


@contextlib.contextmanager
def stand_ins(modules: List[nn.Module]):
    """Gives modules other parameters on the same memory, by the ids of their own ones.

    The nodes of autograd that add to the own ones' gradients may live, as with DDP, or as long as a
    loss does, and have the stream of an eager step, which a capture may not wait for.
    """
    tables = [m._parameters for m in modules]
    own = [(table, name, p) for table in tables for name, p in table.items() if p is not None]
    made = {id(p): nn.Parameter(p.detach(), p.requires_grad) for _, _, p in own}
    try:
        for table, name, p in own:
            table[name] = made[id(p)]
        yield made
    finally:
        for table, name, p in own:
            table[name] = p


def leaves_of(y: Tensor) -> Set[int]:
    """Ids of the tensors that the gradient of y reaches."""
    found, left, known = set(), [y.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        left += [inner for inner, _ in node.next_functions]
    return found
