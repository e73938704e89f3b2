"""Whole Gated DeltaNet layers: Qwen3.5, Qwen3-Next, OLMo-Hybrid.

They differ in their projections and share the rest, `computed`. Sizes: as in delta.py.
"""

import functools
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch

from ..fp8.call import Quantised
from ..fp8.ops import products
from ..gdn import api as gdn
from ..gdn_layer.ops_fp8 import DECODE_QUANTISE, NORM_QUANTISE
from ..gdn_layer.ops_fused import DECODE
from ..runtime.activations import OF_CONVOLUTION, OF_GATED_NORM, SAME
from .delta import (
    Sequences,
    convolution,
    is_gated_norm,
    normed_and_gated,
    recurred,
    without_padding,
)
from .forward import Arguments, Layer, forward_by, refuse_context
from .fp8 import linear as fp8
from .pinned import Pinned, call_check
from .plain import PLAIN_TENSORS, torch_unpatched
from .projections import projections

RULES = gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule


def _gated_delta_net(
    layer, norm, q, k, v, z, a, b, seq: Sequences, joined, allow_neg_eigval: bool,
    quantises: bool, eager: bool,
):  # fmt: skip
    """From the input projections to the input of the output projection.

    q, k [B, T, H, K]; v, z [B, T, HV, V] or by k-head [B, T, H, HV / H, V]; a, b [B, T, HV] or
    [B, T, H, HV / H] -> [B, T, HV * V]. joined [B, T, D] is q, k and v if they lie side by side.
    quantises: the result is in FP8 where a kernel makes that.
    """
    plain = is_gated_norm(norm, eager) and norm.weight.shape == z.shape[-1:]
    name = getattr(norm, "activation", "silu") if plain else None
    gate = SAME.get(name, name) if name in OF_GATED_NORM else None
    # the convolution's weight is read, not called: an offloaded one has to be brought first
    conv = layer.conv1d
    hook = conv.__dict__.get("_hf_hook")
    if hook is not None:
        hook.pre_forward(conv)
    decoding = seq.in_place and seq.held is None and gate and layer.activation in OF_CONVOLUTION
    if decoding:
        # one token, from the input projections to the output's; both states are updated in place
        tensors = (
            q, k, v, z, a, b, seq.conv_state, seq.state, conv.weight.squeeze(1), conv.bias,
            layer.A_log, layer.dt_bias, norm.weight,
        )  # fmt: skip
        options = layer.activation, norm.variance_epsilon, gate, allow_neg_eigval
        y = DECODE_QUANTISE(tensors, options) if quantises else None
        if y is None:
            y = DECODE(tensors, options).flatten(2)
    else:
        y = convolution(conv, layer.activation, q, k, v.flatten(3), joined, seq)  # [B, T, D]
    if hook is not None:
        hook.post_forward(conv, ())
    if decoding:
        return y
    q, k, v = _split(layer, y)
    options = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "allow_neg_eigval": allow_neg_eigval}
    o = recurred(RULES, (q, k, v, a.flatten(2), b.flatten(2)), options, seq)
    if not plain:
        o = norm(o.reshape(-1, o.shape[-1]), z.reshape(-1, o.shape[-1]))
        return o.view(z.shape).flatten(2)
    o = o.reshape(z.shape)
    if quantises and gate:
        codes = NORM_QUANTISE((o, z, norm.weight), (norm.variance_epsilon, gate))
        if codes is not None:
            return codes
    return normed_and_gated(norm, o, z).flatten(2)


