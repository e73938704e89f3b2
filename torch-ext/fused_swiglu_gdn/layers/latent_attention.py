"""Multi-head latent attention: a few tokens over a cache, in absorbed form, and all around it.

transformers keeps latents in the cache and sends the whole cache through kv_b_proj at every token.
Here a few tokens attend to the latents themselves. Prompts, and tokens that cannot, have the
attention function that the model has, with keys and values made of the latents; calls with
gradients are the class's own forward.

Sizes: B rows, T tokens, H heads, C latent and R rotary channels, N channels of a head without
rotary embedding, V of a value head, S slots of a cache.
"""

import functools
from typing import Callable, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..attention import ops
from ..attention.api import fused_latent_norm_rope, latent_attention_with_kvcache
from ..attention.call import reads_fp8
from ..projection.project import normed_project
from ..runtime import dispatch
from ..runtime.dtypes import HALF
from .attention import Updates, scale_by_position
from .few_tokens import by_torch, slots_of
from .forward import Arguments, Interface, Value, Word, Words, forward_by
from .fp8.linear import scaled
from .fp8.weights import weights_of
from .norm import parameters_of_norm
from .pinned import Pinned
from .plain import PLAIN_TENSORS, parameters_of, torch_unpatched
from .projections import projections

KERNEL = (ops.LATENT, "latent_attention")
# tokens that attend to latents. One over 1,024 slots takes .24 of the expanded form's time, over
# 32,768 .02 (latent_attention.json); from some 170 on the expanded form takes fewer operations, and
# between 8 and those nothing was timed
MOST = 8
LATENTS, ROTATED = (128, 256, 512), (16, 32, 64, 128)  # C and R of kernels


class LatentForm(NamedTuple):
    """A class of latent attention modules, and the form of its forward."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    arguments: Arguments
    tables: Optional[str]  # the argument that is cos and sin, or both as one complex tensor
    cache: Optional[str]  # the argument that is updated
    mask: Optional[str]
    positions: Optional[str]  # the argument by which queries are scaled
    index: Optional[Word]  # of the cache's layer
    updates: Tuple[Word, ...]  # what the cache's update gets besides, by position
    updates_with: Tuple[Word, ...]  # and by keyword
    queries: Tuple[str, ...]  # the projection, or one, its norm and another one
    kv_a: str  # makes latents and the key's rotary channels
    kv_norm: str  # of the latents
    kv_b: str  # expands latents
    out: str
    gate: Optional[str]  # of each head, behind a sigmoid in fp32
    rotary: Optional[str]  # of attention.checks.ROTARY; None: no rotary embedding
    sizes: Tuple[int, int, int, int]  # C, R, N, V
    implementation: Word  # what transformers' registry is asked for
    words: Tuple[Word, ...]  # keywords of the attention function
    rests: bool  # it also gets the keywords that the forward has no name for
    eager: Callable  # the attention function of implementation "eager"


@functools.lru_cache(maxsize=1024)
def forward_of(form: LatentForm) -> Callable:
    """Returns a forward for the modules of a class: ours, or the class's own for other calls."""
    return forward_by(form, LatentAttention(form).served, "LatentAttention", compiled=False)


class Call(NamedTuple):
    """A call that is ours."""

    x: torch.Tensor
    mask: Optional[torch.Tensor]
    function: Callable  # the attention function, and its keywords:
    words: dict
    more: dict
    tables: tuple  # cos and sin
    norm: tuple  # of parameters_of_norm
    past: object  # the cache
    index: object  # of its layer
    slots: object  # that layer, if it is a static one
    few: bool  # tokens over a cache, by SDPA alone: they may attend to latents

    @property
    def scale(self) -> Optional[float]:
        return self.words.get("scaling", self.more.get("scaling"))


