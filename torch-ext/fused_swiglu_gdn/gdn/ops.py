"""The gated delta rule token by token, and pools of states, as operations; ops_train.py has the
chunked form."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..runtime.call import tensors_in
from ..runtime.operation import Operation
from ..runtime.ops import present
from . import checks
from .call import ClearRows, RecurrentCall
from .ops_train import cast, empty_state
from .reference import common
from .reference import recurrent as recurrent_reference

CLEAR = Operation(
    "gdn.pool", "gdn_clear_rows", ClearRows, lambda call: common.clear_rows(*tensors_in(call)),
    outputs=0, written=("pool",),
)  # fmt: skip


def states_to_start_from(pool: Tensor, indices: Tensor, kept: Optional[Tensor], copies: bool):
    """The pool and indices for a call whose sequences start from zeros where kept[n] is false.

    copies: start from copies, and leave the pool unchanged.
    """
    if copies:
        return common.own_rows(pool, indices, kept)
    CLEAR((pool, indices, kept))
    return pool, indices


def _by_steps(call: RecurrentCall) -> tuple:
    """The reference: o and states, contiguous but for tensors that are written in place."""
    o, state = recurrent_reference.gdn_recurrent_fwd(call)
    o = o if call.out is not None else o.contiguous()
    return o, state if call.options.inplace or state is None else state.contiguous()


def _like_steps(call: RecurrentCall) -> tuple:
    """Empty results of the operator: o and the state, where they are not written in place."""
    v, options, state = call.v, call.options, None
    if options.all_states:
        state = empty_state(call, call.B * call.T).unflatten(0, (call.B, call.T))
    elif options.output_final_state and not options.inplace:
        state = empty_state(call, call.N)
    return v.new_empty(v.shape) if call.out is None else None, state


def _with_gates(q, k, v, g, beta, *more) -> tuple:
    """The tensors in autocast's dtype, with no decay and a write strength of 1 by default."""
    q, k, v = cast(q, k, v)
    if isinstance(v, Tensor):
        shape = v.shape[:3]
        g = v.new_zeros(shape, dtype=torch.float32) if g is None else g
        beta = v.new_ones(shape, dtype=torch.float32) if beta is None else beta
    return (q, k, v, g, beta, *more)


_STEPS = dict(check=checks.recurrent, cast=_with_gates, outputs=2, fake=_like_steps)
RECURRENT = Operation(
    "gdn.recurrent", "gdn_recurrent_fwd", RecurrentCall, _by_steps, written=("out",), **_STEPS
)
RECURRENT_IN_PLACE = Operation(
    "gdn.recurrent", "gdn_recurrent_fwd", RecurrentCall, _by_steps,
    written=("initial_state", "out"), schema="gdn_recurrent_inplace", **_STEPS,
)  # fmt: skip


# What follows is of kda/ops.py, whose operators take a state that is written as `state_pool`.


def with_pool(call, state_pool: Optional[Tensor]):
    return call if state_pool is None else call._replace(initial_state=state_pool)


def without_pool(call, pooled: bool) -> tuple:
    """state_pool and the fields of the call, as the operators take them."""
    pool, start = (call.initial_state, None) if pooled else (None, call.initial_state)
    return (pool, *call._replace(initial_state=start).tensors, *call.options)


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


def chunk_by(operator, call) -> tuple:
    """o; the final state, the pool or None; checkpoints or None, of a chunked call's operator."""
    pooled, options = call.state_indices is not None, call.options
    o, state, checkpoints = operator(*without_pool(call, pooled))
    if pooled:
        state = call.initial_state
    elif not options.output_final_state:
        state = None
    return o, state, checkpoints if options.checkpoint_every else None


def pool_of(call) -> tuple:
    """The tensors that the call writes in place."""
    return (call.initial_state,) if call.state_indices is not None else ()


def like_recurrent(call, state_pool: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """The results of _like_steps, with an empty tensor in place of None."""
    return tuple([present(x, call.v) for x in _like_steps(call)])


def recurrent_by(operator, call) -> Tuple[Tensor, Optional[Tensor]]:
    """o, and the final state, every state, the pool or None, of a recurrent call's operator."""
    options = call.options
    o, state = operator(*without_pool(call, options.inplace))
    o = o if call.out is None else call.out
    if options.inplace:
        return o, call.initial_state
    return o, state if options.output_final_state or options.all_states else None


def written_by(call) -> tuple:
    """The tensors that a recurrent call writes in place."""
    return (call.initial_state if call.options.inplace else None, call.out)
