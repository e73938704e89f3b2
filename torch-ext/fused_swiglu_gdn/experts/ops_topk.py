"""The operators of the router's choice."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ..runtime.ops import no_second_derivative, plan, run, serve
from . import reference

FAMILY = "experts.topk"


@torch.library.custom_op(add_op_namespace_prefix("topk_fwd"), mutates_args=())
def _topk_fwd(
    logits: Tensor,  # [T, E]
    bias: Optional[Tensor],  # [E]
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tuple[Tensor, Tensor]:  # weights [T, K], ids [T, K] int64
    args = (logits, bias, top_k, scoring, renormalize, scale, dtype)
    return serve(FAMILY, "topk_fwd", reference.topk_fwd, args)


@_topk_fwd.register_fake
def _(logits, bias, top_k, scoring, renormalize, scale, dtype):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op(add_op_namespace_prefix("topk_bwd"), mutates_args=())
def _topk_bwd(
    dweights: Tensor,  # [T, K]
    logits: Tensor,  # [T, E]
    ids: Tensor,  # [T, K]
    scoring: str,
    renormalize: bool,
    scale: float,
) -> Tensor:  # [T, E]
    args = (dweights, logits, ids, scoring, renormalize, scale)
    return serve(FAMILY, "topk_bwd", reference.topk_bwd, args)


@_topk_bwd.register_fake
def _(dweights, logits, ids, scoring, renormalize, scale):
    return logits.new_empty(logits.shape)


def _save(ctx, inputs, output):
    logits, _, _, *ctx.options, _ = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dweights, _):
    return (_topk_bwd(dweights, *ctx.saved_tensors, *ctx.options), *[None] * 6)


_topk_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_topk_bwd, "fused_topk")


def plan_topk(logits, bias, *options):
    """What serves all eager calls like this one, from their tensors, or None."""
    return plan(FAMILY, "topk_fwd", (logits, bias, *options))


def topk(logits, bias, *options) -> Tuple[Tensor, Tensor]:
    """(weights [T, K], ids [T, K])."""
    if bias is not None:
        bias = bias.detach()
    return run(FAMILY, "topk_fwd", _topk_fwd, reference.topk_fwd, (logits, bias, *options))
