"""The operators of Kimi Delta Attention; those with a gradient are in ops_train.py.

As in gdn/ops.py, a state that is written in place comes as `state_pool`.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..gdn.ops import (
    chunk_by,
    like_chunk,
    like_recurrent,
    pool_of,
    recurrent_by,
    with_pool,
    written_by,
)
from ..runtime import dispatch
from ..runtime.call import device_of, tensors_in
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
    return like_chunk(KdaCall.of(fields), state_pool)


def kda_chunk(call: KdaCall) -> tuple:
    """o; the final state, the pool or None; checkpoints or None."""
    options = call.options
    if needs_grad((call,)) and _trains(call):
        o, state = kda_chunk_train(*tensors_in(call), *options)
        return o, state if options.output_final_state else None, None

    def op(call):
        return chunk_by(_kda_chunk_fwd, call)

    reference = chunk_reference.kda_chunk_fwd
    return run(*CHUNK, op, reference, (call,), differentiable=False, written=pool_of(call))[:3]


def _trains(call: KdaCall) -> bool:
    """True if the kernel computes the forward of a call whose gradient torch computes.

    It does not for calls through a pool or with checkpoints, nor under torch.func's transforms.
    """
    if call.state_indices is not None or call.options.checkpoint_every:
        return False
    if not torch.compiler.is_compiling() and (transformed() or any(map(_is_neg, call.tensors))):
        return False
    where = device_of(call)
    return dispatch.has_kernels(*CHUNK, where.type, where.index) and call.q.dtype != torch.float64


def _is_neg(x: Optional[Tensor]) -> bool:
    return x is not None and x.is_neg()


def plan_kda_chunk(call: KdaCall):
    """Returns a function of the tensors for eager calls of kda_chunk that match, or None."""
    return plan(*CHUNK, (call,), written=pool_of(call))


@operator("kda_recurrent_fwd", mutates_args=("state_pool", "out"))
def _kda_recurrent_fwd(state_pool: Optional[Tensor], *fields: KdaStepCall) -> Tuple[Tensor, Tensor]:
    call = with_pool(KdaStepCall.of(fields), state_pool)
    o, state = serve(*RECURRENT, recurrent_reference.kda_recurrent_fwd, (call,))
    return o if call.out is None else None, state if state_pool is None else None


@_kda_recurrent_fwd.register_fake
def _(state_pool, *fields):
    return like_recurrent(KdaStepCall.of(fields), state_pool)


def kda_recurrent(call: KdaStepCall) -> Tuple[Tensor, Optional[Tensor]]:
    """o, and the final state, every state, the state written in place, or None."""

    def op(call):
        return recurrent_by(_kda_recurrent_fwd, call)

    reference = recurrent_reference.kda_recurrent_fwd
    return run(*RECURRENT, op, reference, (call,), written=written_by(call))


def plan_kda_recurrent(call: KdaStepCall):
    """Returns a function of the tensors for eager calls of kda_recurrent that match, or None."""
    return plan(*RECURRENT, (call,), written=written_by(call))
