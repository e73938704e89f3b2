"""The operators of the gated delta rule where gradients are needed: forward, and its gradient.

They stand beside the forward operator of gdn.py because that one may write a pool in place, and an
operator with an autograd formula may not.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ..runtime import dispatch
from ..runtime.ops import no_second_derivative, present, serve
from .chunks import CHUNK, chunk_rows
from .reference import backward as backward_reference
from .reference import chunk as reference


@torch.library.custom_op(add_op_namespace_prefix("gdn_chunk_train"), mutates_args=())
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
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    state_dtype: Optional[torch.dtype],
    recompute: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, and the prepared Tb, P [rows, HV, C, C], F [rows, HV, 4, C] to save."""
    before = (q, k, v, g, beta, A_log, dt_bias, initial_state, None, cu_seqlens, scale)
    flags = (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval)
    args = (*before, *flags, state_v_first, output_final_state, state_dtype, 0)
    launch = dispatch.choose("gdn.chunk", "gdn_chunk_fwd", False, args)
    if launch is None:
        o, state, _ = reference.gdn_chunk_fwd(*args)
        o = o.contiguous()
        blocks = [x.zero_() for x in _blocks(q, v, cu_seqlens, recompute)]  # nothing to save
        state = None if state is None else state.contiguous()
    elif recompute:
        o, state, _ = launch(*args)
        blocks = _blocks(q, v, cu_seqlens, recompute)
    else:
        inputs = (q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, *flags)
        blocks = dispatch.choose("gdn.chunk", "gdn_prepare", False, inputs)(*inputs)
        o, state, _ = launch(*args, prepared=blocks)
    return o, present(state, v), *blocks[:3]


def _blocks(q, v, cu_seqlens, recompute):
    """Room for Tb, P and F; none where the gradient makes them again."""
    B, T, HV = v.shape[:3]
    rows = 0 if recompute else chunk_rows(T, B, cu_seqlens)
    tb, p = q.new_empty(rows, HV, CHUNK, CHUNK), q.new_empty(rows, HV, CHUNK, CHUNK)
    return tb, p, q.new_empty(rows, HV, 4, CHUNK, dtype=torch.float32)


@gdn_chunk_train.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, use_qk_l2norm,
    use_beta_sigmoid, allow_neg_eigval, state_v_first, output_final_state, state_dtype, recompute,
):  # fmt: skip
    state = v.new_empty(0)
    if output_final_state:
        K, HV, V = q.shape[3], v.shape[2], v.shape[3]
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dims = (V, K) if state_v_first else (K, V)
        state = q.new_empty(N, HV, *dims, dtype=state_dtype or torch.float32)
    return v.new_empty(v.shape), state, *_blocks(q, v, cu_seqlens, recompute)


@torch.library.custom_op(add_op_namespace_prefix("gdn_chunk_bwd"), mutates_args=())
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
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    values_only: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight arguments; with values_only of v and initial_state alone."""
    prepared = (tb, p, f)
    if tb is None:
        inputs = (q, k, g, beta, A_log, dt_bias, cu_seqlens, scale)
        inputs += (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval)
        launch = dispatch.choose("gdn.chunk", "gdn_prepare", False, inputs)
        prepared = None if launch is None else launch(*inputs)
    args = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, do, d_final_state, prepared,
        scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first, values_only,
    )  # fmt: skip
    grads = serve("gdn.chunk", "gdn_chunk_bwd", backward_reference.gdn_chunk_bwd, args)
    return tuple(present(x, v) for x in grads)


@gdn_chunk_bwd.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, do, d_final_state, tb, p, f, scale,
    use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first, values_only,
):  # fmt: skip
    def like(x, wanted=True):
        return v.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)

    rest = not values_only
    return (
        like(q, rest), like(k, rest), like(v), like(g, rest), like(beta, rest), like(A_log, rest),
        like(dt_bias, rest), like(initial_state),
    )  # fmt: skip


def _save(ctx, inputs, output) -> None:
    *tensors, cu_seqlens = inputs[:9]
    recompute = inputs[16]
    prepared = (None, None, None) if recompute else output[2:]
    ctx.save_for_backward(*tensors, cu_seqlens, *prepared)
    ctx.options = inputs[9:14]  # scale, use_qk_l2norm, use_beta_sigmoid, .., state_v_first
    ctx.has_state = inputs[14]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, d_final_state, *_):
    *inputs, tb, p, f = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:8])
    values_only = not any(wanted[i] for i in (0, 1, 3, 4, 5, 6))
    v = inputs[2]
    do = torch.zeros_like(v) if do is None else do
    d_final_state = d_final_state if ctx.has_state else None
    grads = gdn_chunk_bwd(*inputs, do, d_final_state, tb, p, f, *ctx.options, values_only)
    return (*(x if want else None for x, want in zip(grads, wanted)), *[None] * 9)


gdn_chunk_train.register_autograd(_gradients, setup_context=_save)
no_second_derivative(gdn_chunk_bwd, "chunk_gated_delta_rule")
