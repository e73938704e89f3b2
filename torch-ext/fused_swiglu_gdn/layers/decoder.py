"""Decoder layers with a norm before the MLP, or after mixer and MLP, fused with the residual's
addition.

A layer returns the true hidden state, so that hooks and callers see the usual values.
"""

import functools
from typing import Callable, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..fp8.ops import NORM_QUANTISE
from ..runtime.ops import needs_grad
from .forward import Arguments, Word, Words, forward_by
from .fp8 import weights as fp8
from .norm import does_nothing, parameters_of_norm, rms_norm
from .pinned import Pinned


class Call(NamedTuple):
    """The arguments with which a layer calls one of its parts."""

    place: Optional[str]  # the keyword of the hidden states; None: the first by position
    after: Tuple[Word, ...]  # what else it gets by position
    words: Tuple[Word, ...]  # and by keyword
    passes: bool  # whatever the layer has no name for
    flat: bool  # the layer brings what the part gives into the shape of its input


class Order(NamedTuple):
    """The names of a layer's parts. Norms may be missing."""

    pre_mixer: Optional[str]
    post_mixer: Optional[str]
    pre_mlp: Optional[str]
    post_mlp: Optional[str]
    mixer: str
    mlp: str


class Inputs(NamedTuple):
    """The names of the parts of r + norm(down(act(gate(r)) * given)), what a layer does with inputs
    of its own (Gemma 4's small models)."""

    gate: str
    act: str
    down: str
    norm: str
    given: str  # the argument


class Beside(NamedTuple):
    """The names of the parts of norm(y) + post(experts(pre(r), ids, weights)), with (_, weights,
    ids) = router(r): a layer's experts beside its MLP, which gives y (Gemma 4's mixtures)."""

    norm: str
    router: str
    pre: str
    experts: str
    post: str


class LayerForm(NamedTuple):
    """A class of decoder layers: r = x + post(mixer(pre(x))); s = r + post(mlp(pre(r))), with
    experts beside the MLP; what that becomes by the layer's inputs; s * last."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    arguments: Arguments
    order: Order
    beside: Optional[Beside]
    inputs: Optional[Inputs]
    scale: Optional[str]  # the attribute by which what is added is multiplied
    last: Optional[str]  # the buffer by which the sum is multiplied
    mixer: Call
    mlp: Call
    dropouts: Tuple[str, ...]  # that drop nothing


@functools.lru_cache(maxsize=1024)
def forward_of(form: LayerForm) -> Callable:
    """Returns a forward for the layers of a class: ours, or the class's own for other calls."""
    return forward_by(form, Decoder(form).served, "DecoderLayer")


class Decoder:
    """A form, prepared for calls."""

    def __init__(self, form: LayerForm):
        self.form = form
        self.mixer, self.mlp = Part(form.mixer), Part(form.mlp)
        self.served = self.summed if form.last is form.inputs is None else self.scaled

    def scaled(
        self, layer: nn.Module, x: torch.Tensor, given: dict, rest: dict
    ) -> Optional[torch.Tensor]:
        """The sum of these arguments, with the layer's inputs, times the buffer, in the dtype of
        the sum."""
        form, last = self.form, None
        if form.last is not None:
            last = layer.__dict__["_buffers"].get(form.last)
            if last is None or form.last in layer.__dict__:
                return None
        if form.inputs is not None and given.get(form.inputs.given) is None:
            return None
        y = self.summed(layer, x, given, rest)
        if y is not None and form.inputs is not None:
            y = _with_inputs(layer.__dict__["_modules"], form.inputs, y, given)
        return y if y is None or last is None else (y * last).to(y.dtype)

    def summed(
        self, layer: nn.Module, x: torch.Tensor, given: dict, rest: dict
    ) -> Optional[torch.Tensor]:
        """The layer's sum for these arguments, or None if the class's own forward must run."""
        form = self.form
        if not form.pinned.unchanged(layer, form.guards):
            return None
        parts = layer.__dict__["_modules"]
        for name in form.dropouts:
            if not does_nothing(parts[name]):
                return None
        order, scale = form.order, form.scale and getattr(layer, form.scale)
        y, codes, mixer, mlp = x, None, parts[order.mixer], parts[order.mlp]
        if order.pre_mixer is not None:
            y, _, codes = _normed(parts[order.pre_mixer], x, None, mixer)
        if codes is None:
            y = self.mixer.called(mixer, y, given, rest)
        else:
            y, _ = fp8.with_codes(y, codes, None, self.mixer.called, mixer, y, given, rest)
        if order.pre_mlp is None:
            y = x = _normed_and_added(parts, order.post_mixer, y, x, scale)
            codes = None
        else:
            y = y if order.post_mixer is None else _normed(parts[order.post_mixer], y)[0]
            y = y if scale is None else y * scale
            y, x, codes = _normed(parts[order.pre_mlp], y, x, mlp, codes)
        if codes is None:
            y = self.mlp.called(mlp, y, given, rest)
        else:
            alone = form.beside is order.post_mlp is scale is None
            adds = alone and type(mlp).__dict__.get("served_as") in fp8.MLPS
            residual = x if adds else None
            y, added = fp8.with_codes(y, codes, residual, self.mlp.called, mlp, y, given, rest)
            if added:
                return y
        if form.beside is not None:
            y = _with_experts(parts, form.beside, y, x)
        if order.post_mlp is None and scale is None:
            return x + y
        return _normed_and_added(parts, order.post_mlp, y, x, scale)


