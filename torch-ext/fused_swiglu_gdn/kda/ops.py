"""Kimi Delta Attention as operations: in chunks, with a gradient, and token by token.

Saved for the gradient: the tensors of the call.
"""

import functools

import torch
from torch import Tensor

from ..gdn.ops import step_operations
from ..gdn.ops_train import by_torch, gradients_by_torch, results
from ..runtime.operation import Operation
from . import checks
from .call import KdaBackward, KdaCall, KdaStepCall
from .reference.backward import kda_chunk_bwd
from .reference.chunk import kda_chunk_fwd
from .reference.recurrent import kda_recurrent_fwd

FAMILY = "kda.chunk"
_PROMPTS = dict(check=checks.chunk, cast=checks.flat, outputs=3, fake=results)


def _gradients_like(call: KdaBackward) -> tuple:
    return tuple([x if x is None else x.new_empty(x.shape) for x in call[:8]])


CHUNK = Operation(
    FAMILY, "kda_chunk_fwd", KdaCall, functools.partial(by_torch, kda_chunk_fwd),
    differentiable=lambda call: not call.options.checkpoint_every, **_PROMPTS,
)  # fmt: skip
CHUNK_IN_POOL = Operation(
    FAMILY, "kda_chunk_fwd", KdaCall, functools.partial(by_torch, kda_chunk_fwd),
    written=("initial_state",), schema="kda_chunk_pool", **_PROMPTS,
)  # fmt: skip
GRADIENT = Operation(
    FAMILY, "kda_chunk_bwd", KdaBackward, functools.partial(gradients_by_torch, kda_chunk_bwd),
    outputs=8, fake=_gradients_like,
)  # fmt: skip


def _save(ctx, inputs, output) -> None:
    *tensors, _, cu_seqlens, ctx.options = KdaCall.of(inputs)
    ctx.save_for_backward(*tensors, cu_seqlens)
    ctx.mark_non_differentiable(*[x for x in output[2:] if x is not None])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, d_final_state, _):
    tensors = ctx.saved_tensors
    do = torch.zeros_like(tensors[2]) if do is None else do
    d_final_state = d_final_state if ctx.options.output_final_state else None
    grads = GRADIENT.in_gradient((*tensors, do, d_final_state), ctx.options)
    wanted, nothing = ctx.needs_input_grad[:8], ctx.needs_input_grad[8:]
    return (*[x if want else None for x, want in zip(grads, wanted)], *[None for _ in nothing])


CHUNK.register_gradient(_save, _backward, GRADIENT, "chunk_kda")


def _with_strength(q, k, v, g, beta, *more) -> tuple:
    """The tensors as checks.flat has them, with a write strength of 1 by default."""
    if beta is None and isinstance(v, Tensor):
        beta = v.new_ones(v.shape[:3], dtype=torch.float32)
    return checks.flat(q, k, v, g, beta, *more)


RECURRENT, RECURRENT_IN_PLACE = step_operations(
    "kda", KdaStepCall, kda_recurrent_fwd, checks.recurrent, _with_strength
)
