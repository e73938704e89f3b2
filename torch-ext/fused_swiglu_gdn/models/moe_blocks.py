"""Routers of transformers' mixtures, and blocks that add a shared expert to routed ones.

router_trial.py and block_trial.py determine what a module computes. The parts of a block are still
called as modules, so that hooks on them, which record a router's logits or sum over ranks, see the
same tensors.
"""

import functools
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ..experts import ops_shared, ops_topk
from ..experts.api_topk import fused_topk
from ..layers.pinned import Pinned
from ..layers.plain import PLAIN_TENSORS, parameters_of, why_not_tensor
from ..layers.untouched import torch_unpatched, why_patched
from ..runtime import dispatch
from ..runtime.dtypes import HALF
from .block_trial import Parts, find_parts, gates_among, sizes_of, with_shared
from .code import CHOICES, Refused
from .reader import read
from .report import Row
from .router_trial import DTYPES, Choice, find_choice, shapes_of, weight_among
from .serving import (
    is_of_transformers,
    is_served,
    named_modules,
    own_class,
    serve,
    why_not_on,
    why_replaced,
)
from .trial import form_key, only_argument, plain_values, remembered

LAYERS = {Choice: "fused_topk", Parts: "add_shared"}


class Form(NamedTuple):
    """A class of routers or of blocks, with certain values of its attributes."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    checks: Tuple[Callable, ...]  # (module, arguments by name) -> whether a call is one of ours
    argument: str
    found: Union[Choice, Parts]


_found: Dict[tuple, Union[Choice, Parts, str]] = {}


def form_of(module: nn.Module) -> Optional[Form]:
    """The form of a router, or of a block with a shared expert; None for any other module.

    Raises Refused if it has no known form.
    """
    kind = own_class(module)
    if kind.__module__.split(".")[0] == "torch":
        return None
    if weight_among(module) is not None:
        find, facts, allowed, more = find_choice, shapes_of(module), ("by_dtype",), CHOICES
    elif gates_among(module):
        find, facts, allowed, more = find_parts, sizes_of(module), (), ()
    else:
        return None
    source = read(kind, module, *allowed, more=more)
    argument, values = only_argument(source), plain_values(module, {*source.reads} - {"training"})
    for name in source.reads:
        if name not in values and name != "training" and name not in dict(facts):
            raise Refused(f"its forward reads {name}, which is no number, word or flag")
    patched = why_patched()
    if patched is not None:
        raise Refused(patched)
    key = (facts, *form_key(module, kind, source, values))
    found = remembered(_found, key, find, module, kind, source, values)
    return Form(kind, source.pinned, tuple(values.items()), source.checks, argument, found)


def _tensors(router: nn.Module, choice: Choice) -> tuple:
    """weight, bias and added; None for each that is missing."""
    names = choice.weight, choice.bias, choice.added
    return tuple([None if name is None else getattr(router, name) for name in names])


def _choose(router: nn.Module, choice: Choice, x: torch.Tensor) -> Optional[tuple]:
    """logits [T, E], weights [T, K] and ids [T, K] in the order of the router.

    None if the class's own forward must run.
    """
    tensors = weight, bias, _ = _tensors(router, choice)
    if _why_not_tensors(tensors, choice) or x.ndim not in choice.dims:
        return None
    if x.dtype is not weight.dtype or x.dtype not in DTYPES or x.shape[-1] != choice.shape[1]:
        return None
    logits = choice.logits(x, tensors)
    try:
        weights, ids = fused_topk(
            logits,
            choice.top_k,
            scoring=choice.scoring,
            renormalize=choice.renormalize,
            bias=bias,
            scale=choice.scale,
            dtype=choice.dtype or x.dtype,
        )
    except (TypeError, ValueError):  # what does not fit is its own forward's to take or refuse
        return None
    out, (first, second, third) = (logits, weights, ids), choice.order
    return out[first], out[second], out[third]


def _add_shared(block: nn.Module, parts: Parts, x: torch.Tensor) -> Optional[torch.Tensor]:
    """A block's output, or None if the class's own forward must run."""
    w_gate, modules = _gate_of(block, parts), block._modules
    if w_gate is None or x.dtype is not w_gate.dtype or x.ndim != 3 or not x.is_contiguous():
        return None
    if None in tuple(map(modules.get, parts)):
        return None
    if not dispatch.serves(ops_shared.FAMILY, "shared_fwd", x):
        return None
    return with_shared(modules, parts, x, w_gate, ops_shared.add_shared)


_COMPUTE = {Choice: _choose, Parts: _add_shared}


@functools.lru_cache(maxsize=1024)
def _forward(form: Form) -> Callable:
    """Returns a forward for the modules of a class: ours, or the class's own for other calls."""
    kind, pinned, guards, checks, argument, found = form
    compute = _COMPUTE[type(found)]

    def forward(self, *args, **kwargs):
        x = args[0] if len(args) == 1 else kwargs.get(argument)
        if (
            len(args) + len(kwargs) == 1
            and type(x) in PLAIN_TENSORS
            and not torch.is_autocast_enabled(x.device.type)
            and torch_unpatched()
            and pinned.unchanged(self, guards)
            and (not checks or _hold(checks, self, {argument: x}))
        ):
            out = compute(self, found, x)
            if out is not None:
                return out
        return kind.forward(self, *args, **kwargs)

    forward.__wrapped__ = kind.forward
    return forward


