"""Drop-ins for the functions that transformers loads from other kernel repositories.

The names are transformers' own (integrations/hub_kernels.py), and so are the signatures: a layer of
the mapping must have the parameters of the one it replaces. Callers pass on all keyword arguments
of the model's call; those of packed sequences are used, the rest is ignored.
"""

import torch
from torch import nn

from ..gdn import api as gdn
from ..gdn_layer import api as gdn_layer
from ..kda import api as kda
from ..runtime.activations import OF_CONVOLUTION
from .delta import named_activation, packed_lengths
from .forward import hub_layer


def _chunked(name: str, rule, doc: str) -> type:
    """The layer of a rule in chunks."""

    def forward(
        self,
        query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        return rule(
            query, key, value, g, beta, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=packed_lengths(kwargs),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip

    return hub_layer(name, doc, forward)


def _recurrent(name: str, rule, doc: str) -> type:
    """The layer of a rule token by token, which has no chunk_size."""
    chunked = _chunked(name, rule, doc).forward

    def forward(
        self,
        query, key, value, g, beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        tensors = query, key, value, g, beta
        last = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return chunked(self, *tensors, 64, *last, **kwargs)

    return hub_layer(name, doc, forward)


_SHAPES = """

    q and k may have fewer heads than v or be repeated already.

    Shapes:
        query, key: [B, T, H, K]; value: [B, T, HV, V]; g: [B, T, HV{}]; beta: [B, T, HV]
        -> [B, T, HV, V] and the state [N, HV, K, V] in fp32, or None
    """
_GDN, _KDA = _SHAPES.format(""), _SHAPES.format(", K")
chunk_gated_delta_rule = _chunked(
    "chunk_gated_delta_rule", gdn.chunk_gated_delta_rule,
    "The gated delta rule in chunks of 64 tokens, whatever chunk_size is." + _GDN,
)  # fmt: skip
recurrent_gated_delta_rule = _recurrent(
    "recurrent_gated_delta_rule", gdn.fused_recurrent_gated_delta_rule,
    "The gated delta rule token by token: fused_recurrent_gated_delta_rule." + _GDN,
)  # fmt: skip
chunk_kimi_delta_attention = _chunked(
    "chunk_kimi_delta_attention", kda.chunk_kda,
    "Kimi Delta Attention in chunks of 64 tokens, whatever chunk_size is: chunk_kda." + _KDA,
)  # fmt: skip
recurrent_kimi_delta_attention = _recurrent(
    "recurrent_kimi_delta_attention", kda.fused_recurrent_kda,
    "Kimi Delta Attention token by token: fused_recurrent_kda." + _KDA,
)  # fmt: skip


def convolved(activation, convolution):
    """convolution(activation) if the kernel has the activation, else the two one after the
    other."""
    if activation in OF_CONVOLUTION:
        return convolution(activation)
    return named_activation(activation)(convolution(None))


class causal_conv1d_fn(nn.Module):
    """The short depthwise convolution over a prompt.

    Shapes:
        hidden_states: [B, D, T]; weight: [D, W]; bias: [D] or None -> [B, D, T]
    """

    has_backward = True
    can_torch_compile = True

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


class causal_conv1d_update(nn.Module):
    """The short convolution of the next token; conv_state is updated in place.

    Shapes:
        hidden_states: [B, D, T] or [B, D]; conv_state: [B, D, S], S >= W - 1 -> as hidden_states
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
        return convolved(
            activation,
            lambda known: gdn_layer.causal_conv1d_update(
                hidden_states, conv_state, weight, bias, known
            ),
        )
