"""Operators of the gated delta rule without gradients; ops_train.py has those with gradients.

Their arguments are the fields of a call and of its options, with one difference: a state that is
written in place is passed as `state_pool`, so that torch knows which argument changes.
"""

from typing import Optional, Tuple

from torch import Tensor

from ..runtime.call import tensors_in
from ..runtime.ops import needs_grad, operator, plan, run, serve
from .call import GdnCall, RecurrentCall
from .ops_train import empty_state, gdn_chunk_train, trained_by
from .reference import chunk as chunk_reference
from .reference import common
from .reference import recurrent as recurrent_reference

CHUNK = ("gdn.chunk", "gdn_chunk_fwd")
CLEAR = ("gdn.pool", "gdn_clear_rows")
RECURRENT = ("gdn.recurrent", "gdn_recurrent_fwd")


@operator("gdn_chunk_fwd", mutates_args=("state_pool",))
def _gdn_chunk_fwd(state_pool: Optional[Tensor], *fields: GdnCall) -> Tuple[Tensor, Tensor, Tensor]:
    call = with_pool(GdnCall.of(fields), state_pool)
    o, state, checkpoints, _ = serve(*CHUNK, chunk_reference.gdn_chunk_fwd, (call,))
    return o, state if state_pool is None else None, checkpoints


def with_pool(call, state_pool: Optional[Tensor]):
    return call if state_pool is None else call._replace(initial_state=state_pool)


def without_pool(call, pooled: bool) -> tuple:
    """state_pool and the fields of the call, as the operators take them."""
    pool, start = (call.initial_state, None) if pooled else (None, call.initial_state)
    return (pool, *call._replace(initial_state=start).tensors, *call.options)


@_gdn_chunk_fwd.register_fake
def _(state_pool, *fields):
    return like_chunk(GdnCall.of(fields), state_pool)


def like_chunk(call, state_pool: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """Empty results of the operator of a chunked call: o, the final state, checkpoints."""
    v, options = call.v, call.options
    state, checkpoints = v.new_empty(0), v.new_empty(0)
    if options.output_final_state and state_pool is None:
        state = empty_state(call, call.N, options.state_dtype)
    if options.checkpoint_every:
        rows = call.B * (call.T // options.checkpoint_every)
        checkpoints = empty_state(call, rows, options.state_dtype)
    return v.new_empty(v.shape), state, checkpoints


def gdn_chunk(call: GdnCall) -> tuple:
    """o; the final state, the pool or None; checkpoints or None; blocks or None."""
    options = call.options

    def op(call):
        return (*chunk_by(_gdn_chunk_fwd, call), None)

    def train(call):
        o, state, *_ = gdn_chunk_train(*tensors_in(call), *call.options)
        return o, state if options.output_final_state else None, None, None

    reference = chunk_reference.gdn_chunk_fwd
    return run(
        *CHUNK, op, reference, (call,), train, _differentiable(call), written=pool_of(call)
    )  # fmt: skip


def chunk_by(operator, call) -> tuple:
    """o; the final state, the pool or None; checkpoints or None, of a chunked call's operator."""
    pooled, options = call.state_indices is not None, call.options
    o, state, checkpoints = operator(*without_pool(call, pooled))
    if pooled:
        state = call.initial_state
    elif not options.output_final_state:
        state = None
    return o, state, checkpoints if options.checkpoint_every else None


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
    """The pool and indices for a call whose sequences start from zeros where kept[n] is false.

    copies: start from copies, and leave the pool unchanged.
    """
    if copies:
        return common.own_rows(pool, indices, kept)
    run(*CLEAR, _gdn_clear_rows, _cleared, (pool, indices, kept), written=(pool,))
    return pool, indices


def _differentiable(call: GdnCall) -> bool:
    """True if kernels have a gradient of the call: not through a pool, nor of checkpoints."""
    return call.state_indices is None and not call.options.checkpoint_every


def pool_of(call) -> tuple:
    """The tensors that the call writes in place."""
    return (call.initial_state,) if call.state_indices is not None else ()


def plan_gdn_chunk(call: GdnCall):
    """Returns a function of the tensors for all eager calls that match this one, or None."""
    launch = plan(*CHUNK, (call,), _differentiable(call), pool_of(call))
    options = call.options
    if launch is None or not needs_grad((call,)):
        return launch
    body = trained_by(launch)

    def train(*tensors):
        o, state, *_ = gdn_chunk_train.run(body, *tensors, *options)
        return o, state, None, None

    return train


@operator("gdn_recurrent_fwd", mutates_args=("state_pool", "out"))
def _gdn_recurrent_fwd(
    state_pool: Optional[Tensor], *fields: RecurrentCall
) -> Tuple[Tensor, Tensor]:
    call = with_pool(RecurrentCall.of(fields), state_pool)
    o, state = serve(*RECURRENT, recurrent_reference.gdn_recurrent_fwd, (call,))
    return o if call.out is None else None, state if state_pool is None else None


@_gdn_recurrent_fwd.register_fake
def _(state_pool, *fields):
    return like_recurrent(RecurrentCall.of(fields), state_pool)


def like_recurrent(call, state_pool: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """Empty results of the operator of a recurrent call: o and the state."""
    v, options, state = call.v, call.options, call.v.new_empty(0)
    if options.all_states:
        state = empty_state(call, call.B * call.T).unflatten(0, (call.B, call.T))
    elif options.output_final_state and state_pool is None:
        state = empty_state(call, call.N)
    return v.new_empty(v.shape if call.out is None else 0), state


def gdn_recurrent(call: RecurrentCall) -> Tuple[Tensor, Optional[Tensor]]:
    """o, and the final state, every state, the state written in place, or None."""

    def op(call):
        return recurrent_by(_gdn_recurrent_fwd, call)

    reference = recurrent_reference.gdn_recurrent_fwd
    return run(*RECURRENT, op, reference, (call,), written=written_by(call))


def recurrent_by(operator, call) -> Tuple[Tensor, Optional[Tensor]]:
    """o, and the final state, every state, the pool or None, of a recurrent call's operator."""
    options = call.options
    o, state = operator(*without_pool(call, options.inplace))
    o = o if call.out is None else call.out
    if options.inplace:
        return o, call.initial_state
    return o, state if options.output_final_state or options.all_states else None


def plan_gdn_recurrent(call: RecurrentCall):
    """Returns a function of the tensors for all eager calls that match this one, or None."""
    return plan(*RECURRENT, (call,), written=written_by(call))


def written_by(call) -> tuple:
    """The tensors that a recurrent call writes in place."""
    return (call.initial_state if call.options.inplace else None, call.out)
