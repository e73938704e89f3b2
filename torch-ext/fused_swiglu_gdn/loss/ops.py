"""Cross entropy and its gradient as operations. Saved are the logits and, of each row, what its
softmax is made of again."""

from ..runtime.operation import Operation
from . import reference
from .call import CrossEntropy, CrossEntropyGradient

FAMILY = "loss.cross_entropy"


def _results(call: CrossEntropy) -> tuple:
    logits, target, _ = call
    wide = reference.at_least_fp32(logits).dtype
    new = logits.new_empty
    return new((), dtype=wide), new((2, target.shape[0]), dtype=wide), new((), dtype=wide)


CROSS_ENTROPY = Operation(
    FAMILY, "cross_entropy_fwd", CrossEntropy, reference, outputs=3, fake=_results
)  # fmt: skip
GRADIENT = Operation(
    FAMILY, "cross_entropy_bwd", CrossEntropyGradient, reference, like=("logits",)
)  # fmt: skip


def _save(ctx, inputs, output) -> None:
    logits, target, *ctx.options = inputs
    _, parts, count = output
    ctx.save_for_backward(logits, target, parts, count)
    ctx.mark_non_differentiable(parts, count)
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, *_):
    if dloss is None:
        return None, None, None, None
    dlogits = GRADIENT.in_gradient((*ctx.saved_tensors, dloss), tuple(ctx.options))
    return dlogits, None, None, None


CROSS_ENTROPY.register_gradient(_save, _backward, GRADIENT, "the loss of a kernelized model")
