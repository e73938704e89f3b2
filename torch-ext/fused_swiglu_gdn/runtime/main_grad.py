"""Gradients that are added to a weight's `main_grad`, in fp32, as Megatron-LM has it."""

from typing import Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def stand_in(weight: Tensor) -> Optional[Tensor]:
    """What Megatron's hooks want for a gradient that is in main_grad already."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


class _IntoMainGrad(torch.autograd.Function):
    """A weight, whose gradient goes into its main_grad."""

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
    """The weight for a function that torch differentiates: if it has a main_grad, that is added
    to."""
    wanted = torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")
    return _IntoMainGrad.apply(weight) if wanted else weight
