"""Whole Kimi Delta Attention layers: Kimi Linear, GLM-5-Next, Bailing-Hybrid (Ling-3.0).

    q, k, v = silu(conv([x Wq, x Wk, x Wv]))        y = (rms_norm(o) * sigmoid(z)) Wo
    o = chunk_kda or fused_recurrent_kda, from raw gates: those of the submodule forget_gate

Sizes: B batch, T tokens, H heads, K their dim, D = 3 H K channels of the convolution.
"""

import dataclasses
import functools
from typing import Callable, Optional, Tuple

import torch
from torch import nn

from ..gdn_layer import api as gdn_layer
from ..kda import api as kda
from ..kda.call import has_gradient
from .forward import Arguments, forward_by
from .functions import convolved, is_gated_norm, normed_and_gated, packed_lengths
from .own_code import Pinned
from .plain import PLAIN_TENSORS, is_plain
from .projections import joined, projections


@dataclasses.dataclass(frozen=True, eq=False)
class KdaForm:
    """A class of layers that this file computes the same, with its forget gate's class."""

    kind: type
    gate: type
    arguments: Arguments
    cache: str  # the name of an argument
    checks: Tuple[Callable, ...]
    pinned: Tuple[Pinned, ...]  # of both classes: what a patch could replace
    bounded: Tuple[Optional[str], Optional[str]]  # attributes of the gate: its bound, and whether

    def unchanged(self) -> bool:
        return all([pin.unchanged() for pin in self.pinned])


@functools.lru_cache(maxsize=1024)
def forward_of(form: KdaForm) -> Callable:
    """Our forward for the layers of a class, and its own wherever that may do anything else."""

    def serve(layer, x, given, rest):
        cache = given.get(form.cache)
        lengths = packed_lengths(rest)
        if rest.get("cp_context") is not None:
            raise ValueError("cp_context must be None: states of these layers are not exchanged")
        if rest.get("seq_idx") is not None or cache is not None and lengths is not None:
            return None
        if x.is_cuda and torch.is_grad_enabled() and not _learns(layer, x):
            return None
        if not _is_as_known(layer, form) or cache is not None and _records(cache, layer):
            return None
        bound = bound_of(layer.forget_gate, form)
        if bound is not None and not bound < 0.0:
            return None
        return kimi_delta_attention(layer, x, cache, given.get("attention_mask"), lengths, bound)

    return forward_by(form, serve, "KimiDeltaAttention")


def _is_as_known(layer: nn.Module, form: KdaForm) -> bool:
    """True if the classes are not patched, and a call would read what we read without calling."""
    gate, conv = layer.forget_gate, layer.conv1d
    if type(gate) is not form.gate or not is_plain(gate) or not is_plain(conv):
        return False
    read = (gate.A_log, gate.dt_bias, conv.weight)
    if any([type(x) not in PLAIN_TENSORS for x in read]):
        return False
    return form.unchanged()


def _learns(layer: nn.Module, x: torch.Tensor) -> bool:
    """True if the gradient is made by kernels: in torch code it may be slower than the class's."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return has_gradient(layer.head_dim, layer.head_dim, dtype, x.device)


def _records(cache, layer: nn.Module) -> bool:
    """The cache keeps what it would need to take tokens back."""
    return getattr(cache.layers[layer.layer_idx], "record_past", False)


def bound_of(gate: nn.Module, form: KdaForm) -> Optional[float]:
    """The bound of a forget gate's decays, which it may have or not."""
    name, switch = form.bounded
    if name is None or switch is not None and not getattr(gate, switch):
        return None
    return getattr(gate, name)


def kimi_delta_attention(layer, hidden_states, cache, mask, lengths, bound) -> torch.Tensor:
    """hidden_states [B, T, hidden] -> [B, T, hidden], with both states in the cache updated."""
    if mask is not None:  # padding must not reach the states
        hidden_states = (hidden_states * mask[:, :, None]).to(hidden_states.dtype)
    x, gate, heads = hidden_states, layer.forget_gate, (-1, layer.head_dim)
    qkv = joined(x, layer.q_proj, layer.k_proj, layer.v_proj)
    conv_state = state = None
    if cache is not None and cache.layers[layer.layer_idx].has_previous_state[0]:
        cached = cache.layers[layer.layer_idx]
        conv_state, state = cached.conv_states[0], cached.recurrent_states[0]
    if state is not None and torch.is_grad_enabled():
        state = state.clone()  # autograd keeps what it reads, and the cache is overwritten
    step = x.shape[1] == 1 and state is not None and not torch.is_grad_enabled()
    y = _convolution(layer, qkv, cache, conv_state if step else None, lengths)
    q, k, v = (part.unflatten(-1, heads) for part in y.chunk(3, -1))
    if hasattr(gate, "f_proj"):
        a, b = projections(x, gate.f_proj, layer.b_proj)
        z = layer.g_proj(x)
    else:
        a, z, b = projections(x, gate.f_a_proj, layer.g_a_proj, layer.b_proj)
        a, z = gate.f_b_proj(a), layer.g_b_proj(z)
    options = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": bound,
        "A_log": gate.A_log, "dt_bias": gate.dt_bias, "use_beta_sigmoid_in_kernel": True,
        "initial_state": state,
    }  # fmt: skip
    a = a.unflatten(-1, heads)
    if step:
        o, _ = kda.fused_recurrent_kda(q, k, v, a, b, inplace_final_state=True, **options)
    else:
        options.update(output_final_state=cache is not None, cu_seqlens=lengths)
        o, state = kda.chunk_kda(q, k, v, a, b, **options)
        if cache is not None:
            cache.update_recurrent_state(state.to(torch.float32), layer.layer_idx)
    z, norm = z.unflatten(-1, heads), layer.o_norm
    o = normed_and_gated(norm, o, z) if is_gated_norm(norm) else norm(o, z)
    return projections(o.flatten(2), layer.o_proj)[0]


def _convolution(layer, qkv, cache, conv_state, lengths) -> torch.Tensor:
    """act(conv(qkv)) of [B, T, D], after the inputs in the cache, which these then join; conv_state
    [B, D, W], for one token, is updated in place."""
    weight, bias, T = layer.conv1d.weight.squeeze(1), layer.conv1d.bias, qkv.shape[1]
    x = qkv.transpose(1, 2)
    if conv_state is not None:
        y = convolved(
            layer.activation,
            lambda known: gdn_layer.causal_conv1d_update(x, conv_state, weight, bias, known),
        )
        return y.transpose(1, 2)
    if cache is not None:
        x = cache.update_conv_state(x, layer.layer_idx, conv_kernel_size=layer.conv_kernel_size)
    y = convolved(
        layer.activation,
        lambda known: gdn_layer.causal_conv1d_fn(x, weight, bias, known, cu_seqlens=lengths),
    )
    return y[:, :, -T:].transpose(1, 2)