def _hold(checks: tuple, module: nn.Module, given: dict) -> bool:
    return not torch.compiler.is_compiling() and all([check(module, given) for check in checks])


def _gate_of(block: nn.Module, parts: Parts) -> Optional[torch.Tensor]:
    """The weight [1, H] of a shared expert's gate, if calling the gate is only a product with
    it."""
    found = parameters_of(block._modules.get(parts.gate))
    if found is None:
        return None
    weight, bias = found[0]
    return weight if bias is None and weight.shape[0] == 1 else None


def why_not_router(router: nn.Module, choice: Choice) -> Optional[str]:
    """Reason why a router of a known class is not replaced, or None."""
    return _why_not_tensors(_tensors(router, choice), choice)


def _why_not_tensors(tensors: tuple, choice: Choice) -> Optional[str]:
    for name, tensor in zip(("its weight", "its bias", "its bias"), tensors):
        reason = why_not_tensor(tensor)
        if reason is not None:
            return f"{name} {reason}"
    if tensors[0].shape != choice.shape:
        return "its weight has another shape"
    return _why_not_dtype(tensors[0], ops_topk.FAMILY, "topk_fwd")


def _why_not_dtype(weight: torch.Tensor, family: str, operation: str) -> Optional[str]:
    reason = why_not_on(weight.device, family, operation)
    if reason is None and weight.dtype not in HALF:
        return f"its weight is {str(weight.dtype).replace('torch.', '')}, not bfloat16 or float16"
    return reason


def _why_not_block(block: nn.Module, parts: Parts) -> Optional[str]:
    w_gate = _gate_of(block, parts)
    if w_gate is None:
        return f"{parts.gate} is no plain product"
    reason = why_not_tensor(w_gate)
    if reason is not None:
        return f"{parts.gate} has a weight that {reason}"
    return _why_not_dtype(w_gate, ops_shared.FAMILY, "shared_fwd")


_WHY_NOT = {Choice: why_not_router, Parts: _why_not_block}


def serve_blocks(model: nn.Module) -> List[Row]:
    """Replaces all routers, and blocks with a shared expert, of a known form."""
    rows = []
    for name, module in named_modules(model):
        kind = type(module)
        if len(kind.__bases__) == 1 and kind.__module__.startswith("torch."):
            continue  # most modules of a model
        if len(kind.__bases__) == 1 or not is_served(module):
            rows.append(_serve(name, module))
    return [row for row in rows if row is not None]


def _serve(name: str, module: nn.Module) -> Optional[Row]:
    """Replaces a module of a known form. Others get a row of the report if their class's name
    suggests it."""
    kind = own_class(module)
    try:
        form = form_of(module)
    except Exception as error:  # a module of a kind never seen must not stop the others
        word, layer = ("moe", "add_shared") if module._modules else ("router", "fused_topk")
        if word not in kind.__name__.lower():
            return None
        known = isinstance(error, Refused)
        reason = str(error) if known else f"looking at it raises {type(error).__name__}"
        return Row(name, kind.__name__, layer, None, reason, is_of_transformers(module))
    if form is None:
        return None
    layer = LAYERS[type(form.found)]
    reason = why_replaced(module) or _WHY_NOT[type(form.found)](module, form.found)
    if reason is None:
        serve(module, layer, _forward(form))
    return Row(name, type(module).__name__, layer, None, reason)