def _split(layer, qkv):
    """Views of [B, T, D] as q, k [B, T, H, K] and v [B, T, HV, V]."""
    q, k, v = qkv.split_with_sizes([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    return _heads(q, layer.head_k_dim), _heads(k, layer.head_k_dim), _heads(v, layer.head_v_dim)


def _heads(x, size: int):
    """A view of [B, T, ...] by heads of this size."""
    return x.view(x.shape[0], x.shape[1], -1, size)


class Family(NamedTuple):
    """Functions and names that layers of one family have of their own."""

    # (layer, x, eager) -> q, k, v, z, a, b; q, k, v joined, if they lie side by side; whether beta
    # is up to 2
    project: Callable
    norm: str
    out: str


def computed(
    layer, family: Family, x, cache, mask, kwargs: dict, eager: bool = False
) -> torch.Tensor:
    """The output of a layer [B, T, hidden] for hidden states x, and a cache or None. eager: the
    caller knows that torch is in eager mode, and unpatched."""
    x = without_padding(x, mask)
    q, k, v, z, a, b, joined, allow_neg_eigval = family.project(layer, x, eager)
    seq = Sequences(layer, layer.layer_idx, k, cache, kwargs)
    norm, out = getattr(layer, family.norm), getattr(layer, family.out)
    weight = None
    if type(out) in fp8.FORMS:
        weight = fp8.weight_of_out(out, x, z.shape[2:].numel(), eager)
    more = (seq, joined, allow_neg_eigval, weight is not None, eager)
    o = _gated_delta_net(layer, norm, q, k, v, z, a, b, *more)
    if type(o) is Quantised:
        return products(x.shape[:2], (weight,), None, o)[0]
    return projections(o, out, eager=eager)[0]


def _qwen3_5(layer, x, eager: bool) -> tuple:
    parts = layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a
    qkv, z, b, a = projections(x, *parts, eager=eager)
    return (*_split(layer, qkv), _heads(z, layer.head_v_dim), a, b, qkv, False)


def _qwen3_next(layer, x, eager: bool) -> tuple:
    qkvz, ba = projections(x, layer.in_proj_qkvz, layer.in_proj_ba, eager=eager)
    ratio = layer.num_v_heads // layer.num_k_heads
    heads = (layer.num_k_heads, -1)
    K, V = layer.head_k_dim, ratio * layer.head_v_dim
    q, k, v, z = qkvz.unflatten(-1, heads).split([K, K, V, V], dim=-1)  # [B, T, H, ...]
    b, a = ba.unflatten(-1, heads).split(ratio, dim=-1)  # [B, T, H, HV / H]
    return q, k, v.unflatten(-1, (ratio, -1)), z.unflatten(-1, (ratio, -1)), a, b, None, False


def _olmo_hybrid(layer, x, eager: bool) -> tuple:
    mixed, gates = (layer.q_proj, layer.k_proj, layer.v_proj), (layer.b_proj, layer.a_proj)
    q, k, v, z, b, a = projections(x, *mixed, layer.g_proj, *gates, eager=eager)
    q, k = _heads(q, layer.head_k_dim), _heads(k, layer.head_k_dim)
    v, z = _heads(v, layer.head_v_dim), _heads(z, layer.head_v_dim)
    return q, k, v, z, a, b, None, layer.allow_neg_eigval


FAMILIES: Dict[str, Family] = {
    "Qwen3_5GatedDeltaNet": Family(_qwen3_5, "norm", "out_proj"),
    "Qwen3NextGatedDeltaNet": Family(_qwen3_next, "norm", "out_proj"),
    "OlmoHybridGatedDeltaNet": Family(_olmo_hybrid, "o_norm", "o_proj"),
}


# -- modules that kernelize serves


class GdnForm(NamedTuple):
    """A class of transformers' Gated DeltaNet layers that one of ours computes the same."""

    layer: str  # of FAMILIES
    kind: type
    pinned: Pinned
    arguments: Arguments
    cache: Optional[str]  # the names of its arguments
    mask: Optional[str]
    guards: Tuple[Tuple[str, object], ...]  # attributes on which its forward depends, not ours
    view: Tuple[Tuple[str, Optional[str], object], ...]  # (our attribute, its own, or else a value)


FORMS: Dict[type, GdnForm] = {}  # what was recognised so far, for forwards that `kernels` binds


@functools.lru_cache(maxsize=1024)
def forward_of(form: GdnForm) -> Callable:
    """The forward of a layer of ours for the modules of a class, with their names for what it is
    given and for what it reads: those are properties of the class that is served."""
    family, unchanged = FAMILIES[form.layer], call_check(form.pinned, form.guards)

    def serve(self, x, given, rest):
        if not isinstance(x, torch.Tensor) or x.ndim != 3:
            return None
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
        if unchanged(self, compiling) and (compiling or _is_plain(self)):
            cache, mask = given.get(form.cache), given.get(form.mask)
            eager = not compiling and torch_unpatched(False)
            return computed(self, family, x, cache, mask, rest, eager)
        return None

    forward = forward_by(form, serve, form.layer, compiled=True, exchanges=True)
    forward.view = {n: value if own is None else _named(own) for n, own, value in form.view}
    return forward


def _named(own: str) -> property:
    return property(lambda layer: getattr(layer, own))  # torch.compile traces no attrgetter


def _is_plain(layer) -> bool:
    """True if the weights that ours reads are not sharded in this call."""
    return type(layer.A_log) in PLAIN_TENSORS and type(layer.conv1d.weight) in PLAIN_TENSORS


# -- layers that `kernels` looks up


def _own_forward(layer, kwargs: dict) -> Optional[Callable]:
    """The forward of the layer's class, if that is served by kernelize; or if it or what it calls
    was patched since kernelize has looked at it, if it knows one of the keywords by another name,
    or if the layer's weights are sharded in this call. A patch is meant to count; where that is the
    forward of ours, there is no other."""
    kind = type(layer)
    own = next((base.__bases__[1] for base in kind.__mro__ if "served_as" in vars(base)), kind)
    if getattr(getattr(own, "forward", None), "__module__", None) == __name__:
        return None
    if own is not kind:
        return kind.forward
    known = next((FORMS[base] for base in kind.__mro__ if base in FORMS), None)
    same = known is None or known.arguments.own.isdisjoint(kwargs) and known.pinned.unchanged(layer)
    if same and _is_plain(layer):
        return None
    refuse_context(kind, kwargs)
    return kind.forward


def _forward_of_layer(name: str) -> Callable:
    """The forward that `kernels` binds to the layers of one family."""

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        cache = kwargs.pop("cache", cache_params)  # transformers' releases have either name
        own = None if torch.compiler.is_compiling() else _own_forward(self, kwargs)
        if own is None:
            return computed(self, FAMILIES[name], hidden_states, cache, attention_mask, kwargs)
        # own may know the cache by more names than one
        given = (hidden_states,) if cache is None else (hidden_states, cache)
        return own(self, *given, attention_mask=attention_mask, **kwargs)

    return forward


class Qwen3_5GatedDeltaNet(Layer):
    """The GDN layer of Qwen3.5 (dense and MoE) and Qwen4-exp.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    forward = _forward_of_layer("Qwen3_5GatedDeltaNet")


class Qwen3NextGatedDeltaNet(Layer):
    """The GDN layer of Qwen3-Next, whose two projections hold q, k, v, z and b, a by k-head.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    forward = _forward_of_layer("Qwen3NextGatedDeltaNet")


class OlmoHybridGatedDeltaNet(Layer):
    """The GDN layer of OLMo-Hybrid: seven separate projections, beta up to 2 if so configured.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    forward = _forward_of_layer("OlmoHybridGatedDeltaNet")
