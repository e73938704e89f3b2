"""Recognises the Kimi Delta Attention layers that layers/kda.py computes.

The forwards of its class, and of the parts that have parts of their own, as a forget gate's, give
what ours gives on a small copy of the layer. The role of each part follows from what the forward
does with it.
"""

import collections
from typing import Dict, Iterator, Optional, Tuple, Union

import torch
from torch import nn

from ..gdn.checks import MAX_HEAD_DIM
from ..layers.delta import is_gated_norm
from ..layers.kda import KdaForm, Owner
from ..layers.pinned import found_at
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
from .kda_trial import Inner, Layout, found_by
from .serving import own_class
from .stand_ins import features
from .trial import form_key, remembered

LAYER = "KimiDeltaAttention"
USUAL = {"conv1d", "forget_gate", "o_norm"}  # parts of a module that the report has a row for
NOT_KNOWN = "its parts are not those of a Kimi Delta Attention layer known here"

_forms: Dict[tuple, Union[Found, str]] = {}


def kimi_delta_attention(
    module: nn.Module,
) -> Optional[Tuple[str, Optional[str], Optional[KdaForm]]]:
    """Our layer for a module, why it is left alone or None, and the form of its class; None for a
    module without the parts by which such a layer is known."""
    usual = USUAL <= module._modules.keys()
    convs = [part for part in module._modules.values() if isinstance(part, nn.Conv1d)]
    if not usual and not any(map(is_depthwise, convs)):
        return None
    layout = _layout(module)
    if not usual and (layout is None or _why_not_layout(module, layout) is not None):
        return None
    if layout is None:
        return LAYER, NOT_KNOWN, None
    try:
        return LAYER, None, _form(module, layout)
    except Refused as why:
        return LAYER, str(why), None


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[Tuple[str, object]]:
    """The parts and parameters of a module by their paths; instead of a part that has parts or
    parameters of its own, those."""
    for name, x in module._parameters.items():
        if x is not None:
            yield prefix + name, x
    for name, part in module._modules.items():
        if part is None:
            continue
        yield prefix + name, part
        if _has_parts(part):
            yield from _leaves(part, f"{prefix}{name}.")


def _has_parts(part: nn.Module) -> bool:
    whole = features(part) or is_depthwise(part)
    return not whole and (bool(part._modules) or len(part._parameters) > 1)


def _layout(module: nn.Module) -> Optional[Layout]:
    """Returns the parts of a module, or None if they cannot be those of a layer of ours."""
    linears, convs, norms, vectors = {}, [], [], {}
    for path, leaf in _leaves(module):
        if not isinstance(leaf, nn.Module):
            vectors[path] = tuple(told(leaf, "shape"))
        elif features(leaf):
            linears[path] = features(leaf)
        elif is_depthwise(leaf):
            convs.append(path)
        elif not _has_parts(leaf):
            norms.append(path)
    if len(convs) != 1 or len(norms) != 1 or len(vectors) != 2 or len(linears) < 3:
        return None
    shape = told(module.get_submodule(convs[0]).weight, "shape")
    if shape is None or len(shape) != 3:  # it is elsewhere
        return None
    D, _, taps = shape
    sizes = sorted(torch.Size(shape).numel() for shape in vectors.values())
    (hidden, _), *_ = collections.Counter(given for given, _ in linears.values()).most_common()
    return Layout(linears, convs[0], norms[0], vectors, sizes[0], D // 3, hidden, taps)


def _why_not_layout(module: nn.Module, layout: Layout) -> Optional[str]:
    conv = module.get_submodule(layout.conv)
    vectors = {path: found_at(module, path) for path in layout.vectors}
    reason = why_not_plain(layout.conv, conv, vectors)
    if reason is not None:
        return reason
    D, H = conv.weight.shape[0], layout.heads
    sizes = sorted(torch.Size(shape).numel() for shape in layout.vectors.values())
    if D % 3 or sizes != [H, layout.channels] or H < 1 or layout.channels % H:
        return "its heads and those of its forget gate do not match"
    if layout.head_dim > MAX_HEAD_DIM:
        return f"its head dim is above {MAX_HEAD_DIM}"
    return None


def _form(module: nn.Module, layout: Layout) -> KdaForm:
    """Returns the form of a module with such parts; raises Refused, which says why it has none."""
    reason = _why_not_layout(module, layout)
    if reason is not None:
        raise Refused(reason)
    inner = tuple(_inner(module, layout))
    is_gated_norm(module.get_submodule(layout.norm))  # while tracing it cannot look
    found = _found(layout, inner)
    ours = {found.roles.index, found.roles.bound, "training", f"{layout.conv}.bias"}
    owners = []
    for each in inner:
        values = each.facts.values.items()
        guards = tuple([(n, v) for n, v in values if each.below(n) not in ours])
        owners.append(Owner(each.path, each.kind, each.facts.pinned, guards))
    return KdaForm(inner[0].kind, *found[1:], tuple(owners), found.roles)


def _inner(module: nn.Module, layout: Layout) -> Iterator[Inner]:
    """The layer and its parts that have parts of their own; raises Refused."""
    yield _read("", module, layout)
    for path, leaf in _leaves(module):
        if isinstance(leaf, nn.Module) and _has_parts(leaf):
            yield _read(path, leaf, layout)


def _read(path: str, module: nn.Module, layout: Layout) -> Inner:
    kind = own_class(module)
    facts = read(kind, module)
    refuse_hooks(kind, "" if path else layout.conv)
    refuse_reads(module, kind, facts, *(("__call__",) if path else ()))
    return Inner(path, module, kind, facts)


def _found(layout: Layout, inner: Tuple[Inner, ...]) -> Found:
    """The roles of a layer's parts and arguments, remembered for the layers of a class."""
    values = {}
    for each in inner:
        values.update((each.below(name), v) for name, v in each.facts.values.items())
    code = tuple([(each.path, each.kind, each.facts.pinned.codes) for each in inner])
    index = index_among(values)
    values.pop(index, None)
    layer = inner[0]
    of_class = form_key(layer.module, layer.kind, layer.facts, values)
    biased = layer.module.get_submodule(layout.conv).bias is not None
    linears, vectors = map(tuple, (layout.linears.items(), layout.vectors.items()))
    key = code, of_class, linears, vectors, layout[1:3], layout[4:], biased
    return remembered(_forms, key, found_by, layout, inner, index)
