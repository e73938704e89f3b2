"""The operators of Kimi Delta Attention where gradients are needed: forward, and its gradient."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..gdn.call import GdnGradient
from ..gdn.ops_train import empty_state
from ..runtime.ops import no_second_derivative, operator, serve
from .call import KdaCall
from .reference import backward as backward_reference
from .reference import chunk as reference


@operator("kda_chunk_train")
def kda_chunk_train(*fields: KdaCall) -> Tuple[Tensor, Tensor]:
    """o and the final state."""
    args = (KdaCall.of(fields),)
    o, state, *_ = serve("kda.chunk", "kda_chunk_fwd", reference.kda_chunk_fwd, args)
    return o, state


@kda_chunk_train.register_fake
def _(*fields):
    call = KdaCall.of(fields)
    v, state = call.v, call.v.new_empty(0)
    if call.options.output_final_state:
        state = empty_state(call, call.N, call.options.state_dtype)
    return v.new_empty(v.shape), state


@operator("kda_chunk_bwd")
def kda_chunk_bwd(
    do: Tensor,  # [B, T, HV, V]
    d_final_state: Optional[Tensor],  # [N, HV, K, V]
    *fields: KdaCall,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the call's first eight fields."""
    args = (KdaCall.of(fields), GdnGradient(do, d_final_state, None, False))
    return serve("kda.chunk", "kda_chunk_bwd", backward_reference.kda_chunk_bwd, args)


@kda_chunk_bwd.register_fake
def _(do, d_final_state, *fields):
    wanted = fields[:8]
    return tuple([do.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted])


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.options = KdaCall.of(inputs)
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, d_final_state):
    inputs = ctx.saved_tensors
    do = torch.zeros_like(inputs[2]) if do is None else do
    d_final_state = d_final_state if ctx.options.output_final_state else None
    grads = kda_chunk_bwd(do, d_final_state, *inputs, *ctx.options)
    wanted, nothing = ctx.needs_input_grad[:8], ctx.needs_input_grad[8:]
    return (*[x if want else None for x, want in zip(grads, wanted)], *[None for _ in nothing])


kda_chunk_train.register_autograd(_gradients, setup_context=_save)
no_second_derivative(kda_chunk_bwd, "chunk_kda")