class Part:
    """A part of a layer, called as the layer's own forward calls it."""

    def __init__(self, call: Call):
        self.place, self.passes, self.flat = call.place, call.passes, call.flat
        self.words = Words(call.words)
        self.after = Words(w._replace(name=str(i)) for i, w in enumerate(call.after))
        self.alone = call == Call(None, (), (), False, call.flat)

    def called(self, part: nn.Module, x: torch.Tensor, given: dict, rest: dict) -> torch.Tensor:
        """The first output of the part."""
        if self.alone:
            y = part(x)
        else:
            words, rest = self.words.made(None, given, rest, None), rest if self.passes else {}
            if self.place is not None:
                words[self.place] = x
                y = part(**words, **rest)
            elif self.after.empty:
                y = part(x, **words, **rest)
            else:
                y = part(x, *self.after.made(None, given, rest, None).values(), **words, **rest)
        y = y[0] if type(y) is tuple else y
        return y.view(x.shape) if self.flat and y.shape != x.shape else y


def _normed(
    norm: nn.Module, x: torch.Tensor, residual: Optional[torch.Tensor] = None,
    part: Optional[nn.Module] = None, before: Optional[fp8.Coded] = None,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[fp8.Coded]]:  # fmt: skip
    """norm(residual + x); that sum; and the former in FP8 where `part`, which takes it, would
    quantise it and one launch does both. One launch, if the call of the norm does nothing else.
    before: what the layer's first norm has made."""
    pinned = fp8.quantises(part, x, before) if fp8.FORMS and part is not None else None
    found = parameters_of_norm(norm, x, residual)
    if found is not None:
        weight, eps, mode, offset = found
        tensors = x, weight, residual
        if pinned is not None and not (torch.is_grad_enabled() and needs_grad(tensors)):
            made = NORM_QUANTISE(tensors, (eps, mode, offset))
            if made is not None:
                y, total, codes = made
                return y, total, fp8.Coded(codes, pinned)
        y = rms_norm(x, weight, eps, casting_mode=mode, offset=offset, residual=residual)
        return (y, None, None) if residual is None else (*y, None)
    x = x if residual is None else residual + x
    return norm(x), x, None


def _with_experts(parts: dict, names: Beside, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y, rows = _normed(parts[names.norm], y)[0], x.reshape(-1, x.shape[-1])
    _, weights, ids = parts[names.router](rows)
    routed = parts[names.experts](_normed(parts[names.pre], rows)[0], ids, weights)
    return _normed_and_added(parts, names.post, routed.reshape(x.shape), y, None)


def _with_inputs(parts: dict, names: Inputs, x: torch.Tensor, given: dict) -> torch.Tensor:
    y = parts[names.act](parts[names.gate](x)) * given[names.given]
    return _normed_and_added(parts, names.norm, parts[names.down](y), x, None)


def _normed_and_added(parts: dict, name: Optional[str], x: torch.Tensor, residual, scale):
    """residual + norm(x), in one launch if it is not scaled and that is all that calling it does;
    without a name there is no norm."""
    if name is not None:
        found = parameters_of_norm(parts[name], x, residual) if scale is None else None
        if found is not None:
            weight, eps, mode, offset = found
            words = {"casting_mode": mode, "offset": offset, "residual": residual, "after": True}
            return rms_norm(x, weight, eps, **words)
        x = _normed(parts[name], x)[0]
    return residual + (x if scale is None else x * scale)
