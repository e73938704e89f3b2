"""The operators of top-k routing."""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..runtime.ops import needs_grad, no_second_derivative, operator, plan, run, serve
from . import reference
from .call import TopkOptions

FAMILY = "experts.topk"


@operator("topk_fwd")
def _topk_fwd(
    logits: Tensor,  # [T, E]
    bias: Optional[Tensor],  # [E]
    *options: TopkOptions,
) -> Tuple[Tensor, Tensor]:  # weights [T, K], ids [T, K] int64
    return serve(FAMILY, "topk_fwd", reference.topk_fwd, (logits, bias, TopkOptions(*options)))


@_topk_fwd.register_fake
def _(logits, bias, *options):
    options = TopkOptions(*options)
    weights = logits.new_empty((logits.shape[0], options.top_k), dtype=options.dtype)
    return weights, weights.new_empty(weights.shape, dtype=torch.int64)


@operator("topk_bwd", like=("logits",))
def _topk_bwd(
    dweights: Tensor,  # [T, K]
    logits: Tensor,  # [T, E]
    ids: Tensor,  # [T, K]
    *options: TopkOptions,
) -> Tensor:  # [T, E]
    args = (dweights, logits, ids, TopkOptions(*options))
    return serve(FAMILY, "topk_bwd", reference.topk_bwd, args)


def _save(ctx, inputs, output):
    logits, _, *ctx.options = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dweights, _):
    dlogits = None
    if dweights is not None:
        dlogits = _topk_bwd(dweights, *ctx.saved_tensors, *ctx.options)
    return (dlogits, None, *[None for _ in ctx.options])


_topk_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_topk_bwd, "fused_topk")


def plan_topk(logits, bias, options) -> Optional[Callable]:
    """Returns a function of the tensors for all eager calls that match this one, or None."""
    launch = plan(FAMILY, "topk_fwd", (logits, bias, options), differentiable=True)
    if launch is None or not needs_grad((logits, bias)):
        return launch

    def body(logits, bias, *_):
        return launch(logits, bias)

    return lambda *tensors: _topk_fwd.run(body, *tensors, *options)


def topk(logits, bias, options) -> Tuple[Tensor, Tensor]:
    """Returns (weights [T, K], ids [T, K])."""
    if bias is not None:
        bias = bias.detach()

    def op(logits, bias, options):
        return _topk_fwd(logits, bias, *options)

    return run(FAMILY, "topk_fwd", op, reference.topk_fwd, (logits, bias, options))
