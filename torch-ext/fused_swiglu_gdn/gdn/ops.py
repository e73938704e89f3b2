"""The operators of the gated delta rule; those with a gradient are in ops_train.py.

Their arguments are the fields of a call, and its options the fields of `*options`. One thing is
different: a state that is written in place comes as `state_pool`, so that torch knows which
argument changes.
"""

from typing import Optional, Tuple

from torch import Tensor

from ..runtime.ops import needs_grad, operator, plan, run, serve
from .call import GdnCall, GdnOptions, RecurrentCall, RecurrentOptions
from .ops_train import empty_state, gdn_chunk_train, trained_by
from .reference import chunk as chunk_reference
from .reference import common
from .reference import recurrent as recurrent_reference

CHUNK = ("gdn.chunk", "gdn_chunk_fwd")
CLEAR = ("gdn.pool", "gdn_clear_rows")
RECURRENT = ("gdn.recurrent", "gdn_recurrent_fwd")


@operator("gdn_chunk_fwd", mutates_args=("state_pool",))
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
    *options: GdnOptions,
) -> Tuple[Tensor, Tensor, Tensor]:
    start = initial_state if state_pool is None else state_pool
    call = GdnCall(
        q, k, v, g, beta, A_log, dt_bias, start, state_indices, cu_seqlens, GdnOptions(*options)
    )
    o, state, checkpoints, _ = serve(*CHUNK, chunk_reference.gdn_chunk_fwd, (call,))
    return o, state if state_pool is None else None, checkpoints


@_gdn_chunk_fwd.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_pool, state_indices, cu_seqlens, *options
):  # fmt: skip
    options = GdnOptions(*options)
    call = GdnCall(
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens, options
    )
    state, checkpoints = v.new_empty(0), v.new_empty(0)
    if options.output_final_state and state_pool is None:
        state = empty_state(call, call.N, options.state_dtype)
    if options.checkpoint_every:
        rows = call.B * (call.T // options.checkpoint_every)
        checkpoints = empty_state(call, rows, options.state_dtype)
    return v.new_empty(v.shape), state, checkpoints


def gdn_chunk(call: GdnCall) -> tuple:
    """o; the final state, the pool or None; checkpoints or None; blocks or None."""
    pooled = call.state_indices is not None
    options = call.options

    def op(call):
        pool = call.initial_state if pooled else None
        start = None if pooled else call.initial_state
        o, state, checkpoints = _gdn_chunk_fwd(
            call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, start, pool,
            call.state_indices, call.cu_seqlens, *call.options,
        )  # fmt: skip
        if pooled:
            state = pool
        elif not options.output_final_state:
            state = None
        return o, state, checkpoints if options.checkpoint_every else None, None

    def train(call):
        o, state, *_ = gdn_chunk_train(
            call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias,
            call.initial_state, call.cu_seqlens, *call.options,
        )  # fmt: skip
        return o, state if options.output_final_state else None, None, None

    reference = chunk_reference.gdn_chunk_fwd
    return run(*CHUNK, op, reference, (call,), train, _differentiable(call))


@operator("gdn_clear_rows", mutates_args=("pool",))
def _gdn_clear_rows(
    pool: Tensor,  # [P, HV, K, V]
    indices: Tensor,  # [N]
    kept: Tensor,  # [N]
) -> Tensor:
    serve(*CLEAR, _cleared, (pool, indices, kept))
    return indices.new_empty(0)


@_gdn_clear_rows.register_fake
def _(pool, indices, kept):
    return indices.new_empty(0)


def _cleared(pool, indices, kept) -> tuple:
    common.clear_rows(pool, indices, kept)
    return ()


def states_to_start_from(pool: Tensor, indices: Tensor, kept: Optional[Tensor], copies: bool):
    """The pool and indices for a call whose sequences start from zeros where kept[n] is false;
    copies: and which leaves the pool as it is."""
    if copies:
        return common.own_rows(pool, indices, kept)
    run(*CLEAR, _gdn_clear_rows, _cleared, (pool, indices, kept))
    return pool, indices


def _differentiable(call: GdnCall) -> bool:
    """Kernels have no gradient through a pool or of checkpoints."""
    return call.state_indices is None and not call.options.checkpoint_every


def plan_gdn_chunk(call: GdnCall):
    """What serves all eager calls of gdn_chunk like this one, from their tensors, or None."""
    launch, options = plan(*CHUNK, (call,), _differentiable(call)), call.options
    if launch is None or not needs_grad((call,)):
        return launch
    body = trained_by(launch)

    def train(q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens):
        tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        o, state, *_ = gdn_chunk_train.run(body, *tensors, *options)
        return o, state, None, None

    return train


@operator("gdn_recurrent_fwd", mutates_args=("state_pool", "out"))
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
    state_indices: Optional[Tensor],  # [N] or [N, 1 + S]
    output_state_indices: Optional[Tensor],  # [N]
    num_accepted_tokens: Optional[Tensor],  # [N]
    cu_seqlens: Optional[Tensor],  # [N + 1]
    out: Optional[Tensor],  # [B, T, HV, V], written
    *options: RecurrentOptions,
) -> Tuple[Tensor, Tensor]:
    call = RecurrentCall(
        q, k, v, g, beta, A_log, dt_bias, initial_state if state_pool is None else state_pool,
        state_indices, output_state_indices, num_accepted_tokens, cu_seqlens, out,
        RecurrentOptions(*options),
    )  # fmt: skip
    o, state = serve(*RECURRENT, recurrent_reference.gdn_recurrent_fwd, (call,))
    return o if out is None else None, state if state_pool is None else None


@_gdn_recurrent_fwd.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_pool, state_indices,
    output_state_indices, num_accepted_tokens, cu_seqlens, out, *options,
):  # fmt: skip
    options = RecurrentOptions(*options)
    call = RecurrentCall(
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
        num_accepted_tokens, cu_seqlens, out, options,
    )  # fmt: skip
    state = v.new_empty(0)
    if options.all_states:
        state = empty_state(call, call.B * call.T).unflatten(0, (call.B, call.T))
    elif options.output_final_state and state_pool is None:
        state = empty_state(call, call.N)
    return v.new_empty(v.shape if out is None else 0), state


def gdn_recurrent(call: RecurrentCall) -> Tuple[Tensor, Optional[Tensor]]:
    """o, and the final state, every state, the state written in place, or None."""
    options = call.options

    def op(call):
        state = call.initial_state
        start, pool = (None, state) if options.inplace else (state, None)
        o, state = _gdn_recurrent_fwd(
            call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, start, pool,
            call.state_indices, call.output_state_indices, call.num_accepted_tokens,
            call.cu_seqlens, call.out, *call.options,
        )  # fmt: skip
        o = o if call.out is None else call.out
        if options.inplace:
            return o, pool
        return o, state if options.output_final_state or options.all_states else None

    return run(*RECURRENT, op, recurrent_reference.gdn_recurrent_fwd, (call,))


def plan_gdn_recurrent(call: RecurrentCall):
    """What serves all eager calls of gdn_recurrent like this one, from their tensors, or None."""
    return plan(*RECURRENT, (call,))
