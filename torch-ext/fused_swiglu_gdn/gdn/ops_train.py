"""Operators of the gated delta rule with gradients: the forward, and its gradient.

They are separate from the forward operator of ops.py because that one may write a pool in place,
and an operator with an autograd formula may not.
"""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..runtime.ops import no_second_derivative, operator, serve
from .call import GdnCall, GdnGradient
from .chunks import CHUNK
from .reference import backward as backward_reference
from .reference import chunk as reference

NONE = (None, None, None)  # in place of Tb, P and F
TENSORS = len(GdnCall._fields) - 1


def empty_state(call, rows: int, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Uninitialised states, [rows, HV, K, V] or [rows, HV, V, K]."""
    return call.q.new_empty(rows, *call.state_shape, dtype=dtype or torch.float32)


@operator("gdn_chunk_train")
def gdn_chunk_train(*fields: GdnCall) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, and the prepared Tb, P [rows, HV, C, C], F [rows, HV, 4, C] to save."""
    call = GdnCall.of(fields)
    o, state, _, blocks = serve("gdn.chunk", "gdn_chunk_fwd", reference.gdn_chunk_fwd, (call,))
    if blocks is None and call.options.save_blocks:  # the reference has nothing to save
        blocks = [x.zero_() for x in _blocks(call)]
    return (o, state, *(blocks or NONE))


def _blocks(call: GdnCall) -> tuple:
    """Uninitialised Tb, P and F."""
    rows, HV = call.rows, call.HV
    tb, p = (call.q.new_empty(rows, HV, CHUNK, CHUNK) for _ in range(2))
    return tb, p, call.q.new_empty(rows, HV, 4, CHUNK, dtype=torch.float32)


def trained_by(launch: Callable) -> Callable:
    """Returns the body of gdn_chunk_train that uses this launcher of gdn_chunk_fwd."""

    def body(*fields):
        o, state, _, blocks = launch(*fields[:TENSORS])
        return (o, state, *(blocks or NONE))

    return body


@gdn_chunk_train.register_fake
def _(*fields):
    call = GdnCall.of(fields)
    v, options, state = call.v, call.options, call.v.new_empty(0)
    if options.output_final_state:
        state = empty_state(call, call.N, options.state_dtype)
    blocks = _blocks(call) if options.save_blocks else [v.new_empty(0) for _ in NONE]
    return (v.new_empty(v.shape), state, *blocks)


@operator("gdn_chunk_bwd")
def gdn_chunk_bwd(
    do: Tensor,  # [B, T, HV, V]
    d_final_state: Optional[Tensor],  # [N, HV, K, V]
    tb: Optional[Tensor],  # [rows, HV, C, C]
    p: Optional[Tensor],  # [rows, HV, C, C]
    f: Optional[Tensor],  # [rows, HV, 4, C] fp32
    values_only: bool,
    *fields: GdnCall,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the call's first eight fields; with values_only of v and initial_state alone."""
    prepared = None if tb is None else (tb, p, f)
    gradient = GdnGradient(do, d_final_state, prepared, values_only)
    args = (GdnCall.of(fields), gradient)
    return serve("gdn.chunk", "gdn_chunk_bwd", backward_reference.gdn_chunk_bwd, args)


@gdn_chunk_bwd.register_fake
def _(do, d_final_state, tb, p, f, values_only, *fields):
    q, k, v, g, beta, A_log, dt_bias, initial_state, *_ = fields
    if values_only:
        q = k = g = beta = A_log = dt_bias = None
    wanted = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return tuple([do.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted])


def _save(ctx, inputs, output) -> None:
    _, _, *blocks = output
    *tensors, ctx.options = GdnCall.of(inputs)
    ctx.save_for_backward(*tensors, *(blocks if ctx.options.save_blocks else NONE))
    ctx.mark_non_differentiable(*[x for x in blocks if x is not None])
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, d_final_state, *_):
    *inputs, tb, p, f = ctx.saved_tensors
    q, k, v, g, beta, A_log, dt_bias, initial_state, *nothing = ctx.needs_input_grad
    wanted = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    values_only = not any((q, k, g, beta, A_log, dt_bias))
    do = torch.zeros_like(inputs[2]) if do is None else do
    d_final_state = d_final_state if ctx.options.output_final_state else None
    grads = gdn_chunk_bwd(do, d_final_state, tb, p, f, values_only, *inputs, *ctx.options)
    return (*[x if want else None for x, want in zip(grads, wanted)], *[None for _ in nothing])


gdn_chunk_train.register_autograd(_gradients, setup_context=_save)
no_second_derivative(gdn_chunk_bwd, "chunk_gated_delta_rule")
