"""Two CUDA graphs of a layer in training: of its forward, and of its gradients.

A graph reads and writes memory of its own. Arguments are copied into it, and the output and the
gradients out of it, so that nothing outside ever holds what a later step overwrites. What the
forward keeps for the gradients stays in that memory: the next forward may be a replay only once
the gradients of the last one are computed, or can no longer be asked for.
"""

import contextlib
import random
import threading
import weakref
from functools import partial
from typing import Callable, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..decoding.capture import Graph
from ..decoding.watch import ModelWatch
from ..runtime.operation import keeps_graph
from ..runtime.ops import differentiating_once
from .layer_call import Eager, LayerState, filled, leaves_of, stand_ins, why_not

# Relative difference of a replay from the eager layer beyond which it computes something else:
# sums of cuDNN's and torch's attention may have another order each time
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
CLOSE_IN_HALF = 2e-2


def _generators(device: torch.device) -> list:
    return [torch.default_generator] + [Graph.generator(device)] * (device.type == "cuda")


@contextlib.contextmanager
def _random_as_it_was(device: torch.device):
    """Restores the states of random numbers; yields a function that tells who drew some: the host,
    the device."""
    generators = _generators(device)
    states, pythons = [g.get_state() for g in generators], random.getstate()

    def drew() -> Tuple[bool, bool]:
        now = [not torch.equal(g.get_state(), old) for g, old in zip(generators, states)]
        return (len(now) > 1 and now[0]) or random.getstate() != pythons, now[-1]

    try:
        yield drew
    finally:
        random.setstate(pythons)
        for generator, state in zip(generators, states):
            generator.set_state(state)


def _are_close(found: list, exact: list) -> bool:
    """True if tensors are close, for their size or for a thousandth of that of the largest."""
    pairs = zip(found, exact)
    errors = [(a - b).float().norm() / CLOSE.get(a.dtype, CLOSE_IN_HALF) for a, b in pairs]
    sizes = torch.stack([x.float().norm() for x in exact])
    return bool((torch.stack(errors) <= sizes.clamp(min=1e-3 * sizes.max())).all())


def _distinct(tensors: list) -> list:
    return list({id(x): x for x in tensors if x is not None}.values())


# -- the graphs


class Ticket:
    """The right to one forward by replay, held by its node of autograd."""

    spent = False  # the gradients have been computed from what the forward has kept
    done = False  # they will not be asked for again


def _by_dtype(tensors: List[Tensor]) -> List[Tuple[List[int], List[Tensor]]]:
    """Gradients of one dtype, which are copied together, and their places among all."""
    groups: dict = {}
    for i, x in enumerate(tensors):
        places, same = groups.setdefault(x.dtype, ([], []))
        places.append(i)
        same.append(x)
    return list(groups.values())