class LatentAttention:
    """A form, prepared for calls."""

    normed_and_turned = staticmethod(fused_latent_norm_rope)

    def __init__(self, form: LatentForm):
        self.form = form
        self.interface, self.index = Interface(form.implementation, form.eager), Value(form.index)
        self.words, self.updates = Words(form.words), Updates(form)

    def served(
        self, attention: nn.Module, x: torch.Tensor, given: dict, rest: dict
    ) -> Optional[tuple]:
        """The module's output for these arguments, or None if the class's own forward must run."""
        form, call = self.form, self.call(attention, x, given, rest)
        if call is None:
            return None
        (B, T, _), parts, weights = x.shape, attention.__dict__["_modules"], None
        q, kv = self.projected(parts, x)
        q = q.view(B, T, -1, form.sizes[2] + form.sizes[1])
        slots, weight = call.slots, None
        if slots is not None:
            weight = self.weight(call, parts, slots.keys, slots.values)
        out = None if weight is None else self.stepped(call, q, kv, weight)
        if out is None:
            out, weights = self.attended(call, q, kv, weight, attention, given, rest)
        if form.gate is not None:
            out = out * torch.sigmoid(parts[form.gate](x).float()).to(x.dtype).unsqueeze(-1)
        out = out.reshape(B, T, -1).contiguous()
        return projections(out, parts[form.out], eager=True)[0], weights

    def attended(self, call: "Call", q, kv, weight, attention, given: dict, rest: dict) -> tuple:
        """The heads' outputs, and the weights of attention or None: of latents, or of the keys and
        values that are made of them. weight: of kv_b and its scales, if it is known that they are
        latents."""
        form, parts = self.form, attention.__dict__["_modules"]
        latents, rotated, length = self.kept(call, q, kv, attention, given, rest)
        if form.positions is not None:
            scale = scale_by_position(given[form.positions], attention.config.rope_parameters)
            q = q * scale.to(q.dtype)
        if call.slots is None:
            weight = self.weight(call, parts, latents, rotated)
        if weight is None:
            k, v = self.expanded(parts, latents, rotated, q.shape[2])
            words = {**call.words, **call.more}
            return call.function(attention, q.transpose(1, 2), k, v, call.mask, **words)
        weight, scales = weight
        out = latent_attention_with_kvcache(
            q, latents, rotated, weight, length, qk_nope_head_dim=form.sizes[2],
            attention_mask=call.mask, softmax_scale=call.scale, weight_scale=scales,
        )  # fmt: skip
        return out, None

    def call(
        self, attention: nn.Module, x: torch.Tensor, given: dict, rest: dict
    ) -> Optional["Call"]:
        """Everything that a call needs, or None if it is not one of ours."""
        form, (C, R, _, _), past = self.form, self.form.sizes, given.get(self.form.cache)
        if form.positions is not None and given.get(form.positions) is None:
            return None
        if attention.training or x.ndim != 3 or not x.numel() or torch.is_grad_enabled():
            return None
        if torch.is_autocast_enabled(x.device.type) or not _has_kernels(x, C, R):
            return None
        if not torch_unpatched(False):
            return None
        if not form.pinned.unchanged(attention, form.guards):
            return None
        own_tables, parts = given.get(form.tables), attention.__dict__["_modules"]
        tables, norm = tables_of(form, own_tables, x, R), parameters_of_norm(parts[form.kv_norm])
        if tables is None or not _is_plain(norm, x):
            return None
        words = self.words.made(attention, given, rest, own_tables)
        more, function = rest if form.rests else {}, self.interface.of(attention, given)
        index, slots, few, mask = None, None, False, given.get(form.mask)
        if past is not None:
            index = self.index.of(attention, given)
            slots = slots_of(past, index, x[:, :, None])
            drops = words.get("dropout") or more.get("dropout")
            few = x.shape[1] <= MOST and not drops and by_torch(function, words, more)
        return Call(x, mask, function, words, more, tables, norm, past, index, slots, few)

    def weight(self, call: "Call", parts: dict, latents, rotated) -> Optional[tuple]:
        """The weight of kv_b and its scales, if the tokens attend to these latents and keys of a
        cache."""
        if not call.few or not _attends(call.x, call.mask, latents, rotated):
            return None
        return _weight(parts[self.form.kv_b], call.x, *self.form.sizes[2:])

    def stepped(self, call: "Call", q, kv, weight: tuple) -> Optional[torch.Tensor]:
        """The heads' outputs of tokens that are written to a static cache and attend to it, or None
        if that takes more than one operation."""
        form, slots = self.form, call.slots
        if form.positions is not None:
            return None
        scale = q.shape[3] ** -0.5 if call.scale is None else float(call.scale)
        norm, eps = call.norm[:2]
        tensors = (
            q, kv, norm, *call.tables, slots.keys, slots.values, *weight, slots.cumulative_length,
            call.mask,
        )  # fmt: skip
        options = (form.sizes[2], scale, eps, form.rotary or "halves")
        step = ops.LATENT_STEP.serving(tensors, options)
        return None if step is None else step(*tensors)

    def kept(self, call: "Call", q, kv, attention, given: dict, rest: dict) -> tuple:
        """Latents and keys of the cache, or of these tokens without one, and how many slots of a
        static cache are filled; q is turned in place."""
        turn = {"eps": call.norm[1], "rotary": self.form.rotary or "halves"}
        if call.slots is not None:
            keys, values, length = (
                call.slots.keys, call.slots.values, call.slots.cumulative_length
            )  # fmt: skip
            self.normed_and_turned(
                q, kv, call.norm[0], *call.tables, **turn, latent_cache=keys, rotated_cache=values,
                cache_position=length,
            )  # fmt: skip
            length.add_(q.shape[1])
            return keys, values, length
        latents, rotated = self.normed_and_turned(q, kv, call.norm[0], *call.tables, **turn)
        if call.past is not None:
            made = call.past, latents, rotated, call.index
            latents, rotated = self.updates.of(*made, attention, given, rest)
        return latents, rotated, None

    def projected(self, parts: dict, x: torch.Tensor) -> tuple:
        """Queries, in memory of its own, and latents beside the key."""
        first, *others = self.form.queries
        q, kv = projections(x, parts[first], parts[self.form.kv_a], eager=True)
        if others:
            q = _normed(q, *map(parts.__getitem__, others))
        last = parts[others[1] if others else first]
        own = parameters_of(last) is not None or weights_of((last,), x)[0] is not None
        return (q if own else q.clone()), kv

    def expanded(self, parts: dict, latents, rotated, heads: int) -> tuple:
        """Keys [B, H, S, N + R] and values [B, H, S, V] of latents [B, 1, S, C]."""
        (B, _, S, _), (_, R, N, _) = latents.shape, self.form.sizes
        kv = parts[self.form.kv_b](latents).view(B, S, heads, -1).transpose(1, 2)
        keys = kv.new_empty(B, heads, S, N + R)
        keys[..., :N].copy_(kv[..., :N])
        keys[..., N:].copy_(rotated)
        return keys, kv[..., N:]


