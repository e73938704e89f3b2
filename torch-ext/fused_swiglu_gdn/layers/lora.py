"""Projections with LoRA adapters of the peft package, several of one tensor in few launches.

A module is served while it is what kernelize has looked at: PEFT's own Linear over a plain frozen
nn.Linear, or over a module that is called, such as transformers' FP8Linear or bitsandbytes'
Linear4bit, with one active adapter that is not merged, not disabled and no variant of LoRA. All
else is asked at every call, and left to PEFT's own forward.
"""

import functools
from typing import Callable, List, NamedTuple, Optional, Sequence

import torch
from torch import nn

from ..lora.call import MOST
from ..lora.ops import adapted
from ..runtime import dispatch
from ..runtime.ops import autocast
from .plain import HOOKS, OWN, PLAIN_TENSORS, is_plain, parameters_of, torch_unpatched

LAYER = "LoraLinear"  # what a served module's class is served as
FORMS: dict = {}  # classes of which modules are served
# tokens, below which the modules are called: an estimate. From 4,096 on steps take .48 to .57 of
# PEFT's time (lora.json)
FEWEST = 128


class Parts(NamedTuple):
    """Weights of a module with an adapter; the weight is None where its base layer is called."""

    weight: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]
    down: torch.Tensor
    up: torch.Tensor
    scale: float
    drop: float


def parts_of(module: nn.Module) -> Optional[Parts]:
    """The weights of a served module in its present state, or None if it must be called."""
    attributes = module.__dict__
    if type(module).__dict__.get("served_as") != LAYER or any(map(attributes.get, HOOKS)):
        return None
    if any(map(attributes.__contains__, OWN)) or attributes["_disable_adapters"]:
        return None
    if attributes["merged_adapters"] or not attributes.get("cast_input_dtype_enabled", True):
        return None
    name = attributes["_active_adapter"]
    if not isinstance(name, str):
        if len(name) != 1:
            return None
        name = name[0]
    inner = attributes["_modules"]
    down, up = inner["lora_A"]._modules.get(name), inner["lora_B"]._modules.get(name)
    if down is None or up is None or name in attributes["lora_variant"]:
        return None
    dropout, drop = inner["lora_dropout"]._modules.get(name), 0.0
    if type(dropout) is nn.Dropout and is_plain(dropout):
        drop = dropout.p if dropout.training else 0.0
    elif type(dropout) is not nn.Identity:
        return None
    base, calls = inner["base_layer"], type(inner["base_layer"]) is not nn.Linear
    found = parameters_of(down, up) if calls else parameters_of(down, up, base)
    scale = attributes["scaling"].get(name)
    if found is None or type(scale) not in (float, int):
        return None
    (a, none), (b, bias_of_up), (weight, bias) = (*found, (None, None))[:3]
    if none is not None or bias_of_up is not None:
        return None
    if any([x is not None and x.requires_grad for x in (weight, bias)]):
        return None
    return Parts(weight, bias, a, b, float(scale), float(drop)) if drop < 1 else None


def is_step(module: nn.Module) -> bool:
    """True in a training step, and in the forward of a checkpoint, which has no gradient: it draws
    the dropouts that the forward in the backward pass repeats."""
    return torch.is_grad_enabled() or getattr(module, "training", False)


def projections(
    x: torch.Tensor, linears: Sequence[nn.Module], call: Optional[Callable] = None
) -> Optional[List[torch.Tensor]]:
    """In a step (is_step) linear(x) of several modules, of which some are served, or None if all
    must be called. call(x, *modules): calls several modules, such as base layers."""
    if type(x) not in PLAIN_TENSORS or x.is_nested or x.ndim < 2:
        return None
    if x.numel() < FEWEST * x.shape[-1] and dispatch.forced is None:
        return None
    if torch.compiler.is_compiling() or not torch_unpatched():
        return None
    parts = [parts_of(linear) for linear in linears]
    given, (x,) = x, autocast(x)  # PEFT's adapters are in autocast's dtype, ours still in fp32
    K, dtype = x.shape[-1], x.dtype
    if dtype is not torch.bfloat16 and dispatch.forced is None:
        return None
    there = [i for i, p in enumerate(parts) if p is not None and p.down.shape[1] == K]
    places = [i for i in there if parts[i].weight is not None and parts[i].weight.dtype is dtype]
    known = not places
    if known and dtype is given.dtype:  # products of base layers are in theirs
        places = [i for i in there if parts[i].weight is None]
    places = places[:MOST]
    found = [parts[i] for i in places]
    if not any([p.down.requires_grad or p.up.requires_grad for p in found]):
        return None
    weights = [p.weight for p in found]
    if known:
        bases = [linears[i]._modules["base_layer"] for i in places]
        ys = call(given, *bases) if call else [base(given) for base in bases]
        weights = [y.reshape(-1, y.shape[-1]) for y in ys]
    ys = adapted(
        x, weights, [p.bias for p in found],
        [p.down for p in found], [p.up for p in found], tuple([p.scale for p in found]),
        tuple([p.drop for p in found]), known,
    )  # fmt: skip
    if ys is None:
        return None
    of = dict(zip(places, ys))
    return [of[i] if i in of else linear(given) for i, linear in enumerate(linears)]


@functools.cache
def forward_of(own: type) -> Callable:
    """The forward of a served module of PEFT's class."""
    call = own.forward
    FORMS[own] = LAYER

    @functools.wraps(call)
    def forward(self, x, *args, **kwargs):
        if not args and not kwargs and is_step(self):
            found = projections(x, (self,))
            if found is not None:
                return found[0]
        return call(self, x, *args, **kwargs)

    return forward
