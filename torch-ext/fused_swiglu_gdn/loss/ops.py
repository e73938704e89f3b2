"""Losses over a vocabulary and their gradients as operations."""

from ..runtime.operation import Operation
from . import call as calls
from . import checks, reference

FAMILY = "loss.cross_entropy"
LINEAR = "loss.linear"


def _wide(x):
    return reference.at_least_fp32(x).dtype


def _cross_entropy(call: calls.CrossEntropy) -> tuple:
    logits, target, _ = call
    wide, new = _wide(logits), logits.new_empty
    return new((), dtype=wide), new((3, target.shape[0]), dtype=wide), new((), dtype=wide)


def _linear_loss(call: calls.LinearLoss) -> tuple:
    hidden, weight, bias, _, o = call
    wide, new = _wide(hidden), hidden.new_empty
    kept = reference.kept_by_loss(hidden, weight, bias, o.smoothing, o.z_loss, *o[6:])
    kept = [x if x is None else new(x[0], dtype=x[1]) for x in kept]
    return (new((), dtype=wide), new((), dtype=wide), *kept)


def _tokens(call: calls.TokenLogProbs) -> tuple:
    hidden, target, o = call.hidden, call.target, call.options
    wide, M = _wide(hidden), target.shape[0]
    count = 4 if o.more else 2
    found = [hidden.new_empty(M, dtype=wide) for _ in range(count)] + [None] * (4 - count)
    return (*found, hidden.new_empty((5 if o.more else 3, M), dtype=wide))


def _gradients(call) -> tuple:
    o, tensors = call.options, call[:3]
    needs = (o.of_hidden, o.of_weight, o.of_bias)
    return tuple([x.new_empty(x.shape) if n else None for x, n in zip(tensors, needs)])


CROSS_ENTROPY = Operation(
    FAMILY, "cross_entropy_fwd", calls.CrossEntropy, reference, outputs=3, fake=_cross_entropy
)  # fmt: skip
GRADIENT = Operation(
    FAMILY, "cross_entropy_bwd", calls.CrossEntropyGradient, reference, like=("logits",)
)  # fmt: skip
LINEAR_LOSS = Operation(
    LINEAR, "linear_loss_fwd", calls.LinearLoss, reference, check=checks.linear_loss, outputs=6,
    fake=_linear_loss,
)  # fmt: skip
LINEAR_LOSS_GRADIENT = Operation(
    LINEAR, "linear_loss_bwd", calls.LinearLossGradient, reference, outputs=3, fake=_gradients
)  # fmt: skip
TOKENS = Operation(
    LINEAR, "token_log_probs_fwd", calls.TokenLogProbs, reference, check=checks.token_log_probs,
    outputs=5, fake=_tokens,
)  # fmt: skip
TOKENS_GRADIENT = Operation(
    LINEAR, "token_log_probs_bwd", calls.TokenLogProbsGradient, reference, outputs=3,
    fake=_gradients,
)  # fmt: skip


def _save(ctx, inputs, output) -> None:
    logits, target, *ctx.options = inputs
    _, stats, count = output
    ctx.save_for_backward(logits, target, stats, count)
    ctx.mark_non_differentiable(stats, count)
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, *_):
    if dloss is None:
        return None, None, None, None
    dlogits = GRADIENT.in_gradient((*ctx.saved_tensors, dloss), tuple(ctx.options))
    return dlogits, None, None, None


CROSS_ENTROPY.register_gradient(_save, _backward, GRADIENT, "the loss of a kernelized model")


def _save_linear(ctx, inputs, output) -> None:
    hidden, weight, bias, target, *ctx.options = inputs
    _, count, stats, kept, dweight, dbias = output
    ctx.mark_non_differentiable(*[x for x in output[1:] if x is not None])
    ctx.set_materialize_grads(False)
    # logits that the first backward overwrites are none of the saved tensors, which must not change
    ctx.kept, ctx.way = kept, ctx.options[7]
    if ctx.way == "kept":
        kept = None
    ctx.save_for_backward(hidden, weight, bias, target, stats, count, kept, dweight, dbias)


def _backward_linear(ctx, dloss, *_):
    if dloss is None:
        return (None,) * (4 + len(ctx.options))
    *saved, kept, dweight, dbias = ctx.saved_tensors
    if ctx.way == "kept":
        kept, ctx.kept = ctx.kept, None  # a second backward makes them again
    tensors = (*saved, kept, dweight, dbias, dloss)
    found = LINEAR_LOSS_GRADIENT.in_gradient(tensors, tuple(ctx.options))
    return (*_where(found, ctx.options), None, *(None,) * len(ctx.options))


def _save_tokens(ctx, inputs, output) -> None:
    hidden, weight, bias, target, *ctx.options = inputs
    stats = output[-1]
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, target, stats)


def _backward_tokens(ctx, *given):
    given = given[:4]
    if all([d is None for d in given]):
        return (None,) * (4 + len(ctx.options))
    found = TOKENS_GRADIENT.in_gradient((*ctx.saved_tensors, *given), tuple(ctx.options))
    return (*_where(found, ctx.options), None, *(None,) * len(ctx.options))


def _where(found: tuple, options) -> list:
    """Gradients that are needed: an operator returns an empty tensor in place of another one."""
    return [x if needed else None for x, needed in zip(found, options[-3:])]


LINEAR_LOSS.register_gradient(
    _save_linear, _backward_linear, LINEAR_LOSS_GRADIENT, "linear_cross_entropy"
)
TOKENS.register_gradient(_save_tokens, _backward_tokens, TOKENS_GRADIENT, "token_log_probs")
