"""Whole Gated DeltaNet layers: Qwen3.5, Qwen3-Next, OLMo-Hybrid.

They differ in their projections and share the rest, `_gated_delta_net`. All read their cache in the
one way that transformers' releases have in common, and take it by either of its names there.

Sizes: B batch, T tokens, H heads of q and k, HV heads of v, K and V head dims,
D = 2 H K + HV V channels of the convolution, W its taps.
"""

from typing import Callable

import torch
from torch import nn

from ..fp8.call import Quantised
from ..gdn import api as gdn
from ..gdn_layer import api as gdn_layer
from ..gdn_layer.ops_fp8 import DECODE_QUANTISE, NORM_QUANTISE
from ..gdn_layer.ops_fused import DECODE, PROLOGUE
from ..runtime.activations import OF_CONVOLUTION, OF_GATED_NORM, SAME
from .fp8 import out as fp8_out
from .fp8.linear import multiplied
from .fp8.weights import FORMS as FP8_FORMS
from .functions import is_gated_norm, lengths_of, named_activation, normed_and_gated, packed_lengths
from .gdn_form import patch_of
from .projections import projections
from .replay import held_states


class _Sequences:
    """The position of the layer's tokens: the cached states they go on from, and packed lengths."""

    def __init__(self, layer, k, cache, kwargs):
        tokens = k.shape[1]
        self.cache, self.cp = cache, kwargs.get("cp_context")
        if cache is not None and self.cp is not None:
            raise ValueError("use_cache must be False with cp_context: decoding has no such")
        self.conv_state = self.state = self.held = cached = None
        self.recording = before = False
        if cache is not None:
            cached = cache.layers[layer.layer_idx]
            self.recording = getattr(cached, "record_past", False)
            before = cached.has_previous_state[0]
        self.lengths = packed_lengths(kwargs)
        if self.cp is not None:
            self.lengths = None  # the context has them
        elif self.lengths is None and kwargs.get("seq_idx") is not None:
            self.lengths = lengths_of(kwargs["seq_idx"])
        # a cache layer that takes tokens back (decoding/drafts.py) keeps the state after each
        takes_back = getattr(cached, "takes_back", None)
        self.back = cached if before and takes_back is not None and takes_back(tokens) else None
        self.rows = None if self.back is None else self.back.rows
        self.one_step = tokens == 1 and before
        alone = not self.recording and self.lengths is None and self.back is None
        self.in_place = self.one_step and alone and not torch.is_grad_enabled()
        if before:
            self.conv_state = cached.conv_states[0]  # [B, D, W]
            self.held = held_states(layer, cached, k) if self.in_place else None
            if self.held is None:
                state = cached.recurrent_states[0]  # [B, HV, K, V]
                self.state = state if self.in_place else state.contiguous()
        if self.state is not None and torch.is_grad_enabled():
            # autograd keeps what it reads, and the cache is about to be overwritten
            self.conv_state, self.state = self.conv_state.clone(), self.state.clone()


def _joined(q, k, v, joined=None):
    """[B, T, D]: `joined` if they lie side by side already."""
    return torch.cat([x.flatten(2) for x in (q, k, v)], -1) if joined is None else joined


def _convolution(layer, q, k, v, joined, seq: _Sequences):
    """act(conv([q k v])), [B, T, D], after the inputs in the cache, which these then join."""
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias  # [D, W], [D]
    before = None if seq.conv_state is None else seq.conv_state[..., 1 - weight.shape[-1] :]
    known = layer.activation in OF_CONVOLUTION
    activation, width, latest = layer.activation if known else None, layer.conv_kernel_size, None
    if seq.in_place or seq.rows is not None:
        x, state, accepted = _joined(q, k, v, joined).transpose(1, 2), seq.conv_state, None
        if seq.rows is not None:
            state, accepted = seq.rows.columns, seq.rows.accepted
        y = gdn_layer.causal_conv1d_update(
            x, state, weight, bias, activation, num_accepted_tokens=accepted
        )
        y = y.transpose(1, 2)
        return y if known else named_activation(layer.activation)(y)
    if torch.is_grad_enabled() or seq.cp is not None:  # PROLOGUE has no gradient
        x = _joined(q, k, v, joined).transpose(1, 2)  # [B, D, T]
        y = gdn_layer.causal_conv1d_fn(
            x, weight, bias, activation, cu_seqlens=seq.lengths, initial_states=before,
            cp_context=seq.cp,
        ).transpose(1, 2)  # fmt: skip
    else:
        # the same launch makes the inputs that the cache keeps, but for the rare cases
        keeps = seq.cache is not None and not seq.recording and seq.lengths is None
        tensors = (q, k, v, weight, bias, seq.lengths, before)
        y, final = PROLOGUE(tensors, (activation, width if keeps else 0))
        latest = final if keeps else None
    if not known:
        y = named_activation(layer.activation)(y)
    if seq.cache is not None:
        if latest is None:
            last = slice(None) if seq.recording else slice(-width, None)
            latest = _joined(q[:, last], k[:, last], v[:, last]).transpose(1, 2)
        seq.cache.update_conv_state(latest, layer.layer_idx, conv_kernel_size=width)
    return y


