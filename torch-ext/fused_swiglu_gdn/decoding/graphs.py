"""Decoding with CUDA graphs: kernelize(model, cuda_graphs=True).

transformers' generate calls the model's `get_compiled_call` for the decoding function if its cache
is static. A kernelized model returns `Decoding.step`: the first token of a cache runs eagerly on a
side stream, the second is captured, and later ones replay the graph on copies of their inputs. A
graph belongs to one cache and is freed with it.
"""

import logging
import weakref
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import nn

from ..layers.replay import rings_begin
from .caches import cache_among, drop_kinds, full_windows, why_not_cache, why_not_yet
from .capture import Graph
from .choosing import Choice, Chooser, Token
from .graph_rules import PASSING, why_eager, why_not_model, why_not_now
from .in_place import InPlace
from .inputs import MASK, Ahead, ahead_of, mapped, parts
from .output import Output
from .rehearsal import expect_prompt
from .watch import CacheWatch, ModelWatch
from .windows import moving

SEAM = "get_compiled_call"
# Replays that pay for a capture, with room to spare: with one the first five tokens of a cache take
# 45 ms, eagerly 39, each later one 1.7 and 6.2 (generate.json: Qwen3.5 of 16 layers, batch 1)
PAYS = 16
WASTED = 3  # captures of one cache that may be in vain: some 20 ms in all

logger = logging.getLogger(__name__)


class Replayed:
    """Calls on one cache that are replays of a graph, while all that it contains is as it was.

    name: of the model's argument that takes the cache.
    """

    graph: Optional[Graph] = None
    watches: Tuple[Any, Any] = (None, None)  # of the cache and of the model
    reason: Optional[str] = None  # why no call on this cache is for a graph
    replays = wasted = 0

    def __init__(self, name: str):
        self.name = name

    def captured(self, graph: Graph, capture: Callable, cache: Any, model: nn.Module, what: str):
        """Returns what capture() does, and replays the graph from now on; says and keeps the reason
        where that cannot be. What Python counts of the cache is put back."""
        of_cache, before = CacheWatch(cache), ModelWatch(model)
        counts = of_cache.counts()
        try:
            out = capture()
            if not of_cache.holds(cache):
                raise RuntimeError("it puts new tensors into its cache")
            if before.counts_on():
                raise RuntimeError("its modules count their steps")
        except Exception as error:
            cause = error.__context__ or error  # the end of the capture fails after its cause
            said = str(cause).partition("\n")[0] or type(cause).__name__
            self.reason = f"{what} cannot be captured: {said}"
            say(model, self.reason)
            return None
        finally:
            of_cache.set_counts(counts)
        self.graph, self.watches = graph, (of_cache, ModelWatch(model))
        return out

    def holds(self, cache: Any, device: torch.device) -> bool:
        """True if torch's modes, the cache and the model are as they were at the capture."""
        of_cache, of_model = self.watches
        if why_not_now(device) is not None or not of_cache.windows_hold():
            return False
        return of_cache.holds(cache) and of_model.holds()

    def drop(self) -> None:
        """Frees the graph; there is no other after several that did not pay."""
        self.wasted += self.replays < PAYS
        self.graph, self.watches, self.replays = None, (None, None), 0
        if self.wasted >= WASTED:
            self.reason = "what a graph has baked in changed again and again"


