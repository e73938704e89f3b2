"""The operators of the gated delta rule where gradients are needed: forward, and its gradient.

They stand beside the forward operator of ops.py because that one may write a pool in place, and an
operator with an autograd formula may not.
"""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..runtime.ops import no_second_derivative, operator, serve
from .call import GdnCall, GdnGradient, GdnOptions
from .chunks import CHUNK
from .reference import backward as backward_reference
from .reference import chunk as reference

NONE = (None, None, None)  # in place of Tb, P and F


def empty_state(call, rows: int, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Room for states, [rows, HV, K, V] or [rows, HV, V, K]."""
    return call.q.new_empty(rows, *call.state_shape, dtype=dtype or torch.float32)


@operator("gdn_chunk_train")
def gdn_chunk_train(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV]
    beta: Tensor,  # [B, T, HV]
    A_log: Optional[Tensor],  # [HV]
    dt_bias: Optional[Tensor],  # [HV]
    initial_state: Optional[Tensor],  # [N, HV, K, V]
    cu_seqlens: Optional[Tensor],  # [N + 1]
    *options: GdnOptions,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, and the prepared Tb, P [rows, HV, C, C], F [rows, HV, 4, C] to save."""
    call = GdnCall(
        q, k, v, g, beta, A_log, dt_bias, initial_state, None, cu_seqlens, GdnOptions(*options)
    )
    o, state, _, blocks = serve("gdn.chunk", "gdn_chunk_fwd", reference.gdn_chunk_fwd, (call,))
    if blocks is None and call.options.save_blocks:  # the reference has nothing to save
        blocks = [x.zero_() for x in _blocks(call)]
    return (o, state, *(blocks or NONE))


def _blocks(call: GdnCall) -> tuple:
    """Room for Tb, P and F."""
    rows, HV = call.rows, call.HV
    tb, p = (call.q.new_empty(rows, HV, CHUNK, CHUNK) for _ in range(2))
    return tb, p, call.q.new_empty(rows, HV, 4, CHUNK, dtype=torch.float32)


def trained_by(launch: Callable) -> Callable:
    """The body of the operator above where this launcher of gdn_chunk_fwd serves."""

    def body(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options):
        tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, None, cu_seqlens)
        o, state, _, blocks = launch(*tensors)
        return (o, state, *(blocks or NONE))

    return body


@gdn_chunk_train.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options):
    options = GdnOptions(*options)
    call = GdnCall(q, k, v, g, beta, A_log, dt_bias, initial_state, None, cu_seqlens, options)
    state = v.new_empty(0)
    if options.output_final_state:
        state = empty_state(call, call.N, options.state_dtype)
    blocks = _blocks(call) if options.save_blocks else [v.new_empty(0) for _ in NONE]
    return (v.new_empty(v.shape), state, *blocks)


@operator("gdn_chunk_bwd")
def gdn_chunk_bwd(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV]
    beta: Tensor,  # [B, T, HV]
    A_log: Optional[Tensor],  # [HV]
    dt_bias: Optional[Tensor],  # [HV]
    initial_state: Optional[Tensor],  # [N, HV, K, V]
    cu_seqlens: Optional[Tensor],  # [N + 1]
    do: Tensor,  # [B, T, HV, V]
    d_final_state: Optional[Tensor],  # [N, HV, K, V]
    tb: Optional[Tensor],  # [rows, HV, C, C]
    p: Optional[Tensor],  # [rows, HV, C, C]
    f: Optional[Tensor],  # [rows, HV, 4, C] fp32
    values_only: bool,
    *options: GdnOptions,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight arguments; with values_only of v and initial_state alone."""
    call = GdnCall(
        q, k, v, g, beta, A_log, dt_bias, initial_state, None, cu_seqlens, GdnOptions(*options)
    )
    prepared = None if tb is None else (tb, p, f)
    gradient = GdnGradient(do, d_final_state, prepared, values_only)
    args = (call, gradient)
    return serve("gdn.chunk", "gdn_chunk_bwd", backward_reference.gdn_chunk_bwd, args)


@gdn_chunk_bwd.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, do, d_final_state, tb, p, f,
    values_only, *options,
):  # fmt: skip
    def like(x, wanted=True):
        return v.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)

    rest = not values_only
    return (
        like(q, rest), like(k, rest), like(v), like(g, rest), like(beta, rest), like(A_log, rest),
        like(dt_bias, rest), like(initial_state),
    )  # fmt: skip


def _save(ctx, inputs, output) -> None:
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options = inputs
    _, _, *blocks = output
    ctx.options = GdnOptions(*options)
    saved = blocks if ctx.options.save_blocks else NONE
    ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *saved)
    ctx.mark_non_differentiable(*[x for x in blocks if x is not None])
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, d_final_state, *_):
    *inputs, tb, p, f = ctx.saved_tensors
    q, k, v, g, beta, A_log, dt_bias, initial_state, *nothing = ctx.needs_input_grad
    wanted = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    values_only = not any((q, k, g, beta, A_log, dt_bias))
    do = torch.zeros_like(inputs[2]) if do is None else do
    d_final_state = d_final_state if ctx.options.output_final_state else None
    grads = gdn_chunk_bwd(*inputs, do, d_final_state, tb, p, f, values_only, *ctx.options)
    return (*[x if want else None for x, want in zip(grads, wanted)], *[None for _ in nothing])


gdn_chunk_train.register_autograd(_gradients, setup_context=_save)
no_second_derivative(gdn_chunk_bwd, "chunk_gated_delta_rule")
