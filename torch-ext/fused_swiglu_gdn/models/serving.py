"""Serves a module: its class becomes a subclass that differs in its forward alone.

As the forward belongs to the class, copies (copy.copy, copy.deepcopy, replicas of DataParallel) are
served too, each with its own weights, and code that binds the class's forward to the module again
(as `kernels` does without a kernel) binds this one. A pickle holds the module's own class, so
that it can be read where this package is not.

Weights may be sharded then: FSDP2 gathers a module's weights before its forward, so they are plain
tensors there. ZeRO-3 gathers them by hooks on every module, so a kernel that reads weights cannot
rely on them.
"""

import contextlib
import copy
import copyreg
import functools
import logging
import sys
import warnings
from types import MethodType
from typing import Callable, Dict, Iterator, Optional, Tuple

import torch
from torch import nn

from .. import layers
from ..decoding.watch import HOOK, PACKAGE
from ..layers.own_code import CHECKPOINTS, peeled
from ..layers.plain import Named, around_by_torch, named_modules
from ..layers.tensor_parallel import around, own_of_shards
from ..runtime import device, dispatch

OF_COPIES = ("__copy__", "__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")
GRAPHS = "_training_graphs"  # of a layer, which a pickle has not
SHARDED = "_forward_of_shards_before"  # and of one whose forward transformers has put around ours
HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")  # that have the key

logger = logging.getLogger(__name__)


class Served:
    """The base class of served modules' classes. It stands before the module's own class."""

    serving_package = PACKAGE

    def __init_subclass__(cls, **kwargs):
        """Skips what the own class does for its subclasses."""

    def __copy__(self):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    # no __deepcopy__: a wrapper that hands unknown names on, as PEFT's, would be copied by it
    def __reduce_ex__(self, protocol):
        if around_by_torch(type(self)) is not None:
            return super().__reduce_ex__(protocol)  # pickle finds no such class, and says so
        return _Maker(type(self)), (own_class(self), object, None), _State(self)


class _Maker:
    """Makes a copy's module; in a pickle it is what makes one of the module's own class."""

    def __init__(self, kind: type):
        self.kind = kind

    def __call__(self, *args) -> nn.Module:
        return object.__new__(self.kind)

    def __reduce__(self):
        warnings.warn(
            "a pickle of a kernelized model holds the model without the kernels: "
            "call kernelize again where it is loaded",
            stacklevel=2,
        )
        return functools.partial, (copyreg._reconstructor,)


class _State:
    """The attributes of a served module: all of them for a copy, those not of ours for a pickle."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __deepcopy__(self, memo) -> dict:
        return copy.deepcopy(self.module.__dict__, memo)

    def __reduce__(self):
        state = dict(self.module.__dict__)
        if _function(state.get("forward")) is type(self.module).forward:
            del state["forward"]
        state.pop(GRAPHS, None)
        for name in HOOKS:
            if HOOK in state[name]:
                state[name] = state[name].copy()
                del state[name][HOOK]
        return dict, (state,)


@functools.cache
def _served_class(own: type, layer: str, forward: Callable, replay_rows: int) -> type:
    """The subclass of `own` with this forward; `layer` is the name of our layer, replay_rows the
    tokens that it decodes before it writes a state, or 0 (layers/replay.py)."""
    members = {
        **getattr(forward, "view", {}),  # attributes that it reads, and the module has not
        "forward": forward,
        "served_as": layer,
        "replay_rows": replay_rows,
        "__doc__": own.__doc__,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
    }
    made = type(own)(own.__name__, (Served, own), members)
    if CHECKPOINTS in peeled(own.forward).wrappers:
        # checkpointing is around the forward of the outermost class: transformers puts it there
        super(own, own).__init_subclass__.__func__(made)
    return made


@functools.lru_cache(maxsize=4096)
def _own(kind: type) -> Tuple[type, bool]:
    """A class without what torch.distributed and serve() have put before it; whether the latter
    has."""
    kind = kind if around_by_torch(kind) is None else kind.__bases__[1]
    served = kind.__bases__[0] is Served
    return (kind.__bases__[1] if served else kind), served


# the subclasses of torch.distributed's and a module's class that were met or made
_wrapped: Dict[Tuple[type, type], type] = {}


def _set_inner(module: nn.Module, inner: type) -> None:
    """Changes the module's class, but for what torch.distributed has put before it."""
    outer = type(module)
    shards = around_by_torch(outer)
    if shards is not None:
        _wrapped[shards, outer.__bases__[1]] = outer
        if (shards, inner) not in _wrapped:
            names = vars(outer).keys() & {"__module__", "__deepcopy__"}  # as fully_shard makes it
            members = {name: vars(outer)[name] for name in names}
            _wrapped[shards, inner] = type(outer)(outer.__name__, (shards, inner), members)
        inner = _wrapped[shards, inner]
    object.__setattr__(module, "__class__", inner)  # nn.Module looks for parameters first