def _normed(q: torch.Tensor, norm: nn.Module, linear: nn.Module) -> torch.Tensor:
    """linear(norm(q)), of one token in one launch."""
    found, weights = parameters_of_norm(norm), parameters_of(linear)
    if weights is not None and weights[0][1] is None and _is_plain(found, q):
        y = normed_project(q, found[0], found[1], weights[0][0])
        if y is not None:
            return y
    return projections(norm(q), linear, eager=True)[0]


def _weight(linear: nn.Module, x: torch.Tensor, N: int, V: int) -> Optional[tuple]:
    """(weight, None) of a projection that is a product with it alone, of the dtype of x, (weight,
    scales) of an FP8Linear, or None."""
    found = parameters_of(linear)
    if found is None:
        return scaled(linear, x, KERNEL) if reads_fp8(x.device, N, V) else None
    if found[0][1] is not None:
        return None
    weight = found[0][0]
    return (weight, None) if weight.dtype is x.dtype and weight.device == x.device else None


def _has_kernels(x: torch.Tensor, C: int, R: int) -> bool:
    if dispatch.forced is not None:
        return True
    fits = x.dtype in HALF and C in LATENTS and R in ROTATED
    return fits and dispatch.has_kernels_at(*KERNEL, x.device)


def _is_plain(norm: Optional[tuple], x: torch.Tensor) -> bool:
    """True if the norm is x / rms(x) times a weight of the same dtype."""
    if norm is None or norm[0] is None:
        return False
    weight, _, casting_mode, offset = norm
    alike = weight.dtype is x.dtype and weight.device == x.device
    return alike and casting_mode == "llama" and offset == 0.0


def tables_of(form: LatentForm, tables, x: torch.Tensor, R: int) -> Optional[tuple]:
    """cos and sin for fused_latent_norm_rope, both None without rotary embedding; None if they do
    not fit."""
    if form.rotary is None:
        return None, None
    if isinstance(tables, torch.Tensor):
        if not tables.is_complex():
            return None
        cos, sin, width = tables.real, tables.imag, R // 2
    else:
        cos, sin = tables
        if cos.dtype is not x.dtype or sin.dtype is not x.dtype:
            return None
        width = R
    if cos.shape != sin.shape or cos.device != x.device or sin.device != x.device:
        return None
    if cos.ndim != 3 or cos.shape[0] not in (1, x.shape[0]) or cos.shape[1:] != (x.shape[1], width):
        return None
    if form.rotary != "halves" and width == R:
        return cos[..., : R // 2], sin[..., : R // 2]
    return cos, sin


def _attends(x: torch.Tensor, mask, latents, rotated) -> bool:
    """True if latent_attention_with_kvcache takes these latents and keys of a cache, and a mask, or
    none for a single token."""
    (B, T, _), S = x.shape, latents.shape[2]
    for tensor in (latents, rotated):
        if type(tensor) not in PLAIN_TENSORS or tensor.shape[:3] != (B, 1, S) or tensor.ndim != 4:
            return False
        if tensor.dtype is not x.dtype or tensor.device != x.device:
            return False
    if mask is None:
        return T == 1
    if type(mask) not in PLAIN_TENSORS or mask.ndim != 4 or mask.shape[3] != S:
        return False
    plain = mask.dtype is torch.bool or mask.is_floating_point()
    return plain and mask.shape[0] in (1, B) and mask.shape[1] == 1 and mask.shape[2] in (1, T)
