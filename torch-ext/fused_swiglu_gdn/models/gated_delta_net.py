"""Recognises the Gated DeltaNet layers that one of our layers computes the same.

Its class's forward gives what our layer gives in a trial. Its parts are found by their sizes; by
their names where they are transformers' usual ones.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..gdn.checks import MAX_HEAD_DIM
from ..layers import gdn
from ..layers.gdn import FORMS, GdnForm
from .code import Refused
from .delta_copies import Packing
from .delta_layers import Layout, agreeing, inner_of, layout_of, why_not_plain
from .delta_trial import DeltaTrial, found_by


class Family(NamedTuple):
    """The parts of a layer of ours beside the convolution, in transformers' order."""

    widths: Dict[str, Tuple[int, int, int]]  # of a projection: how often it has k, v and a head
    norm: str
    out: str


FAMILIES = {
    "Qwen3_5GatedDeltaNet": Family(
        {"in_proj_qkv": (2, 1, 0), "in_proj_z": (0, 1, 0), "in_proj_b": (0, 0, 1),
         "in_proj_a": (0, 0, 1)}, "norm", "out_proj",
    ),
    "Qwen3NextGatedDeltaNet": Family(
        {"in_proj_qkvz": (2, 2, 0), "in_proj_ba": (0, 0, 2)}, "norm", "out_proj"
    ),
    "OlmoHybridGatedDeltaNet": Family(
        {"q_proj": (1, 0, 0), "k_proj": (1, 0, 0), "v_proj": (0, 1, 0), "a_proj": (0, 0, 1),
         "b_proj": (0, 0, 1), "g_proj": (0, 1, 0)}, "o_norm", "o_proj",
    ),
}  # fmt: skip
VECTORS, NEGATIVE = ("A_log", "dt_bias"), "allow_neg_eigval"


class Parts(NamedTuple):
    """The possible roles of a module's parts."""

    layer: str  # the name of ours
    names: Dict[str, str]  # {ours: the module's}
    key: int  # the channels of k and of v
    value: int
    heads: int  # of v


class Roles(NamedTuple):
    """Possible roles of a module's parts, and its numbers, by our names for them."""

    layer: str
    names: Dict[str, str]
    values: Dict[str, object]


def is_gated_delta_net(module: nn.Module) -> bool:
    """Returns True if it has a convolution and A_log, or what else a family has by its sizes."""
    if "conv1d" in module._modules and "A_log" in module._parameters:
        return True
    return next(parts_of(module, layout_of(module)), None) is not None


