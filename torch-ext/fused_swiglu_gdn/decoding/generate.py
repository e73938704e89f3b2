"""A model's `generate`, and what kernelize sets for it: that and `get_compiled_call`.

transformers' generate looks up its loops on the class of a model, and refuses drafts if that class
has a recurrent state. So it is given a view: an object of a subclass that shares the attributes of
the model, whose loops are those of late.py and drafts.py, and which hands them the inputs of a
token that a graph has made.
"""

import functools
import inspect
import sys
from typing import Callable, NamedTuple, Optional, Tuple

from torch import nn

from ..layers.plain import Named, named_modules
from .caches import cache_among
from .drafts import ASSISTED, GENERATOR, assisted, generator, is_stateful, why_not_drafts
from .graph_rules import PREPARE, why_not_model
from .graphs import SEAM, Decoding, Step, decoding_of
from .in_place import InPlace, take_back
from .inputs import POSITIONS
from .late import LOOP, MODES, UTILS, is_own, sample, why_not_late
from .rehearsal import expect_none

MASKS, CREATE_MASKS = "transformers.masking_utils", "create_masks_for_generate"
UPDATE = "_update_model_kwargs_for_generation"
UPDATE_TAKES = ("self", "outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens")


class Served(NamedTuple):
    """Facts for a report about decoding."""

    module: str  # the path of the module that generates
    kind: str  # its class
    note: Optional[str]
    reason: Optional[str]  # why it has no graphs


def serve_graphs(model: nn.Module) -> Served:
    """Makes transformers' generate decode with CUDA graphs if it has a static cache."""
    modules = named_modules(model)
    restore_graphs(modules)
    found = _generating(modules)
    if found is None:
        return Served("", type(model).__name__, None, "no CUDA graph: it cannot generate")
    name, inner = found
    kind, reason = type(inner), why_not_model(inner)
    if reason is not None:
        return Served(name, kind.__name__, None, f"no CUDA graph: {reason}")
    setattr(inner, SEAM, Decoding(inner))
    waits = why_not_late(kind)
    if Generate.name in inner.__dict__:
        waits = "generate is set on the model"
    if waits is None:
        setattr(inner, Generate.name, Generate(inner))
    note = "CUDA graph" if waits is None else f"CUDA graph, and a wait in each token: {waits}"
    return Served(name, kind.__name__, note, None)


def serve_drafts(modules: Named) -> bool:
    """Lets generate of the model, or of one inside it, take drafts where transformers refuses them
    for its class; returns whether it does."""
    for _, module in modules:
        if is_stateful(module) and hasattr(type(module), Generate.name):
            name, own = Generate.name, module.__dict__
            if name not in own and why_not_drafts(module, now=False) is None:
                setattr(module, name, Generate(module))
            return type(own.get(name)) is Generate and why_not_drafts(module) is None
    return False


def restore_graphs(modules: Named) -> int:
    """Undoes serve_graphs and serve_drafts; returns the number of modules that had graphs."""
    served = 0
    for _, module in modules:
        take_back(module, Generate)
        if SEAM in module.__dict__ and take_back(module, Decoding):
            expect_none(module)
            served += 1
    return served


def _generating(modules: Named) -> Optional[Tuple[str, nn.Module]]:
    """The outermost module whose generate calls get_compiled_call, with its name."""
    for name, module in modules:
        if hasattr(type(module), SEAM) and hasattr(type(module), PREPARE):
            return name, module
    return None


class Generate(InPlace):
    """Replaces a model's generate."""

    name = "generate"

    def __init__(self, model: nn.Module):
        super().__init__(model)
        own = type(model).generate
        self.__doc__, self.__signature__ = own.__doc__, inspect.signature(own.__get__(model))

    def __call__(self, *args, **options):
        model = self.model
        kind = type(model)
        others = options.get("custom_generate"), options.get("cache_implementation") == "paged"
        if len(args) > 2 or any(others) or not is_own(kind, self.name):
            return kind.generate(model, *args, **options)
        view = object.__new__(_view_class(kind))
        object.__setattr__(view, "__dict__", model.__dict__)
        object.__setattr__(view, "viewed", model)
        return kind.generate(view, *args, **options)


class View:
    """A model for transformers' generate, with other loops. A call of it is one of the model."""

    def __init_subclass__(cls, **kwargs):
        """Skips the hook that the model's class runs for its subclasses."""

    def __call__(self, *args, **options):
        return self.viewed(*args, **options)


@functools.cache
def _view_class(own: type) -> type:
    loops = {LOOP, ASSISTED, *getattr(sys.modules[UTILS], MODES).values()}
    # other ways to decode are code of the Hub
    members = {name: _loop(own, name) for name in loops if hasattr(own, name)}
    members.update({name: getattr(own, name) for name in ("__doc__", "__module__", "__qualname__")})
    members["_is_stateful"] = property(lambda view: _refuses_drafts(view.viewed))
    members[GENERATOR] = functools.partialmethod(generator, own)
    update = getattr(own, UPDATE, None)
    known = is_own(own, PREPARE, UPDATE) and not hasattr(own, CREATE_MASKS)
    if known and tuple(inspect.signature(update).parameters) == UPDATE_TAKES:
        members.update({UPDATE: _updated, CREATE_MASKS: _masks})
    return type(own)(own.__name__, (View, own), {"__slots__": ("viewed",), **members})


def _refuses_drafts(model: nn.Module) -> bool:
    return is_stateful(model) and why_not_drafts(model) is not None


def _loop(own: type, name: str) -> Callable:
    """A loop of a view. Those that have no other get the model itself."""

    @functools.wraps(getattr(own, name))
    def loop(view, *args, **options):
        model = view.viewed
        for each in options.get("logits_processor", ()):
            if getattr(each, "model", None) is view:  # guidance, which asks it again
                each.model = model
        if name == LOOP:
            return sample(view, model, *args, **options)
        if name == ASSISTED:
            return assisted(view, model, *args, **options)
        return getattr(type(model), name)(model, *args, **options)

    return loop


# what transformers' loop makes the inputs of the next token of: where the graph of this one has
# made them, these


def _updated(view: nn.Module, outputs, model_kwargs, *args, **options):
    """The method UPDATE of a view, called with the output of a token."""
    model = view.viewed
    own = functools.partial(getattr(type(model), UPDATE), model, outputs)
    step = step_of(model, model_kwargs)
    if step is None or model_kwargs.get(POSITIONS) is None or not step.has_made(outputs):
        return own(model_kwargs, *args, **options)
    found = own({**model_kwargs, POSITIONS: None}, *args, **options)
    return {**found, POSITIONS: step.ahead.positions}


def _masks(view: nn.Module, *args, **options):
    """The method CREATE_MASKS of a view, which stands for transformers' function of that name."""
    step = step_of(view.viewed, options)
    if step is not None and step.makes_masks(options.get(POSITIONS)):
        return step.mask
    return getattr(sys.modules[MASKS], CREATE_MASKS)(*args, **options)


def step_of(model: nn.Module, inputs: dict) -> Optional[Step]:
    """The step on the cache among the inputs, if it has a graph that advances them."""
    decoding, cache = decoding_of(model), cache_among(inputs)[1]
    if decoding is None or cache is None or PREPARE in model.__dict__:
        return None
    step = decoding.steps.get(cache)
    return step if step is not None and step.ahead is not None else None
