"""The operators of Kimi Delta Attention; those with a gradient are in ops_train.py.

As in gdn/ops.py, a state that is written in place comes as `state_pool`.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..gdn.ops import with_pool, without_pool
from ..gdn.ops_train import empty_state
from ..runtime import dispatch
from ..runtime.ops import needs_grad, operator, plan, run, serve, transformed
from .call import KdaCall, KdaStepCall
from .ops_train import kda_chunk_train
from .reference import chunk as chunk_reference
from .reference import recurrent as recurrent_reference

CHUNK = ("kda.chunk", "kda_chunk_fwd")
RECURRENT = ("kda.recurrent", "kda_recurrent_fwd")


@operator("kda_chunk_fwd", mutates_args=("state_pool",))
def _kda_chunk_fwd(state_pool: Optional[Tensor], *fields: KdaCall) -> Tuple[Tensor, Tensor, Tensor]:
    call = with_pool(KdaCall.of(fields), state_pool)
    o, state, checkpoints, _ = serve(*CHUNK, chunk_reference.kda_chunk_fwd, (call,))
    return o, state if state_pool is None else None, checkpoints


@_kda_chunk_fwd.register_fake
def _(state_pool, *fields):
    call = KdaCall.of(fields)
    v, options = call.v, call.options
    state, checkpoints = v.new_empty(0), v.new_empty(0)
    if options.output_final_state and state_pool is None:
        state = empty_state(call, call.N, options.state_dtype)
    if options.checkpoint_every:
        rows = call.B * (call.T // options.checkpoint_every)
        checkpoints = empty_state(call, rows, options.state_dtype)
    return v.new_empty(v.shape), state, checkpoints


def kda_chunk(call: KdaCall) -> tuple:
    """o; the final state, the pool or None; checkpoints or None."""
    pooled, options = call.state_indices is not None, call.options
    if needs_grad((call,)) and _trains(call):
        o, state = kda_chunk_train(*call.tensors, *options)
        return o, state if options.output_final_state else None, None

    def op(call):
        o, state, checkpoints = _kda_chunk_fwd(*without_pool(call, pooled))
        if pooled:
            state = call.initial_state
        elif not options.output_final_state:
            state = None
        return o, state, checkpoints if options.checkpoint_every else None

    reference = chunk_reference.kda_chunk_fwd
    written = (call.initial_state,) if pooled else ()
    return run(*CHUNK, op, reference, (call,), differentiable=False, written=written)[:3]


def _trains(call: KdaCall) -> bool:
    """True if the kernel computes the forward of a call whose gradient torch computes.

    It does not for calls through a pool or with checkpoints, nor under torch.func's transforms.
    """
    if call.state_indices is not None or call.options.checkpoint_every:
        return False
    if not torch.compiler.is_compiling() and (transformed() or any(map(_is_neg, call.tensors))):
        return False
    where = call.device
    return dispatch.has_kernels(*CHUNK, where.type, where.index) and call.q.dtype != torch.float64


def _is_neg(x: Optional[Tensor]) -> bool:
    return x is not None and x.is_neg()


def plan_kda_chunk(call: KdaCall):
    """Returns a function of the tensors for eager calls of kda_chunk that match, or None."""
    written = (call.initial_state,) if call.state_indices is not None else ()
    return plan(*CHUNK, (call,), written=written)


@operator("kda_recurrent_fwd", mutates_args=("state_pool", "out"))
def _kda_recurrent_fwd(state_pool: Optional[Tensor], *fields: KdaStepCall) -> Tuple[Tensor, Tensor]:
    call = with_pool(KdaStepCall.of(fields), state_pool)
    o, state = serve(*RECURRENT, recurrent_reference.kda_recurrent_fwd, (call,))
    return o if call.out is None else None, state if state_pool is None else None


@_kda_recurrent_fwd.register_fake
def _(state_pool, *fields):
    call = KdaStepCall.of(fields)
    v, options, state = call.v, call.options, call.v.new_empty(0)
    if options.all_states:
        state = empty_state(call, call.B * call.T).unflatten(0, (call.B, call.T))
    elif options.output_final_state and state_pool is None:
        state = empty_state(call, call.N)
    return v.new_empty(v.shape if call.out is None else 0), state


def kda_recurrent(call: KdaStepCall) -> Tuple[Tensor, Optional[Tensor]]:
    """o, and the final state, every state, the state written in place, or None."""
    options = call.options

    def op(call):
        o, state = _kda_recurrent_fwd(*without_pool(call, options.inplace))
        o = o if call.out is None else call.out
        if options.inplace:
            return o, call.initial_state
        return o, state if options.output_final_state or options.all_states else None

    reference = recurrent_reference.kda_recurrent_fwd
    return run(*RECURRENT, op, reference, (call,), written=_written(call))


def plan_kda_recurrent(call: KdaStepCall):
    """Returns a function of the tensors for eager calls of kda_recurrent that match, or None."""
    return plan(*RECURRENT, (call,), written=_written(call))


def _written(call: KdaStepCall) -> tuple:
    return (call.initial_state if call.options.inplace else None, call.out)
