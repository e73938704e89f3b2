"""Operators of RMSNorm, and their dispatch.

Saved for the gradient: the input of the normalisation (x, or its sum with the residual) and rstd =
1 / sqrt(mean(x^2) + eps) of each row.
"""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..runtime.ops import needs_grad, no_second_derivative, operator, plan, run, serve
from . import reference

FAMILY = "norm.rms_norm"


@operator("rms_norm_fwd")
def _rms_norm_fwd(
    x: Tensor,  # [..., D]
    weight: Optional[Tensor],  # [D]
    residual: Optional[Tensor],  # [..., D]
    eps: float,
    casting_mode: str,
    offset: float,
    keep: bool,
    after: bool = False,
) -> Tuple[Tensor, Tensor, Tensor]:  # y, x + residual or empty, rstd [...] or empty
    args = (x, weight, residual, eps, casting_mode, offset, keep, after)
    return serve(FAMILY, "rms_norm_fwd", reference.rms_norm_fwd, args)


@_rms_norm_fwd.register_fake
def _(x, weight, residual, eps, casting_mode, offset, keep, after=False):
    y = x.new_empty(x.shape, dtype=reference.result_dtype(x, weight, casting_mode))
    total = x.new_empty((0,) if residual is None or after else x.shape)
    wide = torch.promote_types(x.dtype, torch.float32)
    return y, total, x.new_empty(x.shape[:-1], dtype=wide) if keep else x.new_empty(0)


@operator("rms_norm_bwd")
def _rms_norm_bwd(
    x: Tensor,  # [..., D]: what was normalised
    rstd: Tensor,  # [...]
    weight: Optional[Tensor],  # [D]
    dy: Tensor,  # [..., D]
    dtotal: Optional[Tensor],  # [..., D]
    offset: float,
    needs_weight: bool,
) -> Tuple[Tensor, Tensor]:  # dx [..., D], dweight [D] or empty
    args = (x, rstd, weight, dy, dtotal, offset, needs_weight)
    return serve(FAMILY, "rms_norm_bwd", reference.rms_norm_bwd, args)


@_rms_norm_bwd.register_fake
def _(x, rstd, weight, dy, dtotal, offset, needs_weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if needs_weight else x.new_empty(0)


def _save(ctx, inputs, output) -> None:
    x, weight, residual, _, _, offset, _, ctx.after = inputs
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
        dx, dweight = _rms_norm_bwd(*kept, dy, dtotal, ctx.offset, weight)
        added = dy.to(kept[0].dtype) if ctx.after else dx
    found = (dx if x else None, dweight if weight else None, added if residual else None)
    return (*found, None, None, None, None, None)


_rms_norm_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_rms_norm_bwd, "rms_norm")


def rms_norm(*args) -> tuple:
    """(y, x + residual, ..) of x, weight, residual, eps, casting_mode, offset and after."""
    args = (*args[:6], needs_grad(args), args[6])
    return run(FAMILY, "rms_norm_fwd", _rms_norm_fwd, reference.rms_norm_fwd, args)


def plan_rms_norm(*args) -> Optional[Callable]:
    """Returns a function of the tensors for all eager calls that match this one, or None."""
    grad = needs_grad(args)
    options = (*args[3:6], grad, args[6])
    launch = plan(FAMILY, "rms_norm_fwd", (*args[:3], *options), differentiable=True)
    if launch is None or not grad:
        return launch

    def body(x, weight, residual, *_):
        return launch(x, weight, residual)

    return lambda *tensors: _rms_norm_fwd.run(body, *tensors, *options)
