"""Compiles the kernels of a prompt and of a token before the prompt, in parallel.

One decoder layer of each kind runs ahead of a prompt without starting a kernel: on the prompt's own
hidden states and on a copy of its empty cache, first for the prompt and then for a token. The
kernels that it would launch are compiled meanwhile (runtime/ahead.py). All its results are
uninitialised and are discarded. It happens for the first prompt of a model, and once for each later
batch size and order of lengths, for which kernels may have other forms.
"""

import contextvars
import copy
import logging
import math
from typing import Any, Dict, List, Optional, Set

import torch
from torch import nn

from ..layers.plain import served_as
from ..runtime import device
from .caches import is_empty, is_of
from .capture import Graph, capturing
from .watch import HOOK

logger = logging.getLogger(__name__)


def expect_prompt(model: nn.Module, met: Set[tuple]) -> None:
    """Rehearses when the first kernel-backed layer of the model is called next with a prompt.

    The prompt's shape must be new; it is added to `met`.
    """
    layers = [m for m in model.modules() if served_as(m) == "DecoderLayer"]
    if not any(map(_is_dense, layers)):
        return

    def rehearse_once(layer: nn.Module, args: tuple, kwargs: Optional[dict] = None) -> None:
        if torch.compiler.is_compiling():
            return  # it traces no change of the hooks: a later call takes this one away
        _unhook(layer)
        if torch.is_grad_enabled() or not args or not kwargs:
            return  # without keywords another thread has taken the hook away meanwhile
        x, cache = args[0], _cache_of(kwargs)
        if not device.is_gpu(x.device) or Graph.busy():
            return
        past = None if cache is None else kwargs[cache]
        if x.ndim != 3 or x.shape[1] < 2 or past is None or past.offloading:
            return
        if is_empty(past):
            shape = x.shape[0], x.shape[1].bit_length()
            if shape in met:
                return
            met.add(shape)
            try:  # in a context of its own, where nobody records what the layers give
                with capturing:  # code that is loaded breaks another thread's capture
                    contextvars.Context().run(rehearse, _kinds(layers), x, kwargs)
            except Exception as error:
                logger.debug("kernels are compiled one after another: %s", error)

    # not by torch's function: it counts hooks, and graphs of other caches look at the count
    layers[0]._forward_pre_hooks[HOOK] = rehearse_once
    layers[0]._forward_pre_hooks_with_kwargs[HOOK] = True


def expect_none(model: nn.Module) -> None:
    """Removes the hook of a prompt that failed before it reached a layer."""
    for module in model.modules():
        _unhook(module)


def _unhook(layer: nn.Module) -> None:
    layer._forward_pre_hooks.pop(HOOK, None)
    layer._forward_pre_hooks_with_kwargs.pop(HOOK, None)


def rehearse(layers: List[nn.Module], x: torch.Tensor, given: Dict[str, Any]) -> None:
    """Compiles the kernels that the layers launch for a prompt and for a token after it.

    x: the prompt [B, T, hidden]; given: the layers' keywords.
    """
    from ..runtime.ahead import compiled_ahead  # where there is no Triton nothing is served

    name = _cache_of(given)
    cache = copy.deepcopy(given[name])
    # one layer's mask may not be another's, and none is as good
    given = {**given, name: cache, "attention_mask": None}
    with compiled_ahead():
        for layer in layers:
            layer.forward(x, **given)
            made = [y for y in cache.layers if isinstance(getattr(y, "keys", None), torch.Tensor)]
            slots = [y.keys.shape[2] for y in made if not getattr(y, "is_sliding", False)]
            if min(slots, default=math.inf) > x.shape[1]:  # else a token would be past the cache
                most = max([y.keys.shape[2] for y in made], default=0)
                layer.forward(x[:, -1:].contiguous(), **_of_a_token(layer, x, given, most))


def _of_a_token(layer: nn.Module, x: torch.Tensor, given: dict, slots: int) -> dict:
    """The keywords of a layer for the token after the prompt; their values are irrelevant."""
    found = dict(given)
    tables, positions = given.get("position_embeddings"), given.get("position_ids")
    if tables is not None:
        found["position_embeddings"] = tuple(x[..., -1:, :].contiguous() for x in tables)
    if positions is not None:
        found["position_ids"] = positions[..., -1:].contiguous()
    if slots and not any(hasattr(part, "conv1d") for part in layer.children()):
        shape = (x.shape[0], 1, 1, slots)
        found["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=x.device)
    return found


def _cache_of(given: dict) -> Optional[str]:
    """The keyword whose value is a static cache, or None."""
    return next((name for name, value in given.items() if is_of(value, "StaticCache")), None)


def _kinds(layers: List[nn.Module]) -> List[nn.Module]:
    """The first layer of each kind, without mixtures of experts, which need valid ids."""
    found: dict = {}
    for layer in layers:
        if _is_dense(layer):
            parts = tuple((n, type(part), *_words(part)) for n, part in layer.named_modules())
            sizes = tuple((name, x.shape, x.dtype) for name, x in layer.named_parameters())
            found.setdefault((parts, sizes, _order(layer)), layer)
    return list(found.values())


def _order(layer: nn.Module) -> tuple:
    """The order of the MLP's weights in memory, for which Hopper's kernel is specialised."""
    weights = [list(part.parameters()) for part in layer.children() if _is_mlp(part)]
    places = [[x.data_ptr() for x in each] for each in weights]
    return tuple(tuple(map(sorted(each).index, each)) for each in places)


def _words(part: nn.Module) -> list:
    """Attributes that distinguish kinds: a type of attention, but not a layer's index."""
    return [item for item in part.__dict__.items() if item[1].__class__ in (bool, str)]


def _is_dense(layer: nn.Module) -> bool:
    return any(map(_is_mlp, layer.children()))


def _is_mlp(part: nn.Module) -> bool:
    return served_as(part) == "SwiGLUMLP"
