"""Projections of one x with low-rank adapters, and their gradients.

Layers call them in eager mode, so there is no operator of torch.
"""

from typing import Callable, List, Optional, Sequence

import torch
from torch import Tensor

from ..runtime import dispatch
from ..runtime.operation import Operation
from ..runtime.ops import applying, differentiating_once, transformed
from . import reference
from .call import MOST, Lora, LoraGradient, LoraOptions

FAMILY = "lora.lora"
GRADIENT = Operation(FAMILY, "lora_bwd", LoraGradient, reference, schema=None)
_ABSENT = (None,) * MOST


class _Projections(torch.autograd.Function):
    """(launch, options, x, weights, biases, a, b, seed) -> y of each. Weights, biases, a and b are
    MOST each; with options.given, products are in the places of weights."""

    @staticmethod
    def forward(ctx, launch: Callable, options: LoraOptions, x: Tensor, *given):
        h, *ys = launch(x, *given)
        *given, seed = given
        ctx.options = options
        weights = _ABSENT if options.given else given[:MOST]
        ctx.save_for_backward(x, h, seed, *weights, *given[2 * MOST :])
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @differentiating_once("a projection with adapters")
    def backward(ctx, *dys):
        needs, count = ctx.needs_input_grad[2:-1], len(ctx.options.scales)
        x, h, seed, *given = ctx.saved_tensors
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        dys = [
            x.new_zeros((x.shape[0], len(b))) if dy is None else dy.reshape(-1, len(b))
            for dy, b in zip(dys, given[2 * MOST :])
        ]
        absent = _ABSENT[count:]
        rows = [dy if dy.stride(1) == 1 else dy.contiguous() for dy in dys]
        of_a, of_b = any(needs[1 + 2 * MOST : 1 + 3 * MOST]), any(needs[1 + 3 * MOST :])
        tensors = (x, h, seed, *given, *rows, *absent)
        run = GRADIENT.launcher((*tensors, *ctx.options, needs[0], of_a, of_b))
        dx, *found = run(*tensors)
        das, dbs = (*found[:count], *absent), (*found[count:], *absent)
        of_products = (*dys, *absent) if ctx.options.given else _ABSENT
        dx = dx if dx is None else dx.view(shape)
        return (None, None, dx, *of_products, *_ABSENT, *das, *dbs, None)


class _Adapted(Operation):
    """The projections by kernels with a gradient, for layers, which have another way."""

    def _by_kernels(self, call) -> Optional[Callable]:
        there = [t for t in call.tensors if t is not None]
        if (
            transformed()
            or torch._C._len_torch_dispatch_stack()
            or any([t.is_neg() for t in there])
        ):
            return None
        launch, options = self._prepared(call, (FAMILY, "lora_bwd")), call.options
        if launch is None:
            return None
        apply = applying(_Projections, there)
        return lambda *tensors: apply(launch, options, *tensors)


def _complete(call: Lora) -> Lora:
    return Lora(*call[:-1], LoraOptions(*call.options))


LORA = _Adapted(FAMILY, "lora_fwd", Lora, reference, check=_complete, schema=None)


def adapted(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]],
    down: Sequence[Tensor], up: Sequence[Tensor], scales: tuple, drops: tuple, given: bool = False,
) -> Optional[List[Tensor]]:  # fmt: skip
    """x w^T + bias + scale (dropout(x) a^T) b^T, [.., N], of each of up to MOST projections with a
    frozen weight, or None where no kernel serves. x is [.., K], of M rows. drops: of each dropout,
    its probability. given: `weights` are not weights, but the products with them, [M, N]."""
    absent, seed = _ABSENT[len(weights) :], None
    if any(drops):
        seed = torch.randint(2**62, (1,), device=x.device)
    tensors = (x, *weights, *absent, *biases, *absent, *down, *absent, *up, *absent, seed)
    run = LORA.serving(tensors, (scales, drops, given))
    if run is not None:
        return run(*tensors)
    if dispatch.forced == "reference":
        return list(reference.lora_fwd(*tensors, scales, drops, given)[1:])
    return None
