"""Whole Gated DeltaNet layers: Qwen3.5, Qwen3-Next, OLMo-Hybrid.

They differ in their projections and share the rest, `_gated_delta_net`. All read their cache in the
one way that transformers 5.17 to 5.23 have in common.

Sizes: B batch, T tokens, H heads of q and k, HV heads of v, K and V head dims,
D = 2 H K + HV V channels of the convolution, W its taps.
"""

from contextlib import contextmanager

import torch
from torch import nn

from ..functional import gdn, gdn_layer
from .functions import convolved, normed_and_gated, packed_lengths
from .plain import why_hooked


class _Sequences:
    """Where the layer's tokens stand: the cached states they go on from, and packed lengths."""

    def __init__(self, layer, tokens, cache, kwargs):
        self.cache = cache
        self.conv_state = self.state = None
        self.recording = False
        if cache is not None:
            cached = cache.layers[layer.layer_idx]
            self.recording = getattr(cached, "record_past", False)
            if cached.has_previous_state[0]:
                self.conv_state = cached.conv_states[0]  # [B, D, W]
                self.state = cached.recurrent_states[0]  # [B, HV, K, V]
        self.lengths = packed_lengths(kwargs)
        if self.lengths is None and kwargs.get("seq_idx") is not None:
            self.lengths = _lengths_of(kwargs["seq_idx"])
        self.one_step = tokens == 1 and self.state is not None
        self.in_place = self.one_step and not self.recording and not torch.is_grad_enabled()
        if self.state is not None and torch.is_grad_enabled():
            # autograd keeps what it reads, and the cache is about to be overwritten
            self.conv_state, self.state = self.conv_state.clone(), self.state.clone()


def _lengths_of(seq_idx):
    """Cumulative lengths from the index of each token's sequence, [1, T]. Stops the host once."""
    if seq_idx.shape[0] != 1:
        raise ValueError(
            "seq_idx must have shape [1, T] unless cu_seq_lens_q is given, "
            f"got {list(seq_idx.shape)}"
        )
    starts = torch.nonzero(seq_idx[0, 1:] != seq_idx[0, :-1])[:, 0] + 1
    ends = starts.new_tensor([0, seq_idx.shape[1]])
    return torch.cat([ends[:1], starts, ends[1:]])


@contextmanager
def _weights_of(conv1d):
    """The convolution's weight is read, not called: an offloaded one has to be brought first."""
    hook = getattr(conv1d, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(conv1d)
    yield
    if hook is not None:
        hook.post_forward(conv1d, ())


def _convolution(layer, x, seq: _Sequences):
    """act(conv(x)) of x [B, D, T], after the inputs in the cache, which x then joins."""
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias  # [D, W], [D]
    if seq.in_place:
        return convolved(
            layer.activation,
            lambda known: gdn_layer.causal_conv1d_update(x, seq.conv_state, weight, bias, known),
        )
    before = None if seq.conv_state is None else seq.conv_state[..., 1 - weight.shape[-1] :]
    y = convolved(
        layer.activation,
        lambda known: gdn_layer.causal_conv1d_fn(
            x, weight, bias, known, cu_seqlens=seq.lengths, initial_states=before
        ),
    )
    if seq.cache is not None:
        latest = x if seq.recording else x[..., -layer.conv_kernel_size :]
        seq.cache.update_conv_state(
            latest, layer.layer_idx, conv_kernel_size=layer.conv_kernel_size
        )
    return y


def _rule(layer, q, k, v, a, b, allow_neg_eigval, seq: _Sequences):
    """The gated delta rule from raw gates; o [B, T, HV, V]. The cache gets the state after it."""
    options = {
        "initial_state": seq.state,
        "output_final_state": seq.cache is not None,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": allow_neg_eigval,
        "cu_seqlens": seq.lengths,
    }
    if not seq.one_step:
        o, state = gdn.chunk_gated_delta_rule(q, k, v, a, b, **options)
    else:
        o, state = gdn.fused_recurrent_gated_delta_rule(
            q, k, v, a, b, inplace_final_state=seq.in_place, **options
        )
    if seq.cache is not None and not seq.in_place:
        seq.cache.update_recurrent_state(state, layer.layer_idx)
    return o


def _gated_delta_net(layer, norm, qkv, z, a, b, seq: _Sequences, allow_neg_eigval=False):
    """From the input projections to the input of the output projection.

    qkv [B, T, D]; z [B, T, HV, V] or [B, T, HV * V]; a, b [B, T, HV] -> [B, T, HV * V]
    """
    B, T = qkv.shape[:2]
    with _weights_of(layer.conv1d):
        qkv = _convolution(layer, qkv.transpose(1, 2), seq).transpose(1, 2)  # [B, T, D]
    q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))  # [B, T, H, K]
    v = v.unflatten(-1, (-1, layer.head_v_dim))  # [B, T, HV, V]
    o = _rule(layer, q, k, v, a, b, allow_neg_eigval, seq)
    z = z.reshape(v.shape)
    if why_hooked(norm) is None:
        o = normed_and_gated(norm, o, z)
    else:
        o = norm(o.reshape(-1, v.shape[-1]), z.reshape(-1, v.shape[-1]))
    return o.reshape(B, T, -1)


def _without_padding(hidden_states, attention_mask):
    """Padding must not reach the states; attention_mask [B, T] is 0 where it stands."""
    if attention_mask is None:
        return hidden_states
    return (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)


class Qwen3_5GatedDeltaNet(nn.Module):
    """The GDN layer of Qwen3.5 (dense and MoE) and Qwen4-exp.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        x = _without_padding(hidden_states, attention_mask)
        seq = _Sequences(self, x.shape[1], cache_params, kwargs)
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        a, b = self.in_proj_a(x), self.in_proj_b(x)
        return self.out_proj(_gated_delta_net(self, self.norm, qkv, z, a, b, seq))


class Qwen3NextGatedDeltaNet(nn.Module):
    """The GDN layer of Qwen3-Next, whose two projections hold q, k, v, z and b, a by k-head.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        x = _without_padding(hidden_states, attention_mask)
        seq = _Sequences(self, x.shape[1], cache_params, kwargs)
        heads = (self.num_k_heads, -1)
        ratio = self.num_v_heads // self.num_k_heads
        K, V = self.head_k_dim, ratio * self.head_v_dim
        q, k, v, z = self.in_proj_qkvz(x).unflatten(-1, heads).split([K, K, V, V], dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, heads).split(ratio, dim=-1)  # [B, T, H, HV / H]
        qkv = torch.cat([y.flatten(-2) for y in (q, k, v)], dim=-1)
        o = _gated_delta_net(self, self.norm, qkv, z, a.flatten(-2), b.flatten(-2), seq)
        return self.out_proj(o)


class OlmoHybridGatedDeltaNet(nn.Module):
    """The GDN layer of OLMo-Hybrid: seven separate projections, beta up to 2 if so configured.

    Shapes:
        hidden_states: [B, T, hidden] -> [B, T, hidden]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        x = _without_padding(hidden_states, attention_mask)
        seq = _Sequences(self, x.shape[1], cache_params, kwargs)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        z, a, b = self.g_proj(x), self.a_proj(x), self.b_proj(x)
        o = _gated_delta_net(self, self.o_norm, qkv, z, a, b, seq, self.allow_neg_eigval)
        return self.o_proj(o)