class Step(Replayed):
    """One decoding step on one cache: eager at first, then replayed. loops: in transformers'
    loop."""

    def __init__(self, cache: Any, name: str, loops: bool = False):
        super().__init__(name)
        self.loops, self.reason = loops, why_not_cache(cache)
        self.key: Optional[tuple] = None  # of the calls that a graph is, or will be, for
        self.full: list = []  # the layers with full windows in the call before a capture
        self.static: List[torch.Tensor] = []  # what the graph reads, in the order of parts
        self.output: Optional[Output] = None  # what it writes
        self.before: list = []  # the tensors of the call before a capture, as parts has them
        self.ahead: Optional[Ahead] = None  # those of `static` that the graph advances
        self.mask: Any = None  # the mask or dict of masks among them
        self.chooser: Optional[Chooser] = None  # of the token, in the graph

    def __call__(self, model: nn.Module, cache: Any, inputs: dict, choice: Optional[Choice] = None):
        """Runs the model on this cache and these inputs. choice: that of the token, which takes the
        place of the logits if the call is a replay."""
        if self.graph is not None:
            device = self.static[0].device
            tensors, key = _kind(inputs, device, choice)
            if key == self.key and self.holds(cache, device):  # so all asked below is as it was
                return self._replay(cache, tensors, choice)
        reason = self.reason or why_eager(model, cache, inputs)
        if reason is not None:
            return self._eager(model, cache, inputs, reason)
        device = inputs["input_ids"].device
        tensors, key = _kind(inputs, device, choice)
        if self.graph is not None:
            self.drop()
        reason = self.reason or why_not_model(model) or why_not_yet(cache)
        if reason is not None:
            return self._eager(model, cache, inputs, reason)
        full = full_windows(cache)
        if key == self.key and full == self.full:
            return self._capture(model, cache, inputs, Graph(device), choice)
        self.key, self.full, self.before = key, full, tensors
        with rings_begin():
            return Graph(device).run(lambda: self._first(model, cache, inputs, choice))

    def _first(self, model: nn.Module, cache: Any, inputs: dict, choice: Optional[Choice]):
        out = self._call(model, cache, inputs)
        if choice is not None:
            ids = inputs["input_ids"]
            Chooser(choice).warm_up(out.logits, ids, Graph.generator(ids.device))
        return out

    def _call(self, model: nn.Module, cache: Any, inputs: dict):
        return model(**{self.name: cache}, **inputs)

    def _eager(self, model: nn.Module, cache: Any, inputs: dict, reason: str):
        say(model, reason)
        return self._call(model, cache, inputs)

    def has_made(self, output: Any) -> bool:
        """True if the output is that of the latest replay."""
        return self.output is not None and self.output.is_that_of(output)

    def makes_masks(self, positions: Any) -> bool:
        """True if these are the positions that the graph has advanced, and so are its masks."""
        return positions is self.ahead.positions and self.watches[0].windows_hold()

    def _replay(self, cache: Any, tensors: list, choice: Optional[Choice]):
        if choice is not None:
            self.chooser.follow(choice)
        for mine, (_, new) in zip(self.static, tensors):
            if mine is not new:
                mine.copy_(new)
        self.graph.replay()
        self.watches[0].advance()
        self.replays += 1
        return self.output.around(cache)

    def _capture(self, model: nn.Module, cache: Any, inputs: dict, graph: Graph, choice):
        """Captures the call and replays it: a capture computes nothing, but Python's counters
        advance."""
        static = mapped(inputs, torch.clone)
        tensors = parts(static)[0]
        ahead = ahead_of(self.before, tensors, cache) if self.loops else None
        ids = static["input_ids"]
        chooser = None if choice is None else Chooser(choice)

        def step():
            with moving(cache):
                out = self._call(model, cache, static)
            chosen = None if chooser is None else Token(chooser.choose(out.logits, ids))
            if ahead is not None:
                ahead.advance()
            return out, cache, chosen

        def capture():
            return Output(*graph.capture(step))

        self.output = self.captured(graph, capture, cache, model, "its step")
        if self.reason is not None:
            return self._call(model, cache, inputs)
        self.static, self.chooser = [x for _, x in tensors], chooser
        self.ahead, self.mask, self.before = ahead, static.get(MASK), []
        return self._replay(cache, parts(inputs)[0], choice)

    def drop(self) -> None:
        super().drop()
        self.key = self.output = self.ahead = self.mask = self.chooser = None
        self.static = []


def _kind(inputs: dict, device: torch.device, choice: Optional[Choice]) -> Tuple[list, tuple]:
    """The tensors among the inputs of a call on a device, and the key of calls that share a
    graph."""
    chosen = None if choice is None else choice.key
    tensors, plain = parts(inputs)
    facts = tuple([(name, x.shape, x.dtype, x.device) for name, x in tensors])
    modes = Graph.place(device), torch.is_inference_mode_enabled()
    return tensors, (facts, plain, chosen, *modes)


def say(model: nn.Module, reason: str) -> None:
    """Logs a warning, once for each model and reason that does not pass by itself."""
    said = _said.setdefault(model, set())
    if reason not in said and reason not in PASSING:
        said.add(reason)
        logger.warning("%s decodes without a CUDA graph: %s", type(model).__name__, reason)


_said: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class Decoding(InPlace):
    """Replaces a model's get_compiled_call."""

    name = SEAM

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by cache
        self.choices: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by cache
        self.rehearsed: set = set()  # shapes of prompts whose kernels have been compiled

    def __call__(self, compile_config=None) -> Callable:
        """Returns the decoding function for one call of generate."""
        model = self.model
        reason = why_not_model(model)
        if reason is None:
            expect_prompt(model, self.rehearsed)
            return self.step
        say(model, reason)
        return model.__call__

    def step(self, **inputs):
        name, cache = cache_among(inputs)
        if name is None:
            return self.model(**inputs)
        del inputs[name]
        drop_kinds(inputs)
        step = self.steps.get(cache)
        if step is None:
            step = self.steps[cache] = Step(cache, name, loops=True)
        return step(self.model, cache, inputs, self.choices.get(cache))


def decoding_of(model: nn.Module) -> Optional[Decoding]:
    """The replacement of the model's get_compiled_call, or None."""
    found = model.__dict__.get(SEAM)
    return found if isinstance(found, Decoding) else None
