"""Attention modules: everything around the attention function, which remains the user's choice.

Sizes: B rows, T tokens, HQ and HK heads, D head dim, R rotary dim, S slots of a cache.
"""

import functools
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..attention.api import fused_qk_norm_rope, sigmoid_gate
from ..runtime.dtypes import HALF
from .few_tokens import by_torch, decodes, slots_of
from .forward import Arguments, Interface, Value, Word, Words, forward_by
from .fp8 import linear as fp8
from .norm import does_nothing, parameters_of_norm
from .pinned import Pinned
from .projections import projections

GATES, NORMS = (False, True), ("none", "head", "all")
# which channels turn together: those half a table apart; neighbours, by the first half of the
# tables (GLM); neighbours, by tables that have their channels side by side (GLM-4V); half a head
# apart, by tables with one angle for both (gpt-oss)
ROTARY = ("halves", "pairs", "channels", "angles")
FEW = 8  # tokens of a round, of which each has a mask of its own: 1 and at most 7 drafts (mtp.MOST)


class Heads(NamedTuple):
    """The computation of queries and keys from their projections."""

    gated: bool  # the second half of each head of q_proj is a gate on what attention gives
    norm: str  # over which width queries and keys are normed: "none", "head", "all"
    rotary: Optional[str]  # of ROTARY; None: no rotary embedding


class AttentionForm(NamedTuple):
    """A class of attention modules, and the form of its forward."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    arguments: Arguments
    tables: Optional[str]  # the argument that is cos and sin
    cache: Optional[str]  # the argument that is updated
    mask: Optional[str]
    positions: Optional[str]  # the argument by which queries are scaled
    store: Optional[str]  # the argument by which layers share keys and values,
    stored: Optional[Word]  # the source of the key under which they are,
    takes: bool  # and whether they are another layer's there, or this one's are stored
    index: Optional[Word]  # of the cache's layer
    updates: Tuple[Word, ...]  # what the cache's update gets besides, by position
    updates_with: Tuple[Word, ...]  # and by keyword
    # of queries, keys and values, or one that makes all; of two the second makes keys and values
    projections: Tuple[str, ...]
    sizes: Tuple[int, ...]  # the widths of queries, keys and values
    q_norm: Optional[str]
    k_norm: Optional[str]
    v_norm: Optional[str]  # a norm of each head of the values, which is called as it is
    gate: Optional[str]  # a projection whose outputs, for each channel or head, gate the attention
    gate_by: Optional[str]  # by a function of GATE_FUNCTIONS; None: by sigmoid
    out: str
    v_scale: Optional[str]  # the attribute by which values are multiplied
    heads: Heads
    D: int
    dims: int  # of the tables: 3, or 2 where all rows have the same positions
    widths: Tuple[int, ...]  # that the tables may have; none: any up to D
    wide: bool  # the tables may be in fp32 where x is in 16 bits
    optional: bool  # without tables there is no rotary embedding
    identities: Tuple[str, ...]  # parts that do nothing
    implementation: Word  # what transformers' registry is asked for
    words: Tuple[Word, ...]  # keywords of the attention function in evaluation,
    training_words: Tuple[Word, ...]  # and in training
    rests: bool  # it also gets the keywords that the forward has no name for
    eager: Callable  # the attention function of implementation "eager"


def softplus(gate: torch.Tensor) -> torch.Tensor:
    """softplus in at least fp32, in the dtype of the gate (Laguna)."""
    return F.softplus(gate.float() if gate.dtype in HALF else gate).to(gate.dtype)


# of gates on what attention gives, from a projection of their own: for each channel or each head
GATE_FUNCTIONS: Dict[str, Callable] = {"softplus": softplus}


def scale_by_position(positions: torch.Tensor, rope_parameters: dict) -> torch.Tensor:
    """The factor of a token's queries (Llama 4, Ministral 3, Mistral 4), [B, T, 1, 1]; positions
    [B, T]."""
    beta = rope_parameters["llama_4_scaling_beta"]
    most = rope_parameters["original_max_position_embeddings"]
    return (1 + beta * torch.log(1 + torch.floor(positions / most)))[:, :, None, None]


class Updates:
    """The update of a cache, as the forwards of a form make it."""

    def __init__(self, form):
        self.by_place = Words(w._replace(name=str(i)) for i, w in enumerate(form.updates))
        self.by_name = Words(form.updates_with)
        self.plain = not (form.updates or form.updates_with)

    def of(self, past, k: torch.Tensor, v: torch.Tensor, index, *call) -> tuple:
        """Keys and values of the cache after an update with those of these tokens. call: what
        Words.made takes; without tables where none are passed on."""
        if self.plain:
            return past.update(k, v, index)
        call = (*call, None)[:4]
        words = self.by_name.made(*call)
        return past.update(k, v, index, *self.by_place.made(*call).values(), **words)


@functools.lru_cache(maxsize=1024)
def forward_of(form: AttentionForm) -> Callable:
    """Returns a forward for the modules of a class: ours, or the class's own for other calls."""
    return forward_by(form, Attention(form).served, "Attention")


