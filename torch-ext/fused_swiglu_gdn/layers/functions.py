"""Drop-ins for the functions that transformers loads from other kernel repositories.

The names are transformers' own (integrations/hub_kernels.py), and so are the signatures: a layer of
the mapping must have the parameters of the one it replaces. Callers pass on all keyword arguments
of the model's call; those of packed sequences are used, the rest is ignored.
"""

from typing import Callable

import torch

from ..gdn import api as gdn
from ..gdn_layer import api as gdn_layer
from ..kda import api as kda
from ..runtime.activations import OF_CONVOLUTION
from .delta import named_activation, packed_lengths
from .forward import Layer


def convolved(activation, convolution):
    """convolution(activation) if the kernel has the activation, else the two one after the
    other."""
    if activation in OF_CONVOLUTION:
        return convolution(activation)
    return named_activation(activation)(convolution(None))


def _called(rule, tensors, initial_state, output_final_state, normed, kwargs):
    return rule(
        *tensors, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=packed_lengths(kwargs), use_qk_l2norm_in_kernel=normed,
    )  # fmt: skip


def _in_chunks(rule: Callable) -> Callable:
    """The forward of a layer for a rule in chunks."""

    def forward(
        self,
        query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        states = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return _called(rule, (query, key, value, g, beta), *states, kwargs)

    return forward


def _by_token(rule: Callable) -> Callable:
    """The forward of a layer for a rule token by token."""

    def forward(
        self,
        query, key, value, g, beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        states = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return _called(rule, (query, key, value, g, beta), *states, kwargs)

    return forward


class chunk_gated_delta_rule(Layer):
    """The gated delta rule in chunks of 64 tokens (see the function of this name).

    q and k may have fewer heads than v (transformers 5.23) or be repeated already (5.22). The
    result does not depend on chunk_size.

    Shapes:
        query, key: [B, T, H, K]; value: [B, T, HV, V]; g, beta: [B, T, HV]
        -> [B, T, HV, V] and the state [N, HV, K, V] in fp32, or None
    """

    forward = _in_chunks(gdn.chunk_gated_delta_rule)


class recurrent_gated_delta_rule(Layer):
    """The gated delta rule token by token: fused_recurrent_gated_delta_rule.

    Shapes: as chunk_gated_delta_rule.
    """

    forward = _by_token(gdn.fused_recurrent_gated_delta_rule)


class chunk_kimi_delta_attention(Layer):
    """Kimi Delta Attention in chunks of 64 tokens: chunk_kda. The result does not depend on
    chunk_size.

    Shapes:
        query, key: [B, T, H, K]; value: [B, T, HV, V]; g: [B, T, HV, K]; beta: [B, T, HV]
        -> [B, T, HV, V] and the state [N, HV, K, V] in fp32, or None
    """

    forward = _in_chunks(kda.chunk_kda)


class recurrent_kimi_delta_attention(Layer):
    """Kimi Delta Attention token by token: fused_recurrent_kda.

    Shapes: as chunk_kimi_delta_attention.
    """

    forward = _by_token(kda.fused_recurrent_kda)


class causal_conv1d_fn(Layer):
    """The short depthwise convolution over a prompt.

    Shapes:
        hidden_states: [B, D, T]; weight: [D, W]; bias: [D] or None -> [B, D, T]
    """

    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        seq_idx = kwargs.get("seq_idx")
        lengths = packed_lengths(kwargs) if seq_idx is None else None
        if seq_idx is not None:
            # a cache puts the tokens before these in front; they belong to the first sequence
            before = hidden_states.shape[-1] - seq_idx.shape[-1]
            if before > 0:
                seq_idx = torch.cat([seq_idx[:, :1].expand(-1, before), seq_idx], dim=-1)
        return convolved(
            activation,
            lambda known: gdn_layer.causal_conv1d_fn(
                hidden_states, weight, bias, known, seq_idx=seq_idx, cu_seqlens=lengths
            ),
        )


class causal_conv1d_update(Layer):
    """The short convolution of the next token; conv_state is updated in place.

    Shapes:
        hidden_states: [B, D, T] or [B, D]; conv_state: [B, D, S], S >= W - 1 -> as hidden_states
    """

    def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
        return convolved(
            activation,
            lambda known: gdn_layer.causal_conv1d_update(
                hidden_states, conv_state, weight, bias, known
            ),
        )
