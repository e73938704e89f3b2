"""Operators of the parts around the gated delta rule."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..gdn.chunks import count_sequences
from ..runtime.ops import operator, present, run, serve
from .ops_train import conv_gradients, norm_gradients, save_conv, save_norm
from .reference import layer as reference

FAMILY = "gdn_layer.layer"


@operator("causal_conv1d_fwd")
def _causal_conv1d_fwd(
    x: Tensor,  # [B, D, T]
    weight: Tensor,  # [D, W]
    bias: Optional[Tensor],  # [D]
    activation: Optional[str],
    seq_idx: Optional[Tensor],  # [B, T]
    cu_seqlens: Optional[Tensor],  # [N + 1]
    initial_states: Optional[Tensor],  # [N, D, W - 1]
    return_final_states: bool,
) -> Tuple[Tensor, Tensor]:
    args = (
        x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, return_final_states,
    )  # fmt: skip
    y, final = serve(FAMILY, "causal_conv1d_fwd", reference.causal_conv1d_fwd, args)
    return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y), present(final, x)


@_causal_conv1d_fwd.register_fake
def _(x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, return_final_states):
    N = count_sequences(x.shape[0], cu_seqlens)
    states = (N, x.shape[1], weight.shape[1] - 1) if return_final_states else (0,)
    return torch.empty_like(x), x.new_empty(states)


_causal_conv1d_fwd.register_autograd(conv_gradients, setup_context=save_conv)


def causal_conv1d(*args) -> Tuple[Tensor, Optional[Tensor]]:
    """The convolution over a prompt; args are those of the operator."""

    def op(*args):
        *_, return_final_states = args
        y, final = _causal_conv1d_fwd(*args)
        return y, final if return_final_states else None

    return run(FAMILY, "causal_conv1d_fwd", op, reference.causal_conv1d_fwd, args)


@operator("causal_conv1d_update", mutates_args=("conv_state", "out"))
def _causal_conv1d_update(
    x: Tensor,  # [B, D, T]
    conv_state: Tensor,  # [N or P, D, S]
    weight: Tensor,  # [D, W]
    bias: Optional[Tensor],  # [D]
    activation: Optional[str],
    indices: Optional[Tensor],  # [N]
    accepted: Optional[Tensor],  # [N]
    cu_seqlens: Optional[Tensor],  # [N + 1]
    null_index: int,
    out: Optional[Tensor],  # [B, D, T]
) -> Tensor:
    args = (
        x, conv_state, weight, bias, activation, indices, accepted, cu_seqlens, null_index, out,
    )  # fmt: skip
    y = serve(FAMILY, "causal_conv1d_update", reference.causal_conv1d_update, args)
    if out is not None:
        return x.new_empty(0)
    return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)


@_causal_conv1d_update.register_fake
def _(x, conv_state, weight, bias, activation, indices, accepted, cu_seqlens, null_index, out):
    return torch.empty_like(x) if out is None else x.new_empty(0)


def causal_conv1d_update(*args) -> Tensor:
    """The convolution of the next tokens; args are those of the operator."""

    def op(*args):
        *_, out = args
        y = _causal_conv1d_update(*args)
        return y if out is None else out

    written, plain = (args[1], args[-1]), reference.causal_conv1d_update
    return run(FAMILY, "causal_conv1d_update", op, plain, args, written=written)


@operator("rms_norm_gated_fwd", like=("x",))
def _rms_norm_gated_fwd(
    x: Tensor,  # [..., D]
    gate: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    eps: float,
    activation: str,
) -> Tensor:
    args = (x, gate, weight, eps, activation)
    return serve(FAMILY, "rms_norm_gated_fwd", reference.rms_norm_gated_fwd, args)


_rms_norm_gated_fwd.register_autograd(norm_gradients, setup_context=save_norm)


def rms_norm_gated(*args) -> Tensor:
    """The gated norm; args are those of the operator."""
    return run(
        FAMILY, "rms_norm_gated_fwd", _rms_norm_gated_fwd, reference.rms_norm_gated_fwd, args
    )
