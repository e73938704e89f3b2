"""Decoder layers with a norm before the MLP or after mixer and MLP: it is one with the sum before
or after it.

What a layer returns is the true hidden state, for whoever looks at it.
"""

import functools
from typing import Callable, FrozenSet, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .forward import forward_by
from .norm import does_nothing, fits, normed, parameters_of_norm
from .pinned import Pinned, has_values


class Call(NamedTuple):
    """How a layer calls one of its parts."""

    place: Optional[str]  # the keyword of the hidden states; None: by position
    arguments: Tuple[Tuple[str, str, object], ...]  # (the part's, the layer's, its default)
    passes: bool  # whatever else the layer is given
    flat: bool  # the layer brings what the part gives into the shape of its input


class Order(NamedTuple):
    """The names of a layer's parts. Norms may be missing."""

    pre_mixer: Optional[str]
    post_mixer: Optional[str]
    pre_mlp: Optional[str]
    post_mlp: Optional[str]
    mixer: str
    mlp: str


class LayerForm(NamedTuple):
    """A class of decoder layers: r = x + post(mixer(pre(x))); r + post(mlp(pre(r)))."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    names: Tuple[str, ...]  # of its arguments
    renamed: FrozenSet[str]  # keywords that the class's own forward takes for others
    order: Order
    scale: Optional[str]  # the attribute by which what is added is multiplied
    mixer: Call
    mlp: Call
    dropouts: Tuple[str, ...]  # that drop nothing


@functools.lru_cache(maxsize=1024)
def forward_of(form: LayerForm) -> Callable:
    """A forward for the layers of a class: ours, or the class's own where that differs."""
    return forward_by(form, _serve, "DecoderLayer")


def _serve(
    layer: nn.Module, form: LayerForm, x: torch.Tensor, given: dict
) -> Optional[torch.Tensor]:
    if not form.pinned.unchanged(layer) or not has_values(layer, form.guards):
        return None
    parts = layer.__dict__["_modules"]
    for name in form.dropouts:
        if not does_nothing(parts[name]):
            return None
    order, scale = form.order, form.scale and getattr(layer, form.scale)
    y = x if order.pre_mixer is None else _normed(parts[order.pre_mixer], x)
    y = _called(parts[order.mixer], form.mixer, y, given, form.names)
    if order.pre_mlp is None:
        y = x = _normed_and_added(parts, order.post_mixer, y, x, scale)
    else:
        y = y if order.post_mixer is None else _normed(parts[order.post_mixer], y)
        y, x = _added_and_normed(parts[order.pre_mlp], y if scale is None else y * scale, x)
    y = _called(parts[order.mlp], form.mlp, y, given, form.names)
    return _normed_and_added(parts, order.post_mlp, y, x, scale)


def _called(part: nn.Module, call: Call, x: torch.Tensor, given: dict, names) -> torch.Tensor:
    """The first output of a part, called as the layer's own forward calls it."""
    if call.place is None and not call.arguments and not call.passes:
        y = part(x)
        return _as_given(y, x, call)
    keywords = {name: given.get(source, default) for name, source, default in call.arguments}
    if call.passes:
        for name in given:
            if name not in names:
                keywords[name] = given[name]
    if call.place is None:
        y = part(x, **keywords)
    else:
        keywords[call.place] = x
        y = part(**keywords)
    return _as_given(y, x, call)


def _as_given(y, x: torch.Tensor, call: Call) -> torch.Tensor:
    y = y[0] if type(y) is tuple else y
    return y.view(x.shape) if call.flat and y.shape != x.shape else y


def _normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """norm(x), without the call of a module where that does no more."""
    found = parameters_of_norm(norm)
    return norm(x) if found is None or not fits(x, found[0]) else normed(x, found)


def _found(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> Optional[tuple]:
    """What rms_norm takes, if that is all that calling the norm does and the sum fits into it."""
    found = parameters_of_norm(norm)
    if found is None or type(x) is not type(residual) or x.dtype is not residual.dtype:
        return None
    return found if x.shape == residual.shape and fits(x, found[0]) else None


def _added_and_normed(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor):
    """norm(residual + x) and residual + x, in one launch if that is all that calling it does."""
    found = _found(norm, x, residual)
    if found is not None:
        return normed(x, found, residual)
    total = residual + x
    return norm(total), total


def _normed_and_added(parts: dict, name: Optional[str], x: torch.Tensor, residual, scale):
    """residual + norm(x), in one launch if it is not scaled and that is all that calling it does;
    without a name there is no norm."""
    if name is not None:
        found = _found(parts[name], x, residual) if scale is None else None
        if found is not None:
            return normed(x, found, residual, after=True)
        x = _normed(parts[name], x)
    return residual + (x if scale is None else x * scale)
