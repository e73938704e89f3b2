"""Routers of transformers' mixtures, and blocks that add a shared expert to routed ones.

Which form a module has is told by router_trial.py and block_trial.py. The parts of a block stay
modules that are called, so that hooks on them, which record a router's logits or sum over ranks,
see what they saw.
"""

import functools
from typing import Callable, Dict, List, Optional, Union

import torch
from torch import nn

from ..experts import ops_shared, ops_topk
from ..experts.api_topk import fused_topk
from ..layers.pinned import has_values
from ..layers.plain import PLAIN_TENSORS, parameters_of, why_not_tensor
from ..layers.untouched import untouched
from ..runtime import dispatch
from ..runtime.dtypes import HALF
from .block_trial import Block, block_form, gates_among, with_shared
from .code import Refused
from .report import Row
from .router_trial import DTYPES, Router, router_form, weight_among
from .serving import is_of_transformers, is_served, own_class, serve, why_not_on, why_replaced

LAYERS = {Router: "fused_topk", Block: "add_shared"}


def _tensors(router: nn.Module, form: Router) -> tuple:
    """weight, bias and added; None for one that there is not."""
    names = form.choice.weight, form.choice.bias, form.choice.added
    return tuple([None if name is None else getattr(router, name) for name in names])


def _choose(router: nn.Module, form: Router, x: torch.Tensor) -> Optional[tuple]:
    """(logits [T, E], weights [T, K], ids [T, K]): what a router returns; None where that is its
    own forward's to say."""
    choice = form.choice
    if why_not_router(router, form) or x.ndim not in ((2,) if choice.flat else (2, 3)):
        return None
    tensors = _tensors(router, form)
    weight, bias, _ = tensors
    if x.dtype is not weight.dtype or x.dtype not in DTYPES or x.shape[-1] != choice.width:
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
    return logits, weights, ids


def _add_shared(block: nn.Module, form: Block, x: torch.Tensor) -> Optional[torch.Tensor]:
    """A block's output; None where that is its own forward's to say."""
    w_gate = _gate_of(block, form)
    modules = block._modules
    if w_gate is None or x.dtype is not w_gate.dtype or x.ndim != 3:
        return None
    if any([modules.get(name) is None for name in form.parts]):
        return None
    if not dispatch.serves(ops_shared.FAMILY, "shared_fwd", x):
        return None
    return with_shared(modules, form.parts, x, w_gate, ops_shared.add_shared)


@functools.lru_cache(maxsize=1024)
def _forward(form: Union[Router, Block]) -> Callable:
    """A forward for the modules of a class: ours, or the class's own where they may differ."""
    kind, argument, compute = form.kind, form.argument, _COMPUTE[type(form)]
    pinned, guards, checks = form.pinned, form.guards, form.checks

    def forward(self, *args, **kwargs):
        x = args[0] if len(args) == 1 else kwargs.get(argument)
        if (
            len(args) + len(kwargs) == 1
            and type(x) in PLAIN_TENSORS
            and not torch.is_autocast_enabled(x.device.type)
            and untouched()
            and pinned.unchanged(self)
            and has_values(self, guards)
            and (not checks or _hold(checks, self, {argument: x}))
        ):
            found = compute(self, form, x)
            if found is not None:
                return found
        return kind.forward(self, *args, **kwargs)

    forward.__wrapped__ = kind.forward
    return forward


def _hold(checks: tuple, module: nn.Module, given: dict) -> bool:
    return not torch.compiler.is_compiling() and all([check(module, given) for check in checks])


_COMPUTE = {Router: _choose, Block: _add_shared}


def _gate_of(block: nn.Module, form: Block) -> Optional[torch.Tensor]:
    """The weight [1, H] of a shared expert's gate, if calling the gate is no more than a product
    with it."""
    found = parameters_of(block._modules.get(form.parts.gate))
    if found is None or found[1] is not None or found[0].shape[0] != 1:
        return None
    return found[0]


def form_of(module: nn.Module) -> Union[Router, Block, None]:
    """The form of a router, or of a block with a shared expert; None of any other module. Raises
    Refused."""
    if own_class(module).__module__.split(".")[0] == "torch":  # most modules of a model
        return None
    weight = weight_among(module)
    if weight is not None:
        return router_form(module, weight)
    return block_form(module) if gates_among(module) else None


def why_not_router(router: nn.Module, form: Router) -> Optional[str]:
    """Why a router of a known class is not served; None if it is."""
    weight, *biases = tensors = _tensors(router, form)
    for name, tensor in zip(("its weight", "its bias", "its bias"), tensors):
        reason = why_not_tensor(tensor)
        if reason is not None:
            return f"{name} {reason}"
    if weight.shape != (form.choice.experts, form.choice.width):
        return "its weight has another shape"
    return _why_not_dtype(weight, ops_topk.FAMILY, "topk_fwd")


def _why_not_dtype(weight: torch.Tensor, family: str, operation: str) -> Optional[str]:
    reason = why_not_on(weight.device, family, operation)
    if reason is None and weight.dtype not in HALF:
        return f"its weight is {str(weight.dtype).replace('torch.', '')}, not bfloat16 or float16"
    return reason


def _why_not_block(block: nn.Module, form: Block) -> Optional[str]:
    name, w_gate = form.parts.gate, _gate_of(block, form)
    if w_gate is None:
        return f"{name} is no plain product"
    reason = why_not_tensor(w_gate)
    if reason is not None:
        return f"{name} has a weight that {reason}"
    return _why_not_dtype(w_gate, ops_shared.FAMILY, "shared_fwd")


def resembles(name: str) -> bool:
    """A class of this name is a router or a block of experts: one that is left alone has a row."""
    return any(word in name.lower() for word in ("router", "moe"))


_WHY_NOT = {Router: why_not_router, Block: _why_not_block}


def serve_blocks(model: nn.Module) -> List[Row]:
    """Serves all routers, and blocks with a shared expert, that are of a known form."""
    rows, refused = [], {}
    for name, module in model.named_modules():
        row = None if is_served(module) else _serve(name, module, refused)
        rows += [] if row is None else [row]
    return rows


def _serve(name: str, module: nn.Module, refused: Dict[tuple, str]) -> Optional[Row]:
    """Serves a module if it is of a known form. `refused`: what others of a class were left for,
    which is looked at once in a model."""
    kind = own_class(module)
    key = kind, weight_among(module), tuple(module._modules)
    form, reason = None, refused.get(key)
    try:
        form = form_of(module) if reason is None else None
    except Refused as why:
        reason = refused[key] = str(why)
    except Exception as error:  # a module of a kind never seen must not stop the others
        reason = refused[key] = f"looking at it raises {type(error).__name__}"
    if form is None:
        if reason is None or not resembles(kind.__name__):
            return None
        layer = "fused_topk" if key[1] is not None else "add_shared"
        return Row(name, kind.__name__, layer, None, reason, is_of_transformers(module))
    layer = LAYERS[type(form)]
    reason = why_replaced(module) or _WHY_NOT[type(form)](module, form)
    if reason is None:
        serve(module, layer, _forward(form))
    return Row(name, type(module).__name__, layer, None, reason)
