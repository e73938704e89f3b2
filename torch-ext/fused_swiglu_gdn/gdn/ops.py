"""The operators of the gated delta rule.

The schemas differ from the launchers' signatures in one thing: a state that is written in place
comes as `state_pool`, so that torch knows which argument changes.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ..runtime.ops import needs_grad, plan, present, run, serve
from .ops_train import gdn_chunk_train
from .reference import chunk as chunk_reference
from .reference import recurrent as recurrent_reference


@torch.library.custom_op(add_op_namespace_prefix("gdn_chunk_fwd"), mutates_args=("state_pool",))
def _gdn_chunk_fwd(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV]
    beta: Tensor,  # [B, T, HV]
    A_log: Optional[Tensor],  # [HV]
    dt_bias: Optional[Tensor],  # [HV]
    initial_state: Optional[Tensor],  # [N, HV, K, V]
    state_pool: Optional[Tensor],  # [P, HV, K, V]
    state_indices: Optional[Tensor],  # [N]
    cu_seqlens: Optional[Tensor],  # [N + 1]
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    state_dtype: Optional[torch.dtype],
    checkpoint_every: int,
) -> Tuple[Tensor, Tensor, Tensor]:
    args = (
        q, k, v, g, beta, A_log, dt_bias, initial_state if state_pool is None else state_pool,
        state_indices, cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval,
        state_v_first, output_final_state, state_dtype, checkpoint_every,
    )  # fmt: skip
    o, state, checkpoints = serve("gdn.chunk", "gdn_chunk_fwd", chunk_reference.gdn_chunk_fwd, args)
    if state_pool is not None:
        state = None
    return o, present(state, v), present(checkpoints, v)


def _empty_state(q, v, rows, state_v_first, dtype):
    K, HV, V = q.shape[3], v.shape[2], v.shape[3]
    dims = (V, K) if state_v_first else (K, V)
    return q.new_empty(rows, HV, *dims, dtype=dtype or torch.float32)


@_gdn_chunk_fwd.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_pool, state_indices, cu_seqlens, scale,
    use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first, output_final_state,
    state_dtype, checkpoint_every,
):  # fmt: skip
    B, T = q.shape[:2]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = checkpoints = v.new_empty(0)
    if output_final_state and state_pool is None:
        state = _empty_state(q, v, N, state_v_first, state_dtype)
    if checkpoint_every:
        rows = B * (T // checkpoint_every)
        checkpoints = _empty_state(q, v, rows, state_v_first, state_dtype)
    return v.new_empty(v.shape), state, checkpoints if checkpoint_every else v.new_empty(0)


def gdn_chunk(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens, scale,
    use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first, output_final_state,
    state_dtype, checkpoint_every, recompute,
) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """o, the final state or the pool or None, checkpoints or None."""

    def op(*args):
        before, after = args[:7], args[8:]
        pool = None if state_indices is None else initial_state
        start = initial_state if pool is None else None
        o, state, checkpoints = _gdn_chunk_fwd(*before, start, pool, *after)
        if pool is not None:
            state = pool
        elif not output_final_state:
            state = None
        return o, state, checkpoints if checkpoint_every else None

    def train(*args):
        o, state, *_ = gdn_chunk_train(*args[:8], *args[9:17], recompute)
        return o, state if output_final_state else None, None

    args = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens, scale,
        use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first, output_final_state,
        state_dtype, checkpoint_every,
    )  # fmt: skip
    if needs_grad(args) and (state_indices is not None or checkpoint_every):
        return chunk_reference.gdn_chunk_fwd(*args)  # kernels have no gradient of these
    return run("gdn.chunk", "gdn_chunk_fwd", op, chunk_reference.gdn_chunk_fwd, args, train)


def plan_gdn_chunk(args):
    """What serves all eager calls of gdn_chunk like this one, from their tensors, or None."""
    return plan("gdn.chunk", "gdn_chunk_fwd", args)


@torch.library.custom_op(add_op_namespace_prefix("gdn_recurrent_fwd"), mutates_args=("state_pool",))
def _gdn_recurrent_fwd(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV]
    beta: Tensor,  # [B, T, HV]
    A_log: Optional[Tensor],  # [HV]
    dt_bias: Optional[Tensor],  # [HV]
    initial_state: Optional[Tensor],  # [N or P, HV, K, V]
    state_pool: Optional[Tensor],  # [N or P, HV, K, V], written in place
    state_indices: Optional[Tensor],  # [N]
    output_state_indices: Optional[Tensor],  # [N]
    cu_seqlens: Optional[Tensor],  # [N + 1]
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    all_states: bool,
) -> Tuple[Tensor, Tensor]:
    inplace = state_pool is not None
    args = (
        q, k, v, g, beta, A_log, dt_bias, state_pool if inplace else initial_state, state_indices,
        output_state_indices, cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid,
        allow_neg_eigval, state_v_first, output_final_state, inplace, all_states,
    )  # fmt: skip
    o, state = serve(
        "gdn.recurrent", "gdn_recurrent_fwd", recurrent_reference.gdn_recurrent_fwd, args
    )
    return o, present(None if inplace else state, v)


@_gdn_recurrent_fwd.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_pool, state_indices,
    output_state_indices, cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval,
    state_v_first, output_final_state, all_states,
):  # fmt: skip
    B, T = q.shape[:2]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = v.new_empty(0)
    if all_states:
        state = _empty_state(q, v, B * T, state_v_first, None).unflatten(0, (B, T))
    elif output_final_state and state_pool is None:
        state = _empty_state(q, v, N, state_v_first, None)
    return v.new_empty(v.shape), state


def gdn_recurrent(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
    cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
    output_final_state, inplace, all_states,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """o, and the final state, every state, the state written in place, or None."""

    def op(*args):
        start, pool = (None, initial_state) if inplace else (initial_state, None)
        rest = args[8:17] + args[18:]
        o, state = _gdn_recurrent_fwd(*args[:7], start, pool, *rest)
        if inplace:
            return o, initial_state
        return o, state if output_final_state or all_states else None

    args = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
        cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
        output_final_state, inplace, all_states,
    )  # fmt: skip
    reference = recurrent_reference.gdn_recurrent_fwd
    return run("gdn.recurrent", "gdn_recurrent_fwd", op, reference, args)


def plan_gdn_recurrent(args):
    """What serves all eager calls of gdn_recurrent like this one, from their tensors, or None."""
    return plan("gdn.recurrent", "gdn_recurrent_fwd", args)
