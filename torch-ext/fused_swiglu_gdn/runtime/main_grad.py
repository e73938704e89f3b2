"""Gradients that are accumulated into a weight's `main_grad` in fp32, as Megatron-LM does."""

from typing import Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .ops import autocast


def stand_in(weight: Tensor) -> Optional[Tensor]:
    """The placeholder gradient that Megatron's hooks expect for a gradient already in main_grad."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


class _IntoMainGrad(torch.autograd.Function):
    """The identity of a weight, whose backward adds the gradient to main_grad."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ctx.weight.main_grad.add_(gradient)
        return stand_in(ctx.weight)


def into_main_grad(weight: Tensor) -> Tensor:
    """Returns the weight for a function that torch differentiates.

    If the weight has a main_grad, its gradient is added to that.
    """
    wanted = torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")
    return _IntoMainGrad.apply(weight) if wanted else weight


def autocast_weights(*weights: Tensor) -> list:
    """The weights in autocast's dtype. Gradients of those that are cast reach main_grad, which the
    others still have as an attribute."""
    through = [into_main_grad(w) if isinstance(w, Tensor) else w for w in weights]
    cast = zip(weights, through, autocast(*through))
    return [own if found is before else found for own, before, found in cast]
