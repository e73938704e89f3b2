"""The roles of the channels of a Kimi Delta Attention layer's projections."""

import itertools
from typing import Callable, Dict, Iterator, List, Tuple

import torch

from ..layers.kda import Chain, Roles, Step
from .code import Refused


class Flows:
    """The channels of projections that a layer's functions get."""

    def __init__(self, x: torch.Tensor, calls: list, norms: list, functions: list, linears: dict):
        mixed = [y for y in functions if y.ndim == 3]
        if len(mixed) != 1 or len(norms) != 1:
            raise Refused("it has not one convolution and one gated norm")
        if sorted(path for path, _, _ in calls) != sorted(linears):
            raise Refused("it does not call each of its projections once")
        gate, normed = norms[0]
        self.x, self.places, self.chains = x, {}, {}
        self.left: Dict[str, List[int]] = {}  # channels whose role is not known
        self.out = ""
        for path, given, y in calls:
            if torch.equal(given.flatten(), normed.flatten()):
                self.out = path
                continue
            self.chains[path] = () if torch.equal(given, x) else self.chain(given, path)
            for c, channel in enumerate(y.flatten(0, -2).T):
                self.places[tuple(channel.tolist())] = path, c
            self.left[path] = list(range(y.shape[-1]))
        self.mixed_channels = mixed[0].shape[1]
        self.mixed = tuple(self.traced(mixed[0].transpose(1, 2), "its convolution"))
        self.z = self.chain(gate.reshape(*x.shape[:2], -1), "its gated norm")

    def traced(self, given: torch.Tensor, where: str) -> Iterator[Chain]:
        """The projections that a tensor [B, T, D] consists of."""
        places = [self.places.get(tuple(c.tolist())) for c in given.flatten(0, -2).T]
        if None in places or given.shape[:-1] != self.x.shape[:-1]:
            raise Refused(f"{where} gets what is not of its projections")
        while places:
            (path, start), count = places[0], 1
            while count < len(places) and places[count] == (path, start + count):
                count += 1
            del places[:count]
            yield self.part(path, start, start + count)

    def chain(self, given: torch.Tensor, where: str) -> Chain:
        found = list(self.traced(given, where))
        if len(found) != 1:
            raise Refused(f"{where} gets what is not of one projection")
        return found[0]

    def part(self, path: str, start: int, end: int) -> Chain:
        """Some channels of a projection, which have a role now."""
        whole = (start, end) == (0, self.width(path))
        self.left[path] = [c for c in self.left[path] if not start <= c < end]
        return (*self.chains[path], Step(path, None if whole else (start, end)))

    def width(self, path: str) -> int:
        return sum(of == path for of, _ in self.places.values())

    def placed(self, heads: int, channels: int) -> Iterator[Tuple[Chain, Chain]]:
        """The possible roles of what is left: the write strength, and the gate of each channel."""
        spans = [(path, cs[0], cs[-1] + 1) for path, cs in self.left.items() if cs]
        if any(end - start != len(self.left[path]) for path, start, end in spans):
            return
        if sum(end - start for _, start, end in spans) != heads + channels:
            return
        if len(spans) == 1:
            ((path, start, end),) = spans
            middles = (start + heads, start + channels)
            spans_of = [((path, start, m), (path, m, end)) for m in middles]
        else:
            spans_of = [tuple(spans)]
        for pair in spans_of:
            for b, f in itertools.permutations(pair):
                if len(pair) == 2 and (b[2] - b[1], f[2] - f[1]) == (heads, channels):
                    yield self.part(*b), self.part(*f)


def rescaled(roles: Roles, size_of: Callable) -> Roles:
    """The same roles where projections have other widths; raises Refused if channels have none."""
    chains = *roles.mixed, roles.f, roles.z, roles.b
    spans: Dict[str, dict] = {}
    for step in itertools.chain(*chains):
        if step.channels is not None:
            spans.setdefault(step.path, {})[step.channels] = None
    for path, of in spans.items():
        before = start = 0
        for span in sorted(of):
            if span[0] != before:
                raise Refused(f"{path} has channels that are not used, or used twice")
            before, end = span[1], start + size_of(span[1] - span[0])
            of[span], start = (start, end), end

    def moved(chain: Chain) -> Chain:
        return tuple([s if s.channels is None else s._replace(channels=spans[s.path][s.channels])
                      for s in chain])  # fmt: skip

    return roles._replace(
        mixed=tuple(map(moved, roles.mixed)), f=moved(roles.f), z=moved(roles.z), b=moved(roles.b)
    )
