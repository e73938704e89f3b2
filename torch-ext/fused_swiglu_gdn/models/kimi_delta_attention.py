"""Recognises the Kimi Delta Attention layers that layers/kda.py computes.

The forwards of its class, and of the parts that have parts of their own, as a forget gate's, give
what ours gives on a small copy of the layer.
"""

import collections
import itertools
import math
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn

from ..gdn.checks import MAX_HEAD_DIM
from ..layers import kda
from ..layers.kda import Chain, KdaForm, Owner, Roles
from .code import Refused
from .delta_copies import Packing
from .delta_layers import (
    Layout,
    agreeing,
    inner_of,
    layout_of,
    why_not_plain,
)
from .delta_trial import DeltaTrial, found_by

LAYER = "KimiDeltaAttention"
USUAL = {"conv1d", "forget_gate", "o_norm"}  # parts of a module that the report has a row for
NOT_KNOWN = "its parts are not those of a Kimi Delta Attention layer known here"


def kimi_delta_attention(
    module: nn.Module,
) -> Optional[Tuple[str, Optional[str], Optional[KdaForm]]]:
    """Our layer for a module, why it is left alone or None, and the form of its class; None for a
    module without the parts by which such a layer is known."""
    usual, layout = USUAL <= module._modules.keys(), layout_of(module)
    reason = NOT_KNOWN if layout is None else why_not_plain(module, layout) or _why_not(layout)
    if not usual and reason is not None:
        return None
    if reason is not None:
        return LAYER, reason, None
    try:
        return LAYER, None, _form(module, layout)
    except Refused as why:
        return LAYER, str(why), None


def _sizes(layout: Layout) -> List[int]:
    """The heads, and the channels of k, by A_log and dt_bias."""
    return sorted(map(math.prod, layout.vectors.values()))


def _why_not(layout: Layout) -> Optional[str]:
    H, P = _sizes(layout)
    if layout.channels != 3 * P or H < 1 or P % H:
        return "its heads and those of its forget gate do not match"
    if P // H > MAX_HEAD_DIM:
        return f"its head dim is above {MAX_HEAD_DIM}"
    return None


def _form(module: nn.Module, layout: Layout) -> KdaForm:
    """The form of a module with such parts; raises Refused, which says why it has none."""
    inner = tuple(inner_of(module, layout))
    found = found_by(_Trial, layout, inner)
    ours = {found.index, found.roles.bound, "training", f"{layout.conv}.bias"}
    owners = []
    for each in inner:
        values = each.facts.values.items()
        guards = tuple([(n, v) for n, v in values if each.below(n) not in ours])
        owners.append(Owner(each.path, each.kind, each.facts.pinned, guards))
    known = found.arguments, found.cache, found.mask
    return KdaForm(inner[0].kind, *known, tuple(owners), found.roles)


class _Trial(DeltaTrial):
    """Runs of a class's forward, and of ours."""

    TOLERANCES = {
        torch.float32: 1e-4, torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1,
    }  # fmt: skip
    USES = (*DeltaTrial.USES, (2, (7, 1, 4), False))
    PACKING = Packing("cu_seq_lens_q", "cu_seq_lens_q")
    # of gates: on both sides of what they bend at, and one whose exponential fp32 has not
    BIASES = (-30.0, 100.0, 0.5, 25.0, -1.0, 2.0, 14.0, -8.0)
    BOUNDS = (-5.0, -1.5)  # in the small copy, and in one of the layer's own size
    gate = staticmethod(torch.sigmoid)

    def __init__(self, *known):
        super().__init__(*known)
        self.heads, self.channels = _sizes(self.layout)
        self.V = self.channels // self.heads
        given = collections.Counter(size for size, _ in self.layout.linears.values())
        ((self.width, _),) = given.most_common(1)
        numbers = [(n, v) for n, v in self.values.items() if type(v) in (int, float)]
        self.bounds = [name for name, value in numbers if value < 0]

    @property
    def bound(self) -> float:
        return self.BOUNDS[not self.sizes]

    def attributes(self, index: int) -> Dict[str, object]:
        return {**super().attributes(index), **dict.fromkeys(self.bounds, self.bound)}

    def vector(self, path: str, seed: int) -> torch.Tensor:
        x = super().vector(path, seed)
        if x.numel() == self.small(self.channels):
            biases = torch.tensor(self.BIASES).double()
            x = biases.repeat(-(-x.numel() // len(biases)))[: x.numel()].view(x.shape)
        return x

    def smaller(self) -> Dict[int, int]:
        taps = self.layout.taps
        sizes = {1: 1, taps: taps}
        heads, dim = sizes.setdefault(self.heads, 3), sizes.setdefault(self.V, 7)
        sizes = agreeing(sizes, [(n * self.channels, n * heads * dim) for n in (1, 2, 3)])
        if sizes:
            sizes.setdefault(self.width, 17)
            free = (n for n in itertools.count(5) if n not in sizes.values())
            for _, width in self.layout.linears.values():
                if width not in sizes:
                    sizes[width] = next(free)
        return sizes

    def ours(self, roles: Roles, dtype, index: int) -> Callable:
        probe = self.probe(dtype, False, index)
        bound = None if roles.bound is None else self.bound

        def forward(x, cache=None, mask=None, cu_seq_lens_q=None):
            return kda.kimi_delta_attention(probe, roles, x, cache, mask, cu_seq_lens_q, bound)

        return forward

    def packed(self, ends: torch.Tensor) -> dict:
        return {"cu_seq_lens_q": ends}

    # -- roles

    def candidates(self) -> Iterator[Roles]:
        """The possible roles: usual ones first, in the order of the layer's parts."""
        H, P, layout = self.heads, self.channels, self.layout
        pairs = [pair for pair in itertools.permutations(layout.vectors)
                 if [math.prod(layout.vectors[path]) for path in pair] == [H, P]]  # fmt: skip
        words = dict.fromkeys(["silu", *(v for v in self.values.values() if type(v) is str)])
        more = list(itertools.product(pairs, (*self.bounds, None), words))
        for out in [path for path, sizes in layout.linears.items() if sizes == (P, self.width)]:
            others = [path for path in layout.linears if path != out]
            for *mixed, f, z, b in self.placed((P, P, P, P, P, H), others):
                if any(len(chain) > 1 for chain in mixed):
                    continue
                for (A_log, dt_bias), bound, activation in more:
                    yield Roles(
                        tuple([path for path, in mixed]), f, z, b, layout.conv, layout.norm, out,
                        A_log, dt_bias, self.index, activation, bound,
                    )  # fmt: skip

    def placed(self, widths: Tuple[int, ...], paths: List[str]) -> Iterator[List[Chain]]:
        """Chains of projections with these widths, which have each of the paths once."""
        if not widths:
            if not paths:
                yield []
            return
        for chain in self.chains(widths[0], paths):
            left = [path for path in paths if path not in chain]
            for others in self.placed(widths[1:], left):
                yield [chain, *others]

    def chains(self, width: int, paths: List[str]) -> Iterator[Chain]:
        """A projection of the hidden states to this width, or two, one after the other."""
        linears = self.layout.linears
        for first in [path for path in paths if linears[path][0] == self.width]:
            if linears[first][1] == width:
                yield (first,)
            for second in paths:
                if second != first and linears[second] == (linears[first][1], width):
                    yield first, second
