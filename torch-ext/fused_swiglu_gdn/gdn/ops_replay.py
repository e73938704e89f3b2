"""Operators of decoding with a ring. Their arguments are the fields of a call."""

from typing import Optional

from torch import Tensor

from ..runtime.call import tensors_in
from ..runtime.dtypes import at_least_fp32
from ..runtime.ops import operator, plan, run, serve
from .call import ReplayCall, Ring
from .reference import replay as reference

FAMILY = "gdn.replay"
REPLAY, ADVANCE = (FAMILY, "gdn_replay_fwd"), (FAMILY, "gdn_ring_advance")
MATERIALISE = (FAMILY, "gdn_ring_materialise")


@operator("gdn_replay_fwd", mutates_args=("initial_state", "ring_k", "ring_u", "ring_g", "out"))
def _gdn_replay_fwd(*fields: ReplayCall) -> Tensor:
    call = ReplayCall.of(fields)
    o = serve(*REPLAY, reference.gdn_replay_fwd, (call,))
    return o if call.out is None else call.q.new_empty(0)


@_gdn_replay_fwd.register_fake
def _(*fields):
    call = ReplayCall.of(fields)
    return call.v.new_empty(call.v.shape if call.out is None else 0)


def gdn_replay(call: ReplayCall) -> Tensor:
    """o [N, T, HV, V]; the ring and the states are updated in place."""

    def op(call):
        o = _gdn_replay_fwd(*tensors_in(call), *call.options)
        return o if call.out is None else call.out

    written = (call.initial_state, call.out)
    return run(*REPLAY, op, reference.gdn_replay_fwd, (call,), written=written)


def plan_gdn_replay(call: ReplayCall):
    """Returns a function of the tensors for all eager calls that match this one, or None."""
    return plan(*REPLAY, (call,), written=(call.initial_state, call.out))


@operator("gdn_ring_advance", mutates_args=("cursor",))
def _gdn_ring_advance(
    cursor: Tensor,  # [N, 2]
    accepted: Optional[Tensor],  # [N]
    force_flush: Optional[Tensor],  # [N]
    state_indices: Optional[Tensor],  # [N]
    R: int,
    max_tokens: int,
    null_index: int,
) -> None:
    args = (cursor, accepted, force_flush, state_indices, R, max_tokens, null_index)
    serve(*ADVANCE, reference.gdn_ring_advance, args)


@_gdn_ring_advance.register_fake
def _(*args):
    return None


def _advance(tensors: tuple, ring: Ring, null_index: int) -> tuple:
    return (*tensors, ring.g.shape[2], ring.max_tokens, null_index)


def gdn_ring_advance(tensors: tuple, ring: Ring, null_index: int) -> None:
    """Updates the cursor, the first of: cursor, accepted, force_flush, state_indices."""
    args = _advance(tensors, ring, null_index)
    run(*ADVANCE, _gdn_ring_advance, reference.gdn_ring_advance, args)


def plan_gdn_ring_advance(tensors: tuple, ring: Ring, null_index: int):
    """Returns a function of the tensors for all eager calls that match this one, or None."""
    return plan(*ADVANCE, _advance(tensors, ring, null_index))


@operator("gdn_ring_materialise", mutates_args=("state_pool",))
def _gdn_ring_materialise(
    state: Optional[Tensor],  # [P, HV, V, K]
    state_pool: Optional[Tensor],  # [P, HV, V, K], written
    ring_k: Tensor,  # [P, H, R, K]
    ring_u: Tensor,  # [P, HV, R, V]
    ring_g: Tensor,  # [P, HV, R]
    cursor: Tensor,  # [N, 2]
    state_indices: Optional[Tensor],  # [N]
    null_index: int,
) -> Tensor:
    inplace = state is None
    tensors = (state_pool if inplace else state, ring_k, ring_u, ring_g, cursor, state_indices)
    out = serve(*MATERIALISE, reference.gdn_ring_materialise, (*tensors, null_index, inplace))
    return cursor.new_empty(0) if inplace else out


@_gdn_ring_materialise.register_fake
def _(state, state_pool, ring_k, ring_u, ring_g, cursor, state_indices, null_index):
    if state is None:
        return cursor.new_empty(0)
    return at_least_fp32(state).new_empty(cursor.shape[0], *state.shape[1:])


def gdn_ring_materialise(
    state: Tensor, ring: Ring, cursor: Tensor, state_indices: Optional[Tensor], null_index: int,
    inplace: bool,
) -> Tensor:  # fmt: skip
    """The states with all tokens of the ring: new ones, or the pool."""

    def op(state, *args):
        *rest, inplace = args
        out = _gdn_ring_materialise(*((None, state) if inplace else (state, None)), *rest)
        return state if inplace else out

    args = (state, ring.k, ring.u, ring.g, cursor, state_indices, null_index, inplace)
    written = (state,) if inplace else ()
    return run(*MATERIALISE, op, reference.gdn_ring_materialise, args, written=written)
