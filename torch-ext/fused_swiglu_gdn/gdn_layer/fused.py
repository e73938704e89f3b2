"""Functions for layers that each replace several public functions."""

from typing import Optional, Tuple

from torch import Tensor

from .ops_fused import DECODE, PROLOGUE


def convolve_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    *,
    cu_seqlens: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    final_width: int = 0,
) -> Tuple[Tensor, Optional[Tensor]]:
    """causal_conv1d_fn of q, k and v side by side, without concatenating them.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; views of one projection, or of several.
        weight: [D, W], D = 2 H K + HV V in the order q, k, v; bias: [D] or None.
        activation: None, "silu" (or "swish").
        cu_seqlens: [N + 1] for packed sequences in a batch of one.
        initial_states: [N, D, W - 1], the inputs before each sequence.
        final_width: number of the last inputs of each sequence to return.

    Returns:
        y [B, T, D], contiguous, and [N, D, final_width] (zeros before the first
        input) or None.
    """
    tensors = (q, k, v, weight, bias, cu_seqlens, initial_states)
    y, final = PROLOGUE(tensors, (activation, final_width))
    return y, final if final_width else None


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    conv_state: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    activation: Optional[str],
    A_log: Tensor,
    dt_bias: Optional[Tensor],
    norm_weight: Tensor,
    eps: float,
    gate_activation: str = "silu",
    allow_neg_eigval: bool = False,
) -> Tensor:
    """One token of a layer between its projections: convolution, rule, norm and gate.

    Args:
        q, k: [B, 1, H, K]; v, z: [B, 1, HV, V]; a, b: [B, 1, HV]: outputs of the projections;
            v, z, a, b may have their heads grouped by those of q and k, as [H, HV / H].
        conv_state: [B, D, S], S at least W - 1; state: [B, HV, K, V]; both updated in place.
        weight: [D, W]; bias: [D] or None; activation: None, "silu" (or "swish").
        A_log, dt_bias: [HV] of the gate; norm_weight: [V] and eps of the norm.
        gate_activation: "silu" (or "swish") or "sigmoid", of z.
        allow_neg_eigval: beta is 2 sigmoid(b).

    Returns:
        [B, 1, HV, V], the input of the output projection.
    """
    tensors = (
        q, k, v, z, a, b, conv_state, state, weight, bias, A_log, dt_bias, norm_weight,
    )  # fmt: skip
    return DECODE(tensors, (activation, eps, gate_activation, allow_neg_eigval))
