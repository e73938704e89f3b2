"""Compiling what a prompt and a token launch, ahead of the prompt and all at once.

One decoder layer of each kind runs ahead of a prompt without starting a kernel: on the prompt's own
hidden states and on a copy of its empty cache, first for the prompt and then for a token. What it
would launch is compiled meanwhile (runtime/ahead.py). Nothing that it computes is used: all of it
is garbage. So the layer ends at a part that we do not serve whole, such as a mixture of experts,
which garbage might choose out of bounds.
"""

import contextlib
import contextvars
import copy
import logging
import threading
from typing import Any, Dict, Iterator, List, Set, Tuple

import torch
from torch import nn

from ..runtime import device
from .capture import capturing
from .serving import is_served

STATIC = ("transformers.cache_utils", "StaticCache")
PARTS = ("SwiGLUMLP", "RMSNorm", "Attention", "GatedDeltaNet")  # our layers
PLACE = -1  # of our hook among a layer's; torch counts those that are registered from 0 on

logger = logging.getLogger(__name__)


def expect_prompt(model: nn.Module, known: Set[Tuple[int, int]]) -> None:
    """Rehearses when the first of the model's layers that are served is called next, unless kernels
    for as many rows and about as many tokens are known."""
    first = next((m for m in model.modules() if _serves(m, "DecoderLayer")), None)
    if first is None:
        return

    def on_call(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        for hooks in (layer._forward_pre_hooks, layer._forward_pre_hooks_with_kwargs):
            hooks.pop(PLACE, None)
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not args:
            return
        x, cache = args[0], kwargs.get("past_key_values")
        if not device.is_gpu(x.device) or x.ndim != 3 or x.shape[1] < 2 or not _is_empty(cache):
            return
        kind = x.shape[0], x.shape[1].bit_length()
        if kind not in known:
            known.add(kind)
            _rehearse_apart(_kinds(model), x, kwargs)

    # not registered: that would count as a change of hooks, which no graph outlives (watch.py)
    first._forward_pre_hooks[PLACE] = on_call
    first._forward_pre_hooks_with_kwargs[PLACE] = True


def _rehearse_apart(layers: List[nn.Module], x: torch.Tensor, given: Dict[str, Any]) -> None:
    """In a context of its own, where nobody records what layers give, and while nobody captures,
    which code that is loaded would break."""
    try:
        with capturing:
            contextvars.Context().run(rehearse, layers, x, given)
    except Exception as error:
        logger.debug("kernels are compiled one after another: %s", error)


def rehearse(layers: List[nn.Module], x: torch.Tensor, given: Dict[str, Any]) -> None:
    """Compiles what the layers launch for a prompt x [B, T, hidden], given to them with these
    keywords, and for a token after it."""
    from ..runtime.ahead import compiled_ahead  # where there is no Triton nothing is served

    cache = copy.deepcopy(given["past_key_values"])
    # one layer's mask may not be another's, and none is as good
    given = {**given, "past_key_values": cache, "attention_mask": None}
    with compiled_ahead():
        for layer in layers:
            with _ending(layer):
                layer.forward(x, **given)
            with _ending(layer):
                layer.forward(x[:, -1:].contiguous(), **_of_a_token(layer, x, given))


class _End(Exception):
    pass


@contextlib.contextmanager
def _ending(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer's forward ends in this thread where it comes to a part with weights that is
    not one of PARTS."""
    here = threading.get_ident()

    def end(part: nn.Module, args: tuple) -> None:
        if threading.get_ident() == here:
            raise _End

    parts = [p for p in layer.children() if any(True for _ in p.parameters())]
    parts = [p for p in parts if not (is_served(p) and p.served_as.endswith(PARTS))]
    for part in parts:
        part._forward_pre_hooks[PLACE] = end
    try:
        yield
    except _End:
        pass
    finally:
        for part in parts:
            part._forward_pre_hooks.pop(PLACE, None)


def _of_a_token(layer: nn.Module, x: torch.Tensor, given: dict) -> dict:
    """The keywords of a layer for the token after the prompt, whose values do not matter."""
    found = dict(given)
    tables, positions = given.get("position_embeddings"), given.get("position_ids")
    if tables is not None:
        found["position_embeddings"] = tuple(x[..., -1:, :].contiguous() for x in tables)
    if positions is not None:
        found["position_ids"] = positions[..., -1:].contiguous()
    slots = [getattr(each, "keys", None) for each in given["past_key_values"].layers]
    slots = [keys.shape[2] for keys in slots if isinstance(keys, torch.Tensor)]
    if slots and not any(hasattr(part, "conv1d") for part in layer.children()):
        shape = (x.shape[0], 1, 1, max(slots))
        found["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=x.device)
    return found


def _is_empty(cache: Any) -> bool:
    kind = type(cache)
    if (kind.__module__, kind.__name__) != STATIC or cache.offloading:
        return False
    for layer in cache.layers:
        if getattr(layer, "is_initialized", False):
            return False
        if any(getattr(layer, "has_previous_state", {}).values()):
            return False
    return True


def _kinds(model: nn.Module) -> List[nn.Module]:
    """The first layer of each kind."""
    found: dict = {}
    for layer in model.modules():
        if _serves(layer, "DecoderLayer"):
            parts = tuple((n, type(part), *_words(part)) for n, part in layer.named_modules())
            sizes = tuple((name, x.shape, x.dtype) for name, x in layer.named_parameters())
            found.setdefault((parts, sizes, _order(layer)), layer)
    return list(found.values())


def _order(layer: nn.Module) -> tuple:
    """In which order the weights of its MLP lie in memory: Hopper's kernel is compiled for it."""
    mlps = [part for part in layer.children() if _serves(part, "SwiGLUMLP")]
    places = [[x.data_ptr() for x in mlp.parameters()] for mlp in mlps]
    return tuple(tuple(map(sorted(each).index, each)) for each in places)


def _words(part: nn.Module) -> list:
    """Attributes that tell kinds apart: a type of attention, but not a layer's number."""
    return [item for item in part.__dict__.items() if item[1].__class__ in (bool, str)]


def _serves(module: nn.Module, layer: str) -> bool:
    return is_served(module) and module.served_as == layer
