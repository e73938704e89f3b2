"""Positions and masks of the next token, made by the graph of this one.

For each token transformers' loop makes positions and masks of attention anew, in more launches than
all else that it does. They follow from those of the token before: each position is one more, and
each mask has one more slot that is attended. So a graph advances the positions and masks that it
reads, and the loop gets them back as the inputs of the next token. They are what transformers would
have made, so the next token need not be a replay.
"""

import functools
import inspect
import sys
from typing import Any, List, Optional, Tuple

import torch
from torch import nn

from .caches import cache_among, full_windows, lengths_of
from .graph_rules import PREPARE
from .in_place import InPlace, take_back

MASKS, UTILS = "transformers.masking_utils", "transformers.generation.utils"
TAKES = ("self", "outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens")
IDS, POSITIONS, MASK = "input_ids", "position_ids", "attention_mask"
Inputs = List[Tuple[tuple, torch.Tensor]]  # ((name, key in a dict or None), tensor)


class Ahead:
    """Positions and masks that a graph reads and advances.

    cache: of which layers with full windows move their slots, and their masks with them.
    """

    def __init__(self, tensors: Inputs, cache: Any):
        self.positions = _named(tensors, POSITIONS)[0]
        self.masks = _named(tensors, MASK)  # [B, 1, 1, S]
        self.slots = [torch.arange(x.shape[-1], device=x.device) for x in self.masks]
        full = full_windows(cache)
        self.moving = {layer.max_cache_len for layer in full}
        # how many slots are filled, of a layer that is not full
        self.length = next(iter(lengths_of([x for x in cache.layers if x not in full])), None)

    def advance(self) -> None:
        """Makes those of the next token, which takes the first slot that is free."""
        self.positions.add_(1)
        for mask, slots in zip(self.masks, self.slots):
            attended = mask.dtype == torch.bool  # True, or 0 to add
            if len(slots) in self.moving:
                mask.copy_(mask.roll(-1, -1).masked_fill_(slots == slots[-1], attended))
            else:
                mask.masked_fill_(slots == self.length, attended)


def _named(tensors: Inputs, wanted: str) -> List[torch.Tensor]:
    return [x for (name, _), x in tensors if name == wanted]


def ahead_of(before: Inputs, tensors: Inputs, cache: Any) -> Optional[Ahead]:
    """Returns what a graph of a step can advance; None if the step has other inputs, or if they do
    not follow from those of the token before. The host waits for the answer.

    before, tensors: tensors of the same names and shapes; cache: of a step that has not run.
    """
    names = {name for (name, _), _ in tensors}
    if not {IDS, POSITIONS} <= names <= {IDS, POSITIONS, MASK}:
        return None
    found = Ahead(tensors, cache)
    if found.length is None and not all(len(slots) in found.moving for slots in found.slots):
        return None
    made = Ahead([(name, x.clone()) for name, x in before], cache)
    made.advance()
    pairs = zip((made.positions, *made.masks), (found.positions, *found.masks))
    return found if all(torch.equal(a, b) for a, b in pairs) else None


class Update(InPlace):
    """Replaces a model's _update_model_kwargs_for_generation, which the loop calls with the output
    of a token."""

    name = "_update_model_kwargs_for_generation"

    def __call__(self, outputs, model_kwargs, *args, **options):
        model = self.model
        own = functools.partial(getattr(type(model), self.name), model, outputs)
        step = step_of(model, model_kwargs)
        if step is None or model_kwargs.get(POSITIONS) is None or not step.has_made(outputs):
            return own(model_kwargs, *args, **options)
        found = own({**model_kwargs, POSITIONS: None}, *args, **options)
        return {**found, POSITIONS: step.ahead.positions}


class Masks(InPlace):
    """Stands for transformers' create_masks_for_generate, which looks for one on the model."""

    name = "create_masks_for_generate"

    def __call__(self, *args, **options):
        step = step_of(self.model, options)
        if step is not None and step.makes_masks(options.get(POSITIONS)):
            return step.mask
        return getattr(sys.modules[MASKS], self.name)(*args, **options)

    def __reduce__(self):
        return functools.partial, (getattr(sys.modules[MASKS], self.name),)

    @classmethod
    def is_own(cls, module: nn.Module, value: object) -> bool:
        own = getattr(sys.modules.get(MASKS), cls.name, None)
        return isinstance(value, functools.partial) and value.func is own and not value.args


def step_of(model: nn.Module, inputs: dict) -> Optional[Any]:
    """The step on the cache among the inputs, if it has a graph that advances them."""
    steps = getattr(model.__dict__.get("get_compiled_call"), "steps", {})
    cache = cache_among(inputs)[1]
    step = steps.get(cache) if cache is not None else None
    return step if step is not None and step.ahead is not None else None


def serve_ahead(model: nn.Module) -> None:
    """Lets transformers' loop take inputs that a graph has made, if the loop is a known one."""
    mixin = getattr(sys.modules.get(UTILS), "GenerationMixin", None)
    kind = type(model)
    update = getattr(kind, Update.name, None)
    known = all(getattr(kind, n, None) is getattr(mixin, n, n) for n in (PREPARE, Update.name))
    if not known or tuple(inspect.signature(update).parameters) != TAKES:
        return
    if any(name in model.__dict__ for name in (PREPARE, Update.name)) or hasattr(model, Masks.name):
        return
    if hasattr(sys.modules.get(MASKS), Masks.name):
        for each in (Update, Masks):
            setattr(model, each.name, each(model))


def restore_ahead(model: nn.Module) -> None:
    for each in (Update, Masks):
        take_back(model, each)
