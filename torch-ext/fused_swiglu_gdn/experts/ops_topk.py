"""Top-k routing as an operation."""

import torch

from ..runtime.operation import Operation
from . import checks, reference
from .call import Topk, TopkGradient

FAMILY = "experts.topk"


def _results(call: Topk) -> tuple:
    logits, options = call.logits, call.options
    weights = logits.new_empty((logits.shape[0], options.top_k), dtype=options.dtype)
    return weights, weights.new_empty(weights.shape, dtype=torch.int64)


def _by_torch(call: Topk) -> tuple:
    return tuple([x.contiguous() for x in reference.topk_fwd(*call)])


TOPK = Operation(
    FAMILY, "topk_fwd", Topk, _by_torch, check=checks.fused_topk,
    outputs=2, fake=_results,
)  # fmt: skip
GRADIENT = Operation(
    FAMILY, "topk_bwd", TopkGradient, lambda call: reference.topk_bwd(*call), like=("logits",)
)


def _save(ctx, inputs, output):
    logits, _, *ctx.options = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dweights, _):
    dlogits = None
    if dweights is not None:
        dlogits = GRADIENT.in_gradient((dweights, *ctx.saved_tensors), ctx.options)
    return (dlogits, None, *[None for _ in ctx.options])


TOPK.register_gradient(_save, _backward, GRADIENT, "fused_topk")