def own_class(module: nn.Module) -> type:
    """The module's class, whether it is served or not, and sharded by FSDP2 or not."""
    return _own(type(module))[0]


def is_served(module: nn.Module) -> bool:
    return _own(type(module))[1]


def is_of_transformers(module: nn.Module) -> bool:
    """Returns True if transformers itself has the module's class."""
    return own_class(module).__module__.split(".")[0] == "transformers"


def serve(module: nn.Module, layer: str, forward: Callable, replay_rows: int = 0) -> None:
    """Gives a module `forward` for its own; why_replaced says whether that is all right."""
    bound = module.__dict__.pop("forward", None)
    if bound is not None and own_of_shards(module, bound) is not None and not is_served(module):
        module.__dict__[SHARDED] = bound
    _set_inner(module, _served_class(own_class(module), layer, forward, replay_rows))
    if SHARDED in module.__dict__:
        module.forward = around(module.__dict__[SHARDED], MethodType(type(module).forward, module))


def unserve(module: nn.Module) -> bool:
    """Gives a served module its own forward back; whether it was served."""
    bound = module.__dict__.get("forward")
    if bound is None and len(type(module).__bases__) == 1:
        return False
    of_a_layer = _is_of_a_layer(bound)  # `kernels` puts them there
    if of_a_layer or (is_served(module) and _function(bound) is type(module).forward):
        del module.forward
    if not is_served(module):
        return of_a_layer
    _set_inner(module, own_class(module))
    if SHARDED in module.__dict__:
        module.forward = module.__dict__.pop(SHARDED)
    return True


def _function(bound) -> Optional[Callable]:
    return bound.__func__ if isinstance(bound, MethodType) else bound


def _is_of_a_layer(bound) -> bool:
    function = _function(bound)
    return function is not None and any(
        function is getattr(layers, name).__dict__.get("forward") for name in layers.__all__
    )


def why_not_on(where: torch.device, family: str, operation: str) -> Optional[str]:
    """Returns a reason if no kernel of the operation runs on a device, and no implementation is
    forced."""
    if dispatch.forced is not None or dispatch.has_kernels(
        family, operation, where.type, where.index
    ):
        return None
    return f"there are no kernels for {where.type}"


@functools.lru_cache(maxsize=256)
def say_once(message: str) -> None:
    logger.warning("%s", message)


def may_move(where: torch.device) -> bool:
    """A model on the CPU of a machine with a GPU may be on its way there, as in training that moves
    it, so its modules are served. Elsewhere, without a kernel, a module's own forward is to stay:
    ours would ask in every call, for microseconds."""
    return where.type == "cpu" and device.has_gpu()


def why_replaced(module: nn.Module, shards: bool = False) -> Optional[str]:
    """Returns a reason if the module was given another forward than its class's, or its class
    makes copies or pickles in a way that ours (Served) would not. shards: the forward that
    transformers puts on sharded linears may be around it."""
    package = getattr(type(module), "serving_package", PACKAGE)
    if package != PACKAGE:
        return f"its forward is replaced already, by {package}"
    own = own_class(module)
    for name in OF_COPIES:
        if getattr(own, name, None) is not getattr(nn.Module, name, None):
            return f"its class is copied and pickled in a way of its own ({name})"
    bound = module.__dict__.get("forward")
    if bound is None or _is_of_a_layer(bound):
        return None
    function = _function(bound)
    if function in (own.forward, type(module).forward):  # `kernels` puts it where it has no kernel
        return None
    sharded = own_of_shards(module, bound)
    if shards and getattr(sharded, "__func__", None) is own.forward:
        return None
    if hasattr(module, "_hf_hook"):
        return "has an accelerate hook (offloading, or several devices)"
    where = getattr(function, "__module__", None) or type(function).__module__
    return f"its forward is replaced already, by {where}"


# -- weights that are sharded


@contextlib.contextmanager
def as_gathered(modules: Named) -> Iterator[None]:
    """Replaces weights that FSDP2 shards by tensors without values, of the whole weight's shape.

    Replaced layers check their weights at every call, so one that stays sharded in the forward (as
    with tensor parallelism below FSDP2) runs the module's own forward.
    """
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    kept, stand_ins = [], {}
    for root in [module for _, module in modules if isinstance(module, fsdp)]:
        for _, module in named_modules(root):
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
    if "deepspeed" in sys.modules and any([hasattr(x, "ds_id") for x in module.parameters()]):
        return "is partitioned by ZeRO-3"
    return None