class Attention:
    """A form, prepared for calls."""

    normed_and_turned = staticmethod(fused_qk_norm_rope)
    projected, gated = staticmethod(projections), staticmethod(sigmoid_gate)
    quantised, coded = staticmethod(fp8.gated), staticmethod(fp8.attended)

    def __init__(self, form: AttentionForm):
        self.form = form
        self.interface = Interface(form.implementation, form.eager)
        self.index = Value(form.index or Word("", "constant"))
        self.stored = Value(form.stored or Word("", "constant"))
        self.words = Words(form.words), Words(form.training_words)
        self.updates = Updates(form)
        # arguments without which the forward does something else
        self.more = tuple(filter(None, [form.store, form.positions]))
        self.products = (*form.projections, *filter(None, [form.gate]))
        changed = form.v_norm is not None or form.v_scale is not None
        self.odd = len(form.projections) < 3 or changed
        self.interleaved = form.heads.rotary in ("pairs", "channels")
        self.width = 2 * form.D if form.heads.gated else form.D

    def norms(self, parts: dict, x: torch.Tensor) -> Optional[dict]:
        """Keyword arguments of fused_qk_norm_rope for the norms of queries and keys, or None."""
        form, D = self.form, self.form.D
        q, k = parameters_of_norm(parts[form.q_norm]), parameters_of_norm(parts[form.k_norm])
        if q is None or k is None or q[1:] != k[1:] or q[0] is None or k[0] is None:
            return None
        (q_weight, eps, casting_mode, offset), k_weight = q, k[0]
        widths = form.sizes if form.heads.norm == "all" else (D, D)
        if q_weight.shape != widths[:1] or k_weight.shape != widths[1:2]:
            return None
        if not q_weight.device == k_weight.device == x.device:
            return None
        if casting_mode == "llama" and not (q_weight.dtype is k_weight.dtype is x.dtype):
            return None  # the product is of another dtype
        return {
            "q_weight": q_weight, "k_weight": k_weight, "eps": eps, "casting_mode": casting_mode,
            "offset": offset, "norm": form.heads.norm,
        }  # fmt: skip

    def served(
        self, attention: nn.Module, x: torch.Tensor, given: dict, rest: dict
    ) -> Optional[tuple]:
        """The module's output for these arguments, or None if the class's own forward must run."""
        form, D = self.form, self.form.D
        if x.ndim != 3 or not form.pinned.unchanged(attention, form.guards):
            return None
        parts = attention.__dict__["_modules"]
        if form.identities and not all([does_nothing(parts[n]) for n in form.identities]):
            return None
        own_tables = given.get(form.tables)
        tables = _tables(form, own_tables, x, D)
        norms = {} if form.q_norm is None else self.norms(parts, x)
        if None in (tables, norms) or self.more and any([given.get(n) is None for n in self.more]):
            return None
        past, mask = given.get(form.cache), given.get(form.mask)
        function, more = self.interface.of(attention, given), rest if form.rests else {}
        words = self.words[attention.training].made(attention, given, rest, own_tables)
        casts = torch.is_autocast_enabled(x.device.type)
        if casts and not _casts_alike(x, past, function, words, more):
            return None
        made, gate = self.projected(x, *map(parts.__getitem__, self.products), eager=True), None
        if form.gate is not None:
            *made, gate = made
        q, k, v = self.made(attention, parts, x, made) if self.odd else made
        B, T = x.shape[:2]
        q = q.view(B, T, -1, self.width)
        if form.heads.gated:
            q, gate = q.split(D, -1)  # [B, T, HQ, D] each
        elif gate is not None:
            gate = gate.view(B, T, q.shape[2], -1)
        k, v = k.view(B, T, -1, D), v.view(B, T, k.shape[-1] // D, -1)
        of = self.index.attribute  # mostly: it is found without a function of ours
        index = None if past is None else of(attention) if of else self.index.of(attention, given)
        slots = None if past is None or form.takes else slots_of(past, index, k)
        if slots is not None:
            q, _ = fused_qk_norm_rope(
                q, k, *tables, **norms, v=v, key_cache=slots.keys, value_cache=slots.values,
                cache_position=slots.cumulative_length, interleaved=self.interleaved,
            )  # fmt: skip
            slots.cumulative_length.add_(T)
            k, v = slots.keys, slots.values
        else:
            q, k = self.normed_and_turned(q, k, *tables, **norms, interleaved=self.interleaved)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            if past is not None and not form.takes:
                k, v = self.updates.of(past, k, v, index, attention, given, rest, own_tables)
        if self.more:
            q, k, v = self.shared_and_scaled(attention, given, q, k, v)
        last = parts[form.out]
        if T <= FEW and (attend := decodes(function, q, k, v, mask, past, slots, words, more)):
            scale = words.get("scaling", more.get("scaling"))
            length, weights = None if slots is None else slots.cumulative_length, None
            if gate is None and fp8.FORMS and (y := self.coded(q, k, v, length, mask, scale, last)):
                return y
            out = attend(q, k, v, length, attention_mask=mask, softmax_scale=scale)
        else:
            out, weights = function(attention, q.transpose(1, 2), k, v, mask, **words, **more)
        if gate is not None:
            return self.gated_output(out, gate, last), weights
        return self.projected(out.reshape(B, T, -1).contiguous(), last, eager=True)[0], weights

    def gated_output(self, out: torch.Tensor, gate: torch.Tensor, linear: nn.Module):
        """linear(out) of heads [B, T, HQ, D], gated, [B, T, N]; gate [B, T, HQ, D or 1]."""
        if self.form.gate_by is not None:
            out = out * GATE_FUNCTIONS[self.form.gate_by](gate)
        elif fp8.FORMS and (y := self.quantised(out, gate, linear)) is not None:
            return y
        else:
            out = self.gated(out, gate) if out.shape == gate.shape else out * torch.sigmoid(gate)
        return self.projected(out.reshape(*gate.shape[:2], -1).contiguous(), linear, eager=True)[0]

    def made(self, attention: nn.Module, parts: dict, x: torch.Tensor, made: list) -> Sequence:
        """Queries, keys and values as projected, where each has no projection of its own, or values
        are normed or scaled. Where they are another layer's a head of the queries stands in for
        them."""
        form = self.form
        if form.takes:
            return made[0], made[0][..., : form.D], made[0][..., : form.D]
        q, k, v = made[0].split(form.sizes, -1) if len(made) == 1 else (*made[:2], made[-1])
        if form.v_norm is not None:
            v = parts[form.v_norm](v.view(*x.shape[:2], k.shape[-1] // form.D, -1)).flatten(2)
        if form.v_scale is not None:
            v = v * attention.__dict__[form.v_scale]
        return q, k, v

    def shared_and_scaled(self, attention: nn.Module, given: dict, q, k, v) -> tuple:
        """Keys and values of another layer, or this one's, which are stored; scaled queries."""
        form = self.form
        if form.takes:
            k, v = given[form.store][self.stored.of(attention, given)]
            k, v = k.to(q.device), v.to(q.device)  # of a layer on another GPU
        elif form.store is not None:
            given[form.store][self.stored.of(attention, given)] = k, v
        if form.positions is not None:
            scale = scale_by_position(given[form.positions], attention.config.rope_parameters)
            q = q * scale.to(q.dtype)
        return q, k, v


def _tables(form: AttentionForm, tables, x: torch.Tensor, D: int) -> Optional[tuple]:
    """cos and sin for fused_qk_norm_rope, both None without rotary embedding; None if they do not
    fit."""
    rotary = form.heads.rotary
    if rotary is None:
        return None, None
    if tables is None:
        return (None, None) if form.optional else None
    cos, sin = tables
    R = cos.shape[-1]
    fp32 = form.wide and cos.dtype is torch.float32
    if not (fp32 or cos.dtype is x.dtype) or cos.ndim != form.dims or cos.shape[-2] != x.shape[1]:
        return None
    if sin.dtype is not cos.dtype or sin.shape != cos.shape:
        return None
    if R % 2 or R > D or form.widths and R not in form.widths:
        return None
    if form.dims == 2:
        cos, sin = cos[None], sin[None]
    if rotary == "pairs":
        return cos[..., : R // 2], sin[..., : R // 2]
    if rotary == "angles":
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    if rotary == "channels":
        return cos.unflatten(-1, (-1, 2)), sin.unflatten(-1, (-1, 2))
    return cos, sin


def _casts_alike(x: torch.Tensor, past, function, words: dict, rest: dict) -> bool:
    """True if attention is of the same queries and keys under autocast.

    Where it makes projections of another dtype than x, tables of x's dtype turn them into that,
    from which SDPA casts them again; ours are of the other one throughout. A cache would keep them.
    """
    if torch.get_autocast_dtype(x.device.type) is x.dtype:
        return True
    return past is None and x.dtype is torch.float32 and by_torch(function, words, rest)