def parts_of(module: nn.Module, layout: Optional[Layout]) -> Iterator[Parts]:
    """The possible roles of each part, by its name or its size."""
    if layout is None or not module._modules.keys() >= {*layout.linears, layout.norm}:
        return
    pairs = [tuple(layout.vectors), tuple(layout.vectors)[::-1]]
    pairs = [VECTORS] if VECTORS in pairs else pairs
    for layer, family in FAMILIES.items():
        usual = (*family.widths, family.out)
        if len(layout.linears) != len(usual):
            continue
        named = layout.linears.keys() == {*usual}
        orders = [usual] if named else itertools.permutations(layout.linears)
        for order, pair in itertools.product(orders, pairs):
            names = {"conv1d": layout.conv, **dict(zip(VECTORS, pair)), family.norm: layout.norm}
            names.update(zip(usual, order))
            value, heads = layout.linears[order[-1]][0], math.prod(layout.vectors[pair[0]])
            parts = Parts(layer, names, (layout.channels - value) // 2, value, heads)
            if named or _fit(layout, parts):
                yield parts


def _fit(layout: Layout, parts: Parts) -> bool:
    """The projections have the sizes of these roles."""
    family, sizes = FAMILIES[parts.layer], parts[2:]
    hidden = layout.linears[parts.names[family.out]][1]
    for name, counts in family.widths.items():
        if layout.linears[parts.names[name]] != (hidden, width_of(counts, sizes)):
            return False
    return min(sizes) > 0


def width_of(counts: tuple, sizes: tuple) -> int:
    return sum(count * size for count, size in zip(counts, sizes))


def gated_delta_net(
    module: nn.Module,
) -> Optional[Tuple[str, Optional[str], Optional[GdnForm]]]:
    """Our layer for a module, why it is left alone or None, and the form of its forward; None for
    a module that is no Gated DeltaNet layer."""
    if not is_gated_delta_net(module):
        return None
    layout = layout_of(module)
    parts = next(parts_of(module, layout), None)
    if parts is None:
        return "GatedDeltaNet", "its parts are not those of a Gated DeltaNet layer known here", None
    try:
        return parts.layer, None, _form(module, layout, parts)
    except Refused as why:
        return parts.layer, str(why), None


def _form(module: nn.Module, layout: Layout, parts: Parts) -> GdnForm:
    """The form of a module that has the parts of a family; raises Refused, which says why nothing
    does: it has not the family's forward, sizes or plain weights."""
    ((_, _, kind, facts),) = inner = tuple(inner_of(module, layout))
    reason = why_not_plain(module, layout) or _why_not_sizes(module, facts.values, layout, parts)
    if reason is not None:
        raise Refused(reason)
    found = found_by(_Trial, layout, inner)
    (layer, names, values), index = found.roles, found.index
    view = tuple(_view(module, {**names, "layer_idx": index}, values))
    read_by_ours = {*values, "training", index, f"{names['conv1d']}.bias"}
    guards = facts.values_but(*read_by_ours.difference([name for name, *_ in view]))
    known = found.arguments, found.cache, found.mask, tuple(guards.items()), view
    form = FORMS[kind] = GdnForm(layer, kind, facts.pinned, *known)
    return form


def _why_not_sizes(module: nn.Module, values: dict, layout: Layout, parts: Parts) -> Optional[str]:
    heads, value = parts.heads, parts.value
    vectors = [math.prod(shape) for shape in layout.vectors.values()]
    dims = list(_head_dims(module, values, parts.key, heads))
    if not dims or value % heads or vectors != [heads, heads]:
        return "its heads of q, k and v do not match"
    if max(dims[0], value // heads) > MAX_HEAD_DIM:
        return f"its head dims are above {MAX_HEAD_DIM}"
    return None


def _view(module: nn.Module, names: dict, values: dict) -> Iterator[tuple]:
    """(our attribute, the module's, or None; a value) where the module has other names."""
    missing = object()
    for name, other in names.items():
        if name != other:
            if getattr(module, name, missing) is not missing:
                raise Refused(f"it has another {name}")
            yield name, other, None
    for name, value in values.items():
        found = getattr(module, name, missing)
        if found is missing:
            yield name, None, value
        elif found != value:
            raise Refused(f"it has another {name}")


def _head_dims(module: nn.Module, values: dict, key: int, heads: int) -> Iterator[int]:
    """The possible head dims of k: the number of that name, or one that the forward reads."""
    named = getattr(module, "head_k_dim", None)
    known = [named] if type(named) is int else dict.fromkeys(values.values())
    for size in known:
        if type(size) is int and 0 < size <= key and not key % size and not heads % (key // size):
            yield size


class _Trial(DeltaTrial):
    """Runs of a class's forward, and of ours."""

    TOLERANCES = {
        torch.float32: 1e-4, torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2,
    }  # fmt: skip
    USES = (*DeltaTrial.USES, (2, (3, 1), True))
    PACKING = Packing("cu_seqlens", "seq_idx")
    gate = staticmethod(F.silu)

    def __init__(self, *known):
        super().__init__(*known)
        self.first = first = next(self.candidates())
        self.family = FAMILIES[first.layer]
        self.width = self.layout.linears[first.names[self.family.out]][1]
        self.V = first.values["head_v_dim"]

    def candidates(self) -> Iterator[Roles]:
        """The possible parts, sizes and flags."""
        module, taps = self.module, self.layout.taps
        flag = getattr(module, NEGATIVE, None)
        flags = [{NEGATIVE: f} for f in ((False, True) if flag is None else (flag,))]
        more = {"conv_kernel_size": taps, "activation": getattr(module, "activation", "silu")}
        for layer, names, key, value, heads in parts_of(module, self.layout):
            sizes = {"num_v_heads": heads, "head_v_dim": value // heads, "key_dim": key}
            for K in _head_dims(module, self.facts.values, key, heads):
                of_keys = {"value_dim": value, "head_k_dim": K, "num_k_heads": key // K}
                for found in flags if layer == "OlmoHybridGatedDeltaNet" else [{}]:
                    yield Roles(layer, names, {**sizes, **of_keys, **more, **found})

    def smaller(self) -> Dict[int, int]:
        values, taps = self.first.values, self.layout.taps
        H, HV = values["num_k_heads"], values["num_v_heads"]
        sizes = {1: 1, taps: taps}
        h, k = sizes.setdefault(H, 2), sizes.setdefault(values["head_k_dim"], 3)
        hv, v = sizes.setdefault(HV, h * min(HV // H, 2)), sizes.setdefault(self.V, 5)
        own, small = (values["key_dim"], values["value_dim"], HV), (h * k, hv * v, hv)
        counts = [(1, 0, 0), (0, 1, 0), (2, 1, 0), *self.family.widths.values()]
        sizes = agreeing(sizes, [(width_of(c, own), width_of(c, small)) for c in counts])
        if not sizes or hv % h:
            return {}
        sizes.setdefault(self.width, 16)
        return sizes

    def ours(self, roles: Roles, dtype, index: int) -> Callable:
        stubs, family = self.stubs(dtype), gdn.FAMILIES[roles.layer]
        parts = {name: stubs[own] for name, own in roles.names.items()}
        numbers = {n: self.small(v) if type(v) is int else v for n, v in roles.values.items()}
        view = SimpleNamespace(**parts, **numbers, layer_idx=index)

        def forward(x, cache=None, mask=None, **more):
            return gdn.computed(view, family, x, cache, mask, more)

        return forward
