"""The operators of decoding with a ring. Their arguments are the fields of a call."""

from typing import Optional

from torch import Tensor

from ..runtime.dtypes import at_least_fp32
from ..runtime.ops import operator, plan, run, serve
from .call import ReplayCall, ReplayOptions, Ring
from .reference import replay as reference

FAMILY = "gdn.replay"
REPLAY, ADVANCE = (FAMILY, "gdn_replay_fwd"), (FAMILY, "gdn_ring_advance")
MATERIALISE = (FAMILY, "gdn_ring_materialise")


@operator("gdn_replay_fwd", mutates_args=("state_pool", "ring_k", "ring_u", "ring_g"))
def _gdn_replay_fwd(
    q: Tensor,  # [N, T, H, K]
    k: Tensor,  # [N, T, H, K]
    v: Tensor,  # [N, T, HV, V]
    g: Tensor,  # [N, T, HV]
    beta: Tensor,  # [N, T, HV]
    A_log: Optional[Tensor],  # [HV]
    dt_bias: Optional[Tensor],  # [HV]
    state_pool: Tensor,  # [P, HV, V, K]
    ring_k: Tensor,  # [P, H, R, K]
    ring_u: Tensor,  # [P, HV, R, V]
    ring_g: Tensor,  # [P, HV, R]
    cursor: Tensor,  # [N, 2]
    force_flush: Optional[Tensor],  # [N]
    state_indices: Optional[Tensor],  # [N]
    *options: ReplayOptions,
) -> Tensor:
    call = ReplayCall(
        q, k, v, g, beta, A_log, dt_bias, state_pool, ring_k, ring_u, ring_g, cursor, force_flush,
        state_indices, ReplayOptions(*options),
    )  # fmt: skip
    return serve(*REPLAY, reference.gdn_replay_fwd, (call,))


@_gdn_replay_fwd.register_fake
def _(q, k, v, *rest):
    return v.new_empty(v.shape)


def gdn_replay(call: ReplayCall) -> Tensor:
    """o [N, T, HV, V]; the ring and the states change."""

    def op(call):
        return _gdn_replay_fwd(*call.tensors, *call.options)

    return run(*REPLAY, op, reference.gdn_replay_fwd, (call,))


def plan_gdn_replay(call: ReplayCall):
    """What serves all eager calls of gdn_replay like this one, from their tensors, or None."""
    return plan(*REPLAY, (call,))


@operator("gdn_ring_advance", mutates_args=("cursor",))
def _gdn_ring_advance(
    cursor: Tensor,  # [N, 2]
    accepted: Optional[Tensor],  # [N]
    force_flush: Optional[Tensor],  # [N]
    state_indices: Optional[Tensor],  # [N]
    R: int,
    max_tokens: int,
) -> None:
    args = (cursor, accepted, force_flush, state_indices, R, max_tokens)
    serve(*ADVANCE, reference.gdn_ring_advance, args)


@_gdn_ring_advance.register_fake
def _(*args):
    return None


def gdn_ring_advance(
    cursor: Tensor, ring: Ring, accepted: Optional[Tensor], force_flush: Optional[Tensor],
    state_indices: Optional[Tensor],
) -> None:  # fmt: skip
    """Moves the cursor."""
    args = (cursor, accepted, force_flush, state_indices, ring.g.shape[2], ring.max_tokens)
    run(*ADVANCE, _gdn_ring_advance, reference.gdn_ring_advance, args)


@operator("gdn_ring_materialise", mutates_args=("state_pool",))
def _gdn_ring_materialise(
    state: Optional[Tensor],  # [P, HV, V, K]
    state_pool: Optional[Tensor],  # [P, HV, V, K], written
    ring_k: Tensor,  # [P, H, R, K]
    ring_u: Tensor,  # [P, HV, R, V]
    ring_g: Tensor,  # [P, HV, R]
    cursor: Tensor,  # [N, 2]
    state_indices: Optional[Tensor],  # [N]
) -> Tensor:
    inplace = state is None
    tensors = (state_pool if inplace else state, ring_k, ring_u, ring_g, cursor, state_indices)
    out = serve(*MATERIALISE, reference.gdn_ring_materialise, (*tensors, inplace))
    return cursor.new_empty(0) if inplace else out


@_gdn_ring_materialise.register_fake
def _(state, state_pool, ring_k, ring_u, ring_g, cursor, state_indices):
    if state is None:
        return cursor.new_empty(0)
    return at_least_fp32(state).new_empty(cursor.shape[0], *state.shape[1:])


def gdn_ring_materialise(
    state: Tensor, ring: Ring, cursor: Tensor, state_indices: Optional[Tensor], inplace: bool
) -> Tensor:
    """The states with all of the ring: new ones, or the pool."""

    def op(state, *args):
        *tensors, inplace = args
        out = _gdn_ring_materialise(*((None, state) if inplace else (state, None)), *tensors)
        return state if inplace else out

    args = (state, ring.k, ring.u, ring.g, cursor, state_indices, inplace)
    return run(*MATERIALISE, op, reference.gdn_ring_materialise, args)
