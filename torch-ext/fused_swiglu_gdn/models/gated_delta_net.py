"""Recognises the Gated DeltaNet layers that one of our layers computes the same.

Its class's forward gives what our layer gives in a trial. Its parts are found by
their sizes; by their names where they are transformers' usual ones.
"""

import itertools
from typing import Dict, Iterator, NamedTuple, Optional, Tuple, Union

from torch import nn

from ..gdn.checks import MAX_HEAD_DIM
from ..layers.delta import is_gated_norm
from ..layers.gdn import FORMS, GdnForm
from ..layers.plain import told
from .code import Refused
from .delta_layers import (
    index_among,
    is_depthwise,
    refuse_hooks,
    refuse_reads,
    why_not_plain,
)
from .delta_trial import Found
from .facts import read
from .gdn_trial import Roles, found_by, width_of
from .serving import own_class
from .stand_ins import features
from .trial import form_key, remembered


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
VECTORS = ("A_log", "dt_bias")

_forms: Dict[tuple, Union[Found, str]] = {}


class Parts(NamedTuple):
    """The possible roles of a module's parts."""

    layer: str
    names: Dict[str, str]  # {ours: the module's}
    key: int  # the channels of k and of v
    value: int


def is_gated_delta_net(module: nn.Module) -> bool:
    """Returns True if it has a convolution and A_log, or what else a family has by its sizes."""
    if "conv1d" in module._modules and "A_log" in module._parameters:
        return True
    return len(module._modules) > 4 and next(parts_of(module), None) is not None


def parts_of(module: nn.Module) -> Iterator[Parts]:
    """Returns the role of each part, by its name or its size."""
    parts = {n: p for n, p in module._modules.items() if p is not None}
    vectors = [n for n, x in module._parameters.items() if told(x, "ndim") == 1]
    convs = ["conv1d"] if "conv1d" in parts else [n for n, p in parts.items() if is_depthwise(p)]
    if len(convs) != 1 or len(vectors) != 2:
        return
    pairs = [VECTORS] if set(vectors) == set(VECTORS) else list(itertools.permutations(vectors))
    channels = told(getattr(parts[convs[0]], "weight", None), "shape")
    others = [n for n in parts if n != convs[0]]
    for layer, family in FAMILIES.items():
        usual = (*family.widths, family.norm, family.out)
        if set(others) == set(usual):
            orders = [usual]
        else:
            linear = [n for n in others if features(parts[n])]
            rest = [n for n in others if n not in linear]
            if len(others) != len(usual) or len(rest) != 1:
                continue
            orders = ((*o[:-1], rest[0], o[-1]) for o in itertools.permutations(linear))
        for order in orders:
            value = (features(parts[order[-1]]) or (getattr(module, "value_dim", 0),))[0]
            heads = told(module._parameters[vectors[0]], "numel")()
            key = ((channels or (0,))[0] - value) // 2
            names = dict(zip(usual, order))
            if orders == [usual] or _fit(parts, family, names, (key, value, heads)):
                for pair in pairs:
                    named = {"conv1d": convs[0], **dict(zip(VECTORS, pair)), **names}
                    yield Parts(layer, named, key, value)


def _fit(parts: dict, family: Family, names: dict, sizes: tuple) -> bool:
    """The projections have the sizes of these roles."""
    value, hidden = features(parts[names[family.out]])
    for name, counts in family.widths.items():
        if features(parts[names[name]]) != (hidden, width_of(counts, sizes)):
            return False
    return value == sizes[1] and min(sizes) > 0


def gated_delta_net(
    module: nn.Module,
) -> Optional[Tuple[str, Optional[str], Optional[GdnForm]]]:
    """Our layer for a module, why it is left alone or None, and the form of its forward; None for
    a module that is no Gated DeltaNet layer."""
    if not is_gated_delta_net(module):
        return None
    parts = next(parts_of(module), None)
    if parts is None:
        return "GatedDeltaNet", "its parts are not those of a Gated DeltaNet layer known here", None
    try:
        return parts.layer, None, _form(module, parts)
    except Refused as why:
        return parts.layer, str(why), None


