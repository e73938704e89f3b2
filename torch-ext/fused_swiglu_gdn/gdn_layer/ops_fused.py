"""The operators of a whole layer's fused kernels; the layers alone call them."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ..runtime.ops import needs_grad, plan, present, run, serve
from .ops_train import prologue_gradients, save_prologue
from .reference import fused as reference

FAMILY = "gdn_layer.layer"


@torch.library.custom_op(add_op_namespace_prefix("gdn_layer_prologue"), mutates_args=())
def _gdn_layer_prologue(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    weight: Tensor,  # [D, W]
    bias: Optional[Tensor],  # [D]
    activation: Optional[str],
    cu_seqlens: Optional[Tensor],  # [N + 1]
    initial_states: Optional[Tensor],  # [N, D, W - 1]
    final_width: int,
) -> Tuple[Tensor, Tensor]:
    args = (q, k, v, weight, bias, activation, cu_seqlens, initial_states, final_width)
    y, final = serve(FAMILY, "gdn_layer_prologue", reference.gdn_layer_prologue, args)
    return y, present(final, q)


@_gdn_layer_prologue.register_fake
def _(q, k, v, weight, bias, activation, cu_seqlens, initial_states, final_width):
    (B, T), D = q.shape[:2], weight.shape[0]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty(B, T, D), q.new_empty((N, D, final_width) if final_width else (0,))


_gdn_layer_prologue.register_autograd(prologue_gradients, setup_context=save_prologue)


def gdn_layer_prologue(
    q, k, v, weight, bias, activation, cu_seqlens, initial_states, final_width
) -> Tuple[Tensor, Optional[Tensor]]:
    def op(*args):
        y, final = _gdn_layer_prologue(*args)
        return y, final if final_width else None

    args = (q, k, v, weight, bias, activation, cu_seqlens, initial_states, final_width)
    if final_width and needs_grad(args):  # the kernel has no gradient of the last inputs
        return reference.gdn_layer_prologue(*args)
    return run(FAMILY, "gdn_layer_prologue", op, reference.gdn_layer_prologue, args)


@torch.library.custom_op(
    add_op_namespace_prefix("gdn_layer_decode"), mutates_args=("conv_state", "state")
)
def _gdn_layer_decode(
    q: Tensor,  # [B, 1, H, K]
    k: Tensor,  # [B, 1, H, K]
    v: Tensor,  # [B, 1, HV, V] or [B, 1, H, HV / H, V], as z
    z: Tensor,  # [B, 1, HV, V]
    a: Tensor,  # [B, 1, HV] or [B, 1, H, HV / H], as b
    b: Tensor,  # [B, 1, HV]
    conv_state: Tensor,  # [B, D, S], written in place
    state: Tensor,  # [B, HV, K, V], written in place
    weight: Tensor,  # [D, W]
    bias: Optional[Tensor],  # [D]
    activation: Optional[str],
    A_log: Tensor,  # [HV]
    dt_bias: Optional[Tensor],  # [HV]
    norm_weight: Tensor,  # [V]
    eps: float,
    gate_activation: str,
    allow_neg_eigval: bool,
) -> Tensor:
    args = (
        q, k, v, z, a, b, conv_state, state, weight, bias, activation, A_log, dt_bias, norm_weight,
        eps, gate_activation, allow_neg_eigval,
    )  # fmt: skip
    return serve(FAMILY, "gdn_layer_decode", reference.gdn_layer_decode, args)


@_gdn_layer_decode.register_fake
def _(q, k, v, *_):
    return q.new_empty(v.flatten(2, -2).shape)


def gdn_layer_decode(*args) -> Tensor:
    """y [B, 1, HV, V] from the arguments of the operator above."""
    return run(FAMILY, "gdn_layer_decode", _gdn_layer_decode, reference.gdn_layer_decode, args)


def plan_gdn_layer_decode(args):
    """What serves eager calls of gdn_layer_decode like this one, from their tensors, or None."""
    return plan(FAMILY, "gdn_layer_decode", args)