def _rule(layer, q, k, v, a, b, allow_neg_eigval, seq: _Sequences):
    """The gated delta rule from raw gates; o [B, T, HV, V]. The cache gets the state after it."""
    options = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": layer.A_log,
        "dt_bias": layer.dt_bias, "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": allow_neg_eigval,
    }  # fmt: skip
    if seq.held is not None:
        return seq.held.step(q, k, v, a, b, **options)
    if seq.back is not None and seq.lengths is None:
        rule = gdn.fused_recurrent_gated_delta_rule
        return seq.back.recur(rule, (q, k, v, a, b), seq.state, options)
    options.update(initial_state=seq.state, output_final_state=seq.cache is not None)
    options["cu_seqlens"] = seq.lengths
    if not seq.one_step:
        o, state = gdn.chunk_gated_delta_rule(q, k, v, a, b, cp_context=seq.cp, **options)
    else:
        o, state = gdn.fused_recurrent_gated_delta_rule(
            q, k, v, a, b, inplace_final_state=seq.in_place, **options
        )
    if seq.cache is not None and not seq.in_place:
        seq.cache.update_recurrent_state(state, layer.layer_idx)
    return o


def _gated_delta_net(
    layer, norm, q, k, v, z, a, b, seq: _Sequences, joined, allow_neg_eigval: bool,
    quantises: bool = False,
):  # fmt: skip
    """From the input projections to the input of the output projection.

    q, k [B, T, H, K]; v, z [B, T, HV, V] or by k-head [B, T, H, HV / H, V]; a, b [B, T, HV] or
    [B, T, H, HV / H] -> [B, T, HV * V]. joined [B, T, D] is q, k and v if they lie side by side.
    quantises: the result is in FP8 where a kernel makes that.
    """
    plain = is_gated_norm(norm) and norm.weight.shape == z.shape[-1:]
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
        y = _convolution(layer, q, k, v.flatten(3), joined, seq)  # [B, T, D]
    if hook is not None:
        hook.post_forward(conv, ())
    if decoding:
        return y
    q, k, v = _split(layer, y)
    o = _rule(layer, q, k, v, a.flatten(2), b.flatten(2), allow_neg_eigval, seq)
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


def _layer(layer, ours: type, project: Callable, norm: str, out: str, given, mask, kwargs):
    """The output of a layer [B, T, hidden]; given: the hidden states, and the cache or None.
    project: (layer, x) -> q, k, v, z, a, b; q, k, v joined, if they lie side by side; whether beta
    is up to 2."""
    x, cache = given
    cache = kwargs.pop("cache", cache)  # of either name
    patch = patch_of(layer, ours, kwargs)
    if patch is not None:
        if hasattr(type(layer), "served_as"):
            return None  # its forward hands the call on as it was given
        # which may know the cache by more names than one
        given = (x,) if cache is None else (x, cache)
        return patch(layer, *given, attention_mask=mask, **kwargs)
    if mask is not None:  # [B, T], 0 for padding, which must not reach the states
        x = (x * mask[:, :, None]).to(x.dtype)
    q, k, v, z, a, b, joined, allow_neg_eigval = project(layer, x)
    seq = _Sequences(layer, k, cache, kwargs)
    norm, out = getattr(layer, norm), getattr(layer, out)
    weight = None
    if type(out) in FP8_FORMS:
        weight = fp8_out.weight_of_out(out, x, z.shape[2:].numel())
    more = (seq, joined, allow_neg_eigval, weight is not None)
    o = _gated_delta_net(layer, norm, q, k, v, z, a, b, *more)
    if type(o) is Quantised:
        return multiplied(x.shape[:2], (weight,), None, o)[0]
    return projections(o, out)[0]


def _qwen3_5(layer, x) -> tuple:
    qkv, z, b, a = projections(
        x, layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a
    )
    return (*_split(layer, qkv), _heads(z, layer.head_v_dim), a, b, qkv, False)


def _qwen3_next(layer, x) -> tuple:
    qkvz, ba = projections(x, layer.in_proj_qkvz, layer.in_proj_ba)
    ratio = layer.num_v_heads // layer.num_k_heads
    heads = (layer.num_k_heads, -1)
    K, V = layer.head_k_dim, ratio * layer.head_v_dim
    q, k, v, z = qkvz.unflatten(-1, heads).split([K, K, V, V], dim=-1)  # [B, T, H, ...]
    b, a = ba.unflatten(-1, heads).split(ratio, dim=-1)  # [B, T, H, HV / H]
    return q, k, v.unflatten(-1, (ratio, -1)), z.unflatten(-1, (ratio, -1)), a, b, None, False


def _olmo_hybrid(layer, x) -> tuple:
    q, k, v, z, b, a = projections(
        x, layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.b_proj, layer.a_proj
    )
    q, k = _heads(q, layer.head_k_dim), _heads(k, layer.head_k_dim)
    v, z = _heads(v, layer.head_v_dim), _heads(z, layer.head_v_dim)
    return q, k, v, z, a, b, None, layer.allow_neg_eigval


class Qwen3_5GatedDeltaNet(nn.Module):
    """The GDN layer of Qwen3.5 (dense and MoE) and Qwen4-exp.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        given = hidden_states, cache_params
        names = _qwen3_5, "norm", "out_proj"
        return _layer(self, Qwen3_5GatedDeltaNet, *names, given, attention_mask, kwargs)


class Qwen3NextGatedDeltaNet(nn.Module):
    """The GDN layer of Qwen3-Next, whose two projections hold q, k, v, z and b, a by k-head.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        given = hidden_states, cache_params
        names = _qwen3_next, "norm", "out_proj"
        return _layer(self, Qwen3NextGatedDeltaNet, *names, given, attention_mask, kwargs)


class OlmoHybridGatedDeltaNet(nn.Module):
    """The GDN layer of OLMo-Hybrid: seven separate projections, beta up to 2 if so configured.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        given = hidden_states, cache_params
        names = _olmo_hybrid, "o_norm", "o_proj"
        return _layer(self, OlmoHybridGatedDeltaNet, *names, given, attention_mask, kwargs)
