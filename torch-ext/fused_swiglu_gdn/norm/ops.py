"""RMSNorm and its gradient as operations.

Saved for the gradient: the input of the normalisation (x, or its sum with the residual) and rstd =
1 / sqrt(mean(x^2) + eps) of each row.
"""

import torch

from ..runtime.operation import Operation
from . import checks, reference
from .call import RmsNorm, RmsNormGradient

FAMILY = "norm.rms_norm"


def _results(call: RmsNorm) -> tuple:
    x, weight, residual, options = call
    y = x.new_empty(x.shape, dtype=reference.result_dtype(x, weight, options.casting_mode))
    total = None if residual is None or options.after else x.new_empty(x.shape)
    wide = torch.promote_types(x.dtype, torch.float32)
    return y, total, x.new_empty(x.shape[:-1], dtype=wide) if options.keep else None


def _gradients(call: RmsNormGradient) -> tuple:
    x, weight = call.x, call.weight
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if call.options[1] else None


RMS_NORM = Operation(
    FAMILY, "rms_norm_fwd", RmsNorm, reference, check=checks.rms_norm, outputs=3, fake=_results
)
GRADIENT = Operation(
    FAMILY, "rms_norm_bwd", RmsNormGradient, reference, outputs=2, fake=_gradients
)  # fmt: skip


def _save(ctx, inputs, output) -> None:
    x, weight, residual, _, _, offset, ctx.after, _ = inputs
    _, total, rstd = output
    ctx.added, ctx.offset = residual is not None and not ctx.after, offset
    ctx.save_for_backward(total if ctx.added else x, rstd, weight)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dtotal, _):
    """Gradients of x, weight and residual."""
    x, weight, residual = ctx.needs_input_grad[:3]
    dx, added, dweight = dtotal, dtotal, None
    if dy is not None:
        kept = ctx.saved_tensors  # read once: a checkpoint gives them out no second time
        dtotal = dtotal if ctx.added else None
        dx, dweight = GRADIENT.in_gradient((*kept, dy, dtotal), (ctx.offset, weight))
        added = dy.to(kept[0].dtype) if ctx.after else dx
    found = (dx if x else None, dweight if weight else None, added if residual else None)
    return (*found, None, None, None, None, None)


RMS_NORM.register_gradient(_save, _backward, GRADIENT, "rms_norm")
