"""The gated delta rule token by token, and pools of states, as operations; ops_train.py has the
chunked form."""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..runtime.call import tensors_in
from ..runtime.operation import Operation
from . import checks
from .call import ClearRows, RecurrentCall
from .ops_train import cast, empty_state
from .reference import common
from .reference.recurrent import gdn_recurrent_fwd

CLEAR = Operation(
    "gdn.pool", "gdn_clear_rows", ClearRows, lambda call: common.clear_rows(*tensors_in(call)),
    outputs=0, written=("pool",),
)  # fmt: skip


def started(tensors: tuple, kept: Optional[Tensor], inplace: bool) -> tuple:
    """The tensors of a checked chunked call whose sequences start from zeros where kept[n] is
    false.

    inplace: in rows of the pool; else in copies, and the pool is left unchanged.
    """
    pool, rows = tensors[7:9]
    checks.has_initial_state(kept, rows)
    if inplace:
        CLEAR((pool, rows, kept))
    else:
        pool, rows = common.own_rows(pool, rows, kept)
    return (*tensors[:7], pool, rows, tensors[9])


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
    if isinstance(v, Tensor) and not v.is_nested:
        shape = v.shape[:3]
        g = v.new_zeros(shape, dtype=torch.float32) if g is None else g
        beta = v.new_ones(shape, dtype=torch.float32) if beta is None else beta
    return (q, k, v, g, beta, *more)


def step_operations(
    rule: str, kind: type, reference: Callable, check: Callable, cast: Callable
) -> Tuple[Operation, Operation]:
    """The operations of a rule token by token, without and with states that are written in place.

    rule: the room. reference(call) returns o and states, or tensors that are written in place.
    """

    def by_steps(call) -> tuple:
        o, state = reference(call)
        o = o if call.out is not None else o.contiguous()
        return o, state if call.options.inplace or state is None else state.contiguous()

    given = (f"{rule}.recurrent", f"{rule}_recurrent_fwd", kind, by_steps)
    more = dict(check=check, cast=cast, outputs=2, fake=_like_steps)
    return Operation(*given, written=("out",), **more), Operation(
        *given, written=("initial_state", "out"), schema=f"{rule}_recurrent_inplace", **more
    )


RECURRENT, RECURRENT_IN_PLACE = step_operations(
    "gdn", RecurrentCall, gdn_recurrent_fwd, checks.recurrent, _with_gates
)
