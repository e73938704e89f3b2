"""The roles of a Kimi Delta Attention layer's projections."""

import itertools
from typing import Dict, Iterator, List, Tuple

import torch

from ..layers.kda import Chain
from .code import Refused


class Flows:
    """The projection whose output each function of a layer gets, in one run of it."""

    def __init__(self, x: torch.Tensor, calls: list, norms: list, functions: list, linears: dict):
        mixed = [y for y in functions if y.ndim == 3]
        if len(mixed) != 1 or len(norms) != 1:
            raise Refused("it has not one convolution and one gated norm")
        if sorted(path for path, _, _ in calls) != sorted(linears):
            raise Refused("it does not call each of its projections once")
        gate, normed = norms[0]
        self.chains: Dict[str, Chain] = {}
        self.left: Dict[str, torch.Tensor] = {}  # outputs whose role is not known
        self.out = ""
        for path, given, y in calls:
            if torch.equal(given.flatten(), normed.flatten()):
                self.out = path
                continue
            before = () if torch.equal(given, x) else self.taken(given, path)
            self.chains[path], self.left[path] = (*before, path), y
        self.mixed_channels = mixed[0].shape[1]
        parts = mixed[0].transpose(1, 2).chunk(3, -1)
        self.mixed = [self.taken(part, "its convolution") for part in parts]
        self.z = self.taken(gate.reshape(*x.shape[:2], -1), "its gated norm")

    def taken(self, given: torch.Tensor, where: str) -> Chain:
        """The projections, one after another, that give a tensor; the last one has a role now."""
        for path, y in self.left.items():
            if torch.equal(y, given):
                del self.left[path]
                return self.chains[path]
        raise Refused(f"{where} gets what is not of one projection")

    def placed(self, heads: int, channels: int) -> Iterator[Tuple[Chain, Chain]]:
        """The possible roles of what is left: the write strength, and the gate of each channel."""
        widths: List[tuple] = [(path, y.shape[-1]) for path, y in self.left.items()]
        for (b, n), (f, m) in itertools.permutations(widths, 2):
            if len(widths) == 2 and (n, m) == (heads, channels):
                yield self.chains[b], self.chains[f]
