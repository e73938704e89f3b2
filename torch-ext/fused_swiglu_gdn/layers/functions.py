"""Drop-ins for the functions and the norm that transformers loads from other kernel repositories.

The names are transformers' own (integrations/hub_kernels.py), and so are the signatures: a layer of
the mapping must have the parameters of the one it replaces. Callers pass on all keyword arguments
of the model's call; those of packed sequences are used, the rest is ignored.
"""

from types import MethodType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from ..gdn import api as gdn
from ..gdn_layer import api as gdn_layer
from ..kda import api as kda
from ..runtime.activations import OF_CONVOLUTION, OF_GATED_NORM
from ..runtime.checks import FLOATING
from .own_classes import Answers
from .own_code import peeled
from .plain import PLAIN_TENSORS, torch_unpatched, why_hooked


def packed_lengths(kwargs):
    """The cumulative lengths [N + 1] of a packed batch, under any name that callers use."""
    lengths = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if lengths is None else lengths


def lengths_of(seq_idx):
    """Cumulative lengths from the index of each token's sequence, [1, T]. Stops the host once."""
    if seq_idx.shape[0] != 1:
        raise ValueError(
            "seq_idx must have shape [1, T] unless cu_seq_lens_q is given, "
            f"got {list(seq_idx.shape)}"
        )
    starts = torch.nonzero(seq_idx[0, 1:] != seq_idx[0, :-1])[:, 0] + 1
    ends = starts.new_tensor([0, seq_idx.shape[1]])
    return torch.cat([ends[:1], starts, ends[1:]])


def convolved(activation, convolution):
    """convolution(activation) if the kernel has the activation, else the two one after the
    other."""
    if activation in OF_CONVOLUTION:
        return convolution(activation)
    return named_activation(activation)(convolution(None))


def normed_and_gated(norm, x, gate):
    """The output of a model's RMSNormGated `norm` for x and gate [..., D]."""
    weight, eps = norm.weight, norm.variance_epsilon
    activation = getattr(norm, "activation", "silu")
    if activation in OF_GATED_NORM:
        return gdn_layer.rms_norm_gated(x, gate, weight, eps=eps, activation=activation)
    y = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (y * named_activation(activation)(gate.float())).to(x.dtype)


def named_activation(name):
    """The function of any other activation that a transformers config can name."""
    from transformers.activations import ACT2FN

    return ACT2FN[name]


class chunk_gated_delta_rule(nn.Module):
    """The gated delta rule in chunks of 64 tokens (see the function of this name).

    q and k may have fewer heads than v (transformers 5.23) or be repeated already (5.22). The
    result does not depend on chunk_size.

    Shapes:
        query, key: [B, T, H, K]; value: [B, T, HV, V]; g, beta: [B, T, HV]
        -> [B, T, HV, V] and the state [N, HV, K, V] in fp32, or None
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        return gdn.chunk_gated_delta_rule(
            query, key, value, g, beta, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=packed_lengths(kwargs),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip


class recurrent_gated_delta_rule(nn.Module):
    """The gated delta rule token by token: fused_recurrent_gated_delta_rule.

    Shapes: as chunk_gated_delta_rule.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query, key, value, g, beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        return gdn.fused_recurrent_gated_delta_rule(
            query, key, value, g, beta, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=packed_lengths(kwargs),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip


class chunk_kimi_delta_attention(nn.Module):
    """Kimi Delta Attention in chunks of 64 tokens: chunk_kda. The result does not depend on
    chunk_size.

    Shapes:
        query, key: [B, T, H, K]; value: [B, T, HV, V]; g: [B, T, HV, K]; beta: [B, T, HV]
        -> [B, T, HV, V] and the state [N, HV, K, V] in fp32, or None
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        return kda.chunk_kda(
            query, key, value, g, beta, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=packed_lengths(kwargs),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip


class recurrent_kimi_delta_attention(nn.Module):
    """Kimi Delta Attention token by token: fused_recurrent_kda.

    Shapes: as chunk_kimi_delta_attention.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query, key, value, g, beta, initial_state, output_final_state,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        return kda.fused_recurrent_kda(
            query, key, value, g, beta, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=packed_lengths(kwargs),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip


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


class FusedRMSNormGated(nn.Module):
    """weight * hidden_states / rms(hidden_states) * act(gate): the norm comes before the gate.

    Shapes:
        hidden_states, gate: [..., D] -> [..., D]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, gate):
        return normed_and_gated(self, hidden_states, gate)


def is_gated_norm(norm: nn.Module) -> bool:
    """True if calling the norm computes weight * x / rms(x) * act(gate) and nothing else.

    It is of a class of transformers with its own forward, whose values were compared with the
    formula; there are no hooks, and no forward on the instance but its class's or ours.
    """
    kind = type(norm)
    if not issubclass(kind, nn.Module) or not NORMS.of(kind):
        return False
    bound = norm.__dict__.get("forward")
    if bound is not None:
        function = bound.__func__ if isinstance(bound, MethodType) else None
        if function is not kind.forward and function is not FusedRMSNormGated.forward:
            return False
    if not torch_unpatched() or why_hooked(norm) is not None:
        return False
    weight, eps = norm._parameters.get("weight"), norm.__dict__.get("variance_epsilon")
    if type(weight) not in PLAIN_TENSORS or weight.ndim != 1 or weight.dtype not in FLOATING:
        return False
    return type(eps) is float and eps >= 0.0


def _is_the_formula(kind: type, _) -> bool:
    """True if the forward of a class agrees with the formula on small inputs; transformers computes
    in fp32."""
    if kind.__call__ is not nn.Module.__call__:
        return False
    forward = peeled(kind.forward).forward
    values = torch.linspace(-3, 5, 15, device="cpu", dtype=torch.float32)
    x, gate, weight = values.view(3, 5).tensor_split(3)
    for eps in (1e-6, 0.5):
        norm = SimpleNamespace(weight=weight[0], variance_epsilon=eps, activation="silu")
        expected = F.rms_norm(x, (5,), weight[0], eps) * F.silu(gate)
        got = forward(norm, x, gate)
        if got.shape != x.shape or not torch.allclose(got, expected, rtol=1e-5, atol=1e-6):
            return False
    return True


NORMS = Answers(_is_the_formula)