class LayerStep:
    """The graphs of calls of one layer that have the same key.

    call(layer, *args, **kwargs): its forward. tensors: those among args and kwargs. Raises Eager
    where graphs cannot serve.
    """

    def __init__(self, layer: nn.Module, call: Callable, args: tuple, kwargs: dict, tensors: list):
        self.device = device = tensors[0].device
        self.watch, self.lock, self.last = ModelWatch(layer), threading.Lock(), None
        reason = why_not(self.watch, device)
        if reason is not None:
            raise Eager(reason)
        parts = [(m._parameters.values(), m._buffers.values()) for m in self.watch.modules]
        self.params = _distinct([x for params, _ in parts for x in params])
        self.buffers = _distinct([x for _, buffers in parts for x in buffers])
        self.read = [*self.params, *self.buffers, *[x for _, _, x in self.watch.held]]
        self.places = [x.data_ptr() for x in self.read]
        self.state = LayerState(self.watch)
        self.static = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
        self.mixed = torch.autocast(
            device.type, torch.get_autocast_dtype(device.type), cache_enabled=False,
            enabled=torch.is_autocast_enabled(device.type),
        )  # fmt: skip
        with stand_ins(self.watch.modules) as own:
            leaves = [*self.static, *[own[id(p)] for p in self.params]]
            forward = partial(self._called, layer, call, args, kwargs)
            with _random_as_it_was(device) as drew:
                exact, trained = self._rehearsed(forward, [x for x in leaves if x.requires_grad])
                by_host, self.draws = drew()
            if by_host:
                raise Eager("it draws random numbers on the host")
            with _random_as_it_was(device):
                found = self._captured(forward, trained)
        if self.watch.counts_on() or not self.holds():
            raise Eager("its modules count their steps, or change in each")
        with _random_as_it_was(device):
            self.forward.replay()
            self.backward.replay()
        if not _are_close([self.y, *found], exact):
            raise Eager("a replay computes something else")
        self.groups = _by_dtype(found)
        known = set(map(id, trained))
        self.from_args = [i for i, x in enumerate(self.static) if id(x) in known]
        self.trained = [p for p, x in zip(self.params, leaves[len(tensors) :]) if id(x) in known]

    def _called(self, layer: nn.Module, call: Callable, args: tuple, kwargs: dict) -> Tensor:
        """The layer's output of the tensors that the graphs read."""
        static = iter(self.static)
        with self.mixed:
            out = call(layer, *filled(args, static), **filled(kwargs, static))
        self.in_tuple = type(out) is tuple and len(out) == 1
        out = out[0] if self.in_tuple else out
        if type(out) is not Tensor:
            raise Eager("its output is not one tensor")
        return out

    def _gradients(self, y: Tensor, leaves: list) -> list:
        with torch._C._DisableAutocast():
            found = torch.autograd.grad(y, leaves, self.dy, allow_unused=True)
        return [x if x is None else x.contiguous() for x in found]

    def _rehearsed(self, forward: Callable, leaves: list) -> Tuple[list, list]:
        """Output and gradients of the layer as it is, and those of the leaves that have one. It
        sets up libraries for the captures."""

        def step() -> list:
            y = forward()
            if not y.requires_grad:
                raise Eager("nothing in it is trained")
            if not leaves_of(y) <= set(map(id, leaves)):
                raise Eager("it trains a tensor that is no parameter of its modules")
            self.dy = y.detach().clone()
            return [y.detach(), *self._gradients(y, leaves)]

        written, state = (*self.static, *self.read), self.read[len(self.params) :]
        before = [x._version for x in written], [x.detach().clone() for x in state]
        y, *found = Graph(self.device).run(step)
        if [x._version for x in written] != before[0]:
            with torch.no_grad():
                for x, old in zip(state, before[1]):
                    x.copy_(old)
            raise Eager("it writes into its input, its weights or its buffers")
        pairs = [(g, x) for g, x in zip(found, leaves) if g is not None]
        return [y, *[g for g, _ in pairs]], [x for _, x in pairs]

    def _captured(self, forward: Callable, leaves: list) -> list:
        """Captures both graphs; returns the gradients that the second one writes."""
        self.forward, self.backward = Graph(self.device), Graph(self.device)
        y = self.forward.capture(forward)
        self.backward.pool = self.forward.pool
        found = self.backward.capture(lambda: self._gradients(y, leaves))
        self.y = y.detach()
        return found

    def holds(self) -> bool:
        """True if the layer is as it was at the capture."""
        return self.state.holds() and self.watch.holds()

    def take(self) -> Optional[Ticket]:
        """A ticket for a forward, or None while what the last one has kept may be needed."""
        with self.lock:
            last = None if self.last is None else self.last()
            if last is not None and not last.done:
                return None
            ticket = Ticket()
            self.last = weakref.ref(ticket)
            return ticket

    def run(self, tensors: list, ticket: Ticket):
        """The layer's output for these tensors among its arguments."""
        given = [tensors[i] for i in self.from_args]
        y = _Replay.apply(self, ticket, tensors, *given, *self.trained)
        return (y,) if self.in_tuple else y

    def again(self, ticket: Ticket) -> None:
        """The forward of a ticket once more, since gradients overwrite what it keeps."""
        with _random_as_it_was(self.device):
            if self.draws:
                _generators(self.device)[-1].set_state(ticket.random)
            self.forward.replay()

    def gradients(self, dy: Tensor, ticket: Ticket, read: tuple) -> list:
        """Gradients of the arguments and parameters that are trained, in new memory."""
        if [x.data_ptr() for x in read] != self.places:
            raise RuntimeError(
                "kernelize(model, training_graphs=True): a weight has moved to other memory "
                "between a forward and its backward pass"
            )
        if ticket.spent:
            self.again(ticket)
        self.dy.copy_(dy)
        self.backward.replay()
        found: list = [None] * (len(self.from_args) + len(self.trained))
        for places, static in self.groups:
            fresh = [torch.empty_like(x) for x in static]
            torch._foreach_copy_(fresh, static)
            for place, x in zip(places, fresh):
                found[place] = x
        # last: the next forward may overwrite all of this memory
        ticket.spent, ticket.done = True, not keeps_graph()
        return found


class _Replay(torch.autograd.Function):
    """(step, ticket, tensors, what is trained) -> the layer's output, by replays."""

    @staticmethod
    def forward(ctx, step: LayerStep, ticket: Ticket, tensors: list, *trained):
        ctx.step, ctx.ticket = step, ticket
        if step.draws:
            ticket.random = _generators(step.device)[-1].get_state()
        torch._foreach_copy_(step.static, tensors)
        step.forward.replay()
        ctx.save_for_backward(*step.read)  # autograd says where one is changed before its use
        return step.y.clone()

    @staticmethod
    @differentiating_once("a layer in a CUDA graph")
    def backward(ctx, dy):
        return (None, None, None, *ctx.step.gradients(dy, ctx.ticket, ctx.saved_tensors))
