"""The gated delta rule in chunks as an operation with a gradient.

Saved for the gradient: the tensors of the call, and Tb, P and F of its chunks where they are not
recomputed.
"""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..runtime.operation import Operation
from ..runtime.ops import autocast, needs_grad
from . import checks
from .call import GdnBackward, GdnCall
from .chunks import CHUNK as TOKENS
from .reference.backward import gdn_chunk_bwd
from .reference.chunk import gdn_chunk_fwd

NONE = (None, None, None)  # in place of Tb, P and F


def empty_state(call, rows: int, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Uninitialised states, [rows, HV, K, V] or [rows, HV, V, K]."""
    return call.q.new_empty(rows, *call.state_shape, dtype=dtype or torch.float32)


def _blocks(call: GdnCall) -> tuple:
    """Uninitialised Tb, P and F, or None where they are not saved."""
    if not call.options.save_blocks:
        return NONE
    rows, HV = call.rows, call.HV
    tb, p = (call.q.new_empty(rows, HV, TOKENS, TOKENS) for _ in range(2))
    return tb, p, call.q.new_empty(rows, HV, 4, TOKENS, dtype=torch.float32)


def cast(q, k, v, *more) -> tuple:
    """The tensors of a call, with tokens in autocast's dtype."""
    return (*autocast(q, k, v), *more)


def _results(call) -> tuple:
    """Empty results of a chunked form: o, the final state, checkpoints; a pool is not among
    them."""
    options, state, checkpoints = call.options, None, None
    if options.output_final_state and call.state_indices is None:
        state = empty_state(call, call.N, options.state_dtype)
    if options.checkpoint_every:
        rows = call.B * (call.T // options.checkpoint_every)
        checkpoints = empty_state(call, rows, options.state_dtype)
    return call.v.new_empty(call.v.shape), state, checkpoints


def _gradients_like(call: GdnBackward) -> tuple:
    wanted = list(call[:8])
    if call.options.values_only:
        wanted = [None, None, call.v, *[None] * 4, call.initial_state]
    return tuple([x if x is None else x.new_empty(x.shape) for x in wanted])


def _save(ctx, inputs, output) -> None:
    _, _, checkpoints, *blocks = output
    *tensors, _, cu_seqlens, ctx.options = GdnCall.of(inputs)
    ctx.save_for_backward(*tensors, cu_seqlens, *(blocks if ctx.options.save_blocks else NONE))
    ctx.mark_non_differentiable(*[x for x in (checkpoints, *blocks) if x is not None])
    ctx.set_materialize_grads(False)


def chunk_operations(
    rule: str, call: type, gradient: type, references: Tuple[Callable, Callable], function: str,
    blocks: Callable = lambda call: (), outputs: int = 3, **more: Callable,
) -> Tuple[Operation, Operation, Operation]:  # fmt: skip
    """The operations of a rule in chunks, without and with a pool of states, and of its gradient.

    rule: the room. references: functions of the two kinds of calls. function: the public one.
    blocks(call): what else is returned for the gradient, uninitialised. more: check and cast.
    """
    family, (by_chunks, backward_by_chunks) = f"{rule}.chunk", references

    def by_torch(call) -> tuple:
        """The reference, which has nothing to save."""
        o, *states, _ = by_chunks(call)
        if call.state_indices is None:
            states = [x if x is None else x.contiguous() for x in states]
        saved = [None if needs_grad(call) or x is None else x.zero_() for x in blocks(call)]
        return o.contiguous(), *states, *saved

    def gradients_by_torch(call) -> tuple:
        return tuple([x if x is None else x.contiguous() for x in backward_by_chunks(call)])

    given = (family, f"{rule}_chunk_fwd", call, by_torch)
    more.update(outputs=outputs, fake=lambda call: (*_results(call), *blocks(call)))
    chunk = Operation(*given, differentiable=lambda call: not call.options.checkpoint_every, **more)
    in_pool = Operation(
        *given, written=("initial_state",), schema=f"{rule}_chunk_pool", **more
    )  # fmt: skip
    backward_op = Operation(
        family, f"{rule}_chunk_bwd", gradient, gradients_by_torch, outputs=8, fake=_gradients_like
    )  # fmt: skip

    def backward(ctx, do, d_final_state, *_):
        *tensors, tb, p, f = ctx.saved_tensors
        q, k, _, g, beta, A_log, dt_bias, _ = wanted = ctx.needs_input_grad[:8]
        values_only = not any((q, k, g, beta, A_log, dt_bias))
        do = torch.zeros_like(tensors[2]) if do is None else do
        d_final_state = d_final_state if ctx.options.output_final_state else None
        given = (*tensors, do, d_final_state, tb, p, f)
        grads = backward_op.in_gradient(given, (values_only, *ctx.options))
        nothing = [None for _ in ctx.needs_input_grad[8:]]
        return (*[x if want else None for x, want in zip(grads, wanted)], *nothing)

    chunk.register_gradient(_save, backward, backward_op, function)
    return chunk, in_pool, backward_op


CHUNK, CHUNK_IN_POOL, GRADIENT = chunk_operations(
    "gdn", GdnCall, GdnBackward, (gdn_chunk_fwd, gdn_chunk_bwd), "chunk_gated_delta_rule", _blocks,
    outputs=6, check=checks.chunk, cast=cast,
)  # fmt: skip
