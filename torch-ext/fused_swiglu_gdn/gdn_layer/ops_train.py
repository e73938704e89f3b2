"""Gradients of the operators around the gated delta rule."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..runtime.ops import no_second_derivative, operator, present, serve
from .reference import backward as reference

FAMILY = "gdn_layer.layer"


@operator("causal_conv1d_bwd")
def _causal_conv1d_bwd(
    x: Tensor,  # [B, D, T]
    weight: Tensor,  # [D, W]
    bias: Optional[Tensor],  # [D]
    activation: Optional[str],
    seq_idx: Optional[Tensor],  # [B, T]
    cu_seqlens: Optional[Tensor],  # [N + 1]
    initial_states: Optional[Tensor],  # [N, D, W - 1]
    dy: Tensor,  # [B, D, T]
    d_final: Optional[Tensor],  # [N, D, W - 1]
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    args = (x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, dy, d_final)
    dx, *rest = serve(FAMILY, "causal_conv1d_bwd", reference.causal_conv1d_bwd, args)
    dx = dx if dx.stride() == x.stride() else torch.empty_like(x).copy_(dx)
    return (dx, *(present(d, x) for d in rest))


@_causal_conv1d_bwd.register_fake
def _(x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, dy, d_final):
    def like(t):
        return x.new_empty(0) if t is None else t.new_empty(t.shape)

    return torch.empty_like(x), like(weight), like(bias), like(initial_states)


def save_conv(ctx, inputs, output) -> None:
    x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, has_final = inputs
    ctx.save_for_backward(x, weight, bias, seq_idx, cu_seqlens, initial_states)
    ctx.activation, ctx.has_final = activation, has_final
    ctx.set_materialize_grads(False)


def conv_gradients(ctx, dy, d_final):
    x, weight, bias, seq_idx, cu_seqlens, initial_states = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dweight, dbias, d_initial = _causal_conv1d_bwd(
        x, weight, bias, ctx.activation, seq_idx, cu_seqlens, initial_states, dy,
        d_final if ctx.has_final else None,
    )  # fmt: skip
    need = ctx.needs_input_grad
    return (
        dx if need[0] else None, dweight if need[1] else None, dbias if need[2] else None, None,
        None, None, d_initial if need[6] else None, None,
    )  # fmt: skip


@operator("rms_norm_gated_bwd", like=("x", "gate", "weight"))
def _rms_norm_gated_bwd(
    x: Tensor,  # [..., D]
    gate: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    dy: Tensor,  # [..., D]
    eps: float,
    activation: str,
) -> Tuple[Tensor, Tensor, Tensor]:
    args = (x, gate, weight, dy, eps, activation)
    return serve(FAMILY, "rms_norm_gated_bwd", reference.rms_norm_gated_bwd, args)


def save_norm(ctx, inputs, output) -> None:
    x, gate, weight, ctx.eps, ctx.activation = inputs
    ctx.save_for_backward(x, gate, weight)


def norm_gradients(ctx, dy):
    x, gate, weight = ctx.saved_tensors
    grads = _rms_norm_gated_bwd(x, gate, weight, dy, ctx.eps, ctx.activation)
    return (*(d if need else None for d, need in zip(grads, ctx.needs_input_grad)), None, None)


@operator("gdn_layer_prologue_bwd", like=("dy", "weight", "bias", "initial_states"))
def _gdn_layer_prologue_bwd(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    weight: Tensor,  # [D, W]
    bias: Optional[Tensor],  # [D]
    activation: Optional[str],
    cu_seqlens: Optional[Tensor],  # [N + 1]
    initial_states: Optional[Tensor],  # [N, D, W - 1]
    dy: Tensor,  # [B, T, D]
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    args = (q, k, v, weight, bias, activation, cu_seqlens, initial_states, dy)
    dx, *rest = serve(FAMILY, "gdn_layer_prologue_bwd", reference.gdn_layer_prologue_bwd, args)
    return (dx.contiguous(), *(present(d, q) for d in rest))


def save_prologue(ctx, inputs, output) -> None:
    q, k, v, weight, bias, activation, cu_seqlens, initial_states, _ = inputs
    ctx.save_for_backward(q, k, v, weight, bias, cu_seqlens, initial_states)
    ctx.activation = activation


def prologue_gradients(ctx, dy, _):
    q, k, v, weight, bias, cu_seqlens, initial_states = ctx.saved_tensors
    dx, dweight, dbias, d_initial = _gdn_layer_prologue_bwd(
        q, k, v, weight, bias, ctx.activation, cu_seqlens, initial_states, dy
    )
    sizes = [x.shape[2] * x.shape[3] for x in (q, k, v)]
    parts = [d.unflatten(2, x.shape[2:]) for d, x in zip(dx.split(sizes, 2), (q, k, v))]
    need = ctx.needs_input_grad
    return (
        *(d if need[i] else None for i, d in enumerate(parts)), dweight if need[3] else None,
        dbias if need[4] else None, None, None, d_initial if need[7] else None, None,
    )  # fmt: skip


no_second_derivative(_causal_conv1d_bwd, "causal_conv1d_fn")
no_second_derivative(_rms_norm_gated_bwd, "rms_norm_gated")
no_second_derivative(_gdn_layer_prologue_bwd, "the layer's convolution")
