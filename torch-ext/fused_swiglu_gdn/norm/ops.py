"""The operators of RMSNorm, and how a call reaches them.

What is kept for the gradient: what was normalised (x, or its sum with the residual) and rstd = 1 /
sqrt(mean(x^2) + eps) of each row.
"""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..runtime import dispatch
from ..runtime.ops import PLAIN, needs_grad, no_second_derivative, operator, serve
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
) -> Tuple[Tensor, Tensor, Tensor]:  # y, x + residual or None, rstd [...] or None
    args = (x, weight, residual, eps, casting_mode, offset, keep)
    return serve(FAMILY, "rms_norm_fwd", reference.rms_norm_fwd, args)


@_rms_norm_fwd.register_fake
def _(x, weight, residual, eps, casting_mode, offset, keep):
    y = x.new_empty(x.shape, dtype=reference.result_dtype(x, weight, casting_mode))
    total = x.new_empty((0,) if residual is None else x.shape)
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
) -> Tuple[Tensor, Tensor]:  # dx [..., D], dweight [D] or None
    args = (x, rstd, weight, dy, dtotal, offset, needs_weight)
    return serve(FAMILY, "rms_norm_bwd", reference.rms_norm_bwd, args)


@_rms_norm_bwd.register_fake
def _(x, rstd, weight, dy, dtotal, offset, needs_weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if needs_weight else x.new_empty(0)


def _save(ctx, inputs, output) -> None:
    x, weight, residual, _, _, ctx.offset, _ = inputs
    _, total, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x if residual is None else total, rstd, weight)
    ctx.added = residual is not None
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dtotal, _):
    needs = ctx.needs_input_grad[:3]
    if dy is None:
        dx, dweight = dtotal, None
    else:
        dtotal = dtotal if ctx.added else None
        dx, dweight = _rms_norm_bwd(*ctx.saved_tensors, dy, dtotal, ctx.offset, needs[1])
    found = [d if needed else None for d, needed in zip((dx, dweight, dx), needs)]
    return (*found, None, None, None, None)


_rms_norm_fwd.register_autograd(_backward, setup_context=_save)
no_second_derivative(_rms_norm_bwd, "rms_norm")


def _trained_by(run) -> Callable:
    """The body of rms_norm_fwd where run makes y, the sum and rstd of x, weight and residual."""
    return lambda x, weight, residual, *options: run(x, weight, residual)


def _plain(*tensors) -> bool:
    return all(t is None or type(t) in PLAIN for t in tensors)


def rms_norm(x, weight, residual, *options) -> tuple:
    """(y, x + residual, ...); options: eps, casting_mode, offset."""
    tensors = (x, weight, residual)
    grad = needs_grad(tensors)
    args = (*tensors, *options, grad)
    if torch.compiler.is_compiling():
        needed = "rms_norm_bwd" if grad else "rms_norm_fwd"
        kernels = dispatch.has_kernels(FAMILY, needed, x.device.type, x.device.index)
        return (_rms_norm_fwd if kernels else reference.rms_norm_fwd)(*args)
    launch = None
    if _plain(*tensors):
        launch = dispatch.choose(FAMILY, "rms_norm_fwd", grad, args)
    if launch is None:
        return reference.rms_norm_fwd(*args)
    if grad:
        return _rms_norm_fwd.run(launch, *args)
    return launch(*args)


def plan_rms_norm(x, weight, residual, *options):
    """What serves all eager calls of rms_norm like this one, from their tensors, or None."""
    grad = needs_grad((x, weight, residual))
    run = None
    if _plain(x, weight, residual):
        run = dispatch.plan(FAMILY, "rms_norm_fwd", (x, weight, residual, *options, grad), grad)
    if run is None or not grad:
        return run
    body = _trained_by(run)
    return lambda *tensors: _rms_norm_fwd.run(body, *tensors, *options, True)