def _form(module: nn.Module, parts: Parts) -> GdnForm:
    """Returns the form of a module that has the parts of a family; raises Refused, which says why
    nothing does: it has not the family's forward, sizes or plain weights."""
    kind = own_class(module)
    facts = read(kind, module)
    refuse_hooks(kind, parts.names["conv1d"])
    reason = _why_not_plain(module, parts)
    if reason is not None:
        raise Refused(reason)
    is_gated_norm(module._modules[parts.names[FAMILIES[parts.layer].norm]])  # traces cannot look
    found = _found(module, kind, facts, parts)
    names, values = dict(found.roles.names), dict(found.roles.values)
    names["layer_idx"] = found.roles.index
    view = tuple(_view(module, names, values))
    read_by_ours = {*values, "training", found.roles.index, f"{names['conv1d']}.bias"}
    read_by_ours -= {name for name, *_ in view}
    guards = facts.values_but(*read_by_ours)
    form = GdnForm(parts.layer, kind, facts.pinned, *found[1:], tuple(guards.items()), view)
    FORMS[kind] = form
    return form


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


def _found(module: nn.Module, kind: type, facts, parts: Parts) -> Found:
    index = index_among(facts.values)
    values = facts.values_but("training", index)
    refuse_reads(module, kind, facts)
    shapes = [(n, type(p), features(p)) for n, p in module._modules.items()]
    shapes += [(n, told(p, "shape")) for n, p in module._parameters.items()]
    conv = module._modules[parts.names["conv1d"]]
    key = (*form_key(module, kind, facts, values), tuple(shapes), conv.weight.shape,
           conv.bias is None, repr(sorted(_sizes(module).items())))  # fmt: skip
    candidates = _candidates(module, facts, index)
    return remembered(_forms, key, found_by, module, kind, facts, candidates)


def _sizes(module: nn.Module) -> dict:
    return {n: v for n, v in module.__dict__.items() if type(v) is int and n != "layer_idx"}


def _candidates(module: nn.Module, facts, index: str) -> Iterator[Roles]:
    """Returns the possible parts, sizes and flags."""
    for parts in parts_of(module):
        family = FAMILIES[parts.layer]
        heads = told(module._parameters[parts.names["A_log"]], "numel")()
        inputs = [features(module._modules[parts.names[n]]) for n in family.widths]
        hidden = next((sizes[0] for sizes in inputs if sizes), 16)
        widths = [(parts.names[n], counts) for n, counts in family.widths.items()]
        widths.append((parts.names[family.out], None))
        taps = module._modules[parts.names["conv1d"]].weight.shape[-1]
        values = {
            "num_v_heads": heads, "head_v_dim": parts.value // heads, "key_dim": parts.key,
            "value_dim": parts.value, "conv_kernel_size": taps,
        }  # fmt: skip
        for K in _head_dims(module, parts, heads):
            more = {"head_k_dim": K, "num_k_heads": parts.key // K}
            more["activation"] = getattr(module, "activation", "silu")
            for flag in _flags(module, parts):
                found = {**values, **more, **flag}
                yield Roles(parts.layer, tuple(parts.names.items()), tuple(widths), hidden,
                            tuple(found.items()), index)  # fmt: skip


def _head_dims(module: nn.Module, parts: Parts, heads: int) -> Iterator[int]:
    """Returns the possible head dims of k."""
    named = getattr(module, "head_k_dim", None)
    known = [named] if type(named) is int else dict.fromkeys(_sizes(module).values())
    for size in known:
        if size > 0 and not parts.key % size and not heads % (parts.key // size):
            yield size


def _flags(module: nn.Module, parts: Parts) -> list:
    name = "allow_neg_eigval"
    if parts.layer != "OlmoHybridGatedDeltaNet":
        return [{}]
    flags = [getattr(module, name)] if hasattr(module, name) else [False, True]
    return [{name: flag} for flag in flags]


def _why_not_plain(module: nn.Module, parts: Parts) -> Optional[str]:
    name = parts.names["conv1d"]
    vectors = {n: module._parameters[parts.names[n]] for n in VECTORS}
    reason = why_not_plain(name, module._modules[name], vectors)
    if reason is not None:
        return reason
    heads = len(vectors["A_log"])
    dims = list(_head_dims(module, parts, heads))
    if not dims or parts.value % heads or len(vectors["dt_bias"]) != heads:
        return "its heads of q, k and v do not match"
    if max(dims[0], parts.value // heads) > MAX_HEAD_DIM:
        return f"its head dims are above {MAX_HEAD_DIM}"
    return None
