"""RMSNorm, with the residual added before or after it: the call's checks, the operation with its
gradient, and the public function.

Saved for the gradient: the input of the normalisation (x, or its sum with the residual) and rstd =
1 / sqrt(mean(x^2) + eps) of each row.
"""

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ..runtime import checks
from ..runtime.operation import Operation
from ..runtime.ops import needs_grad
from . import reference
from .call import CASTING_MODES, RmsNorm, RmsNormGradient, RmsNormOptions

FAMILY = "norm.rms_norm"


def _checked(call: RmsNorm) -> RmsNorm:
    x, weight, residual, (eps, casting_mode, offset, after) = call
    checks.has_last("x", x, "D")
    checks.is_floating("x", x)
    if weight is not None:
        checks.has_form("weight", weight, "D", {"D": x.shape[-1]}, "x", x)
    if residual is not None:
        checks.has_shape_of("residual", residual, "x", x)
        checks.agrees("residual", residual, "x", x)
    checks.is_number("eps", eps, "non-negative")
    checks.is_one_of("casting_mode", casting_mode, CASTING_MODES)
    checks.is_number("offset", offset, "non-negative")
    if offset and casting_mode == "llama":
        raise ValueError(f'offset must be 0 with casting_mode "llama", got {offset}')
    checks.are_flags(after=after)
    if after and residual is None:
        raise ValueError("residual must be given with after=True, got None")
    options = RmsNormOptions(float(eps), casting_mode, float(offset), bool(after), needs_grad(call))
    return RmsNorm(x, weight, residual, options)


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
    FAMILY, "rms_norm_fwd", RmsNorm, reference, check=_checked, outputs=3, fake=_results
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


def rms_norm(
    x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6,
    *, casting_mode: str = "llama", offset: float = 0.0, residual: Optional[Tensor] = None,
    after: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:  # fmt: skip
    """weight * x / sqrt(mean(x ** 2) + eps): RMSNorm (arXiv:1910.07467) over the last dimension.

    The computation is in fp32, rounded where transformers' models round:

    - "llama" (Llama, Mistral, Qwen2, Qwen3): n = (x / sqrt(..)).to(x.dtype); y = weight * n.
    - "gemma" (Gemma and Qwen3.5 with offset=1.0, OLMo with offset=0.0):
      y = (x / sqrt(..) * (offset + weight)).to(x.dtype), the weight in fp32.

    Autocast does not change the result. Differentiable in x, weight and residual; the gradient
    saves x (or the sum) and one number a row.

    Args:
        x: [..., D]; fp32, bf16 or fp16; any strides (rows of a wider tensor need no copy).
        weight: [D] or None, of any of these dtypes.
        eps: added to the mean square.
        casting_mode: "llama" or "gemma".
        offset: added to the weight, at least 0; with "gemma" alone.
        residual: [..., D] as x, added to x first; the sum is rounded to their dtype.
        after: the residual is added to y instead, which is rounded first: OLMo-2's layers.

    Returns:
        y [..., D] in the dtype of x; with "llama" in what torch makes of weight * x, so fp32 of
        an fp32 weight. With a residual (y, x + residual), or y + residual with after=True.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> x, residual = torch.randn(2, 3, 5, 16).unbind(0)
        >>> y, residual = rms_norm(x, torch.ones(16), residual=residual)
        >>> y.shape, residual.shape
        (torch.Size([3, 5, 16]), torch.Size([3, 5, 16]))
    """
    tensors = (x, weight, residual)
    y, total, _ = RMS_NORM(tensors, (eps, casting_mode, offset, after))
    return y if residual is None or after else (y, total)
