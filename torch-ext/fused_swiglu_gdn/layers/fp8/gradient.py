"""The gradient of x through a weight in FP8, which itself gets none: adapters learn on top of it.

The weight is put into bf16 for each product, its codes times their scales, rounded once.
"""

import torch

from ...fp8.ops import DEQUANTISE
from ...fp8.reference import dequantise_fwd


class _Learned(torch.autograd.Function):
    """y = x W^T, which is computed already. The gradient is one product of torch with a constant,
    and so has a derivative of its own."""

    @staticmethod
    def forward(ctx, x, y, weight, scale):
        ctx.save_for_backward(weight, scale)
        ctx.mark_dirty(y)  # so it is returned as it is: a view of it could not be written in place
        return y

    @staticmethod
    def backward(ctx, gradient):
        weight, scale = ctx.saved_tensors
        tensors = weight.detach(), scale.detach().float()
        weight = DEQUANTISE(tensors)
        weight = dequantise_fwd(*tensors) if weight is None else weight
        return gradient.to(weight.dtype) @ weight, None, None, None


def with_gradient(x: torch.Tensor, y: torch.Tensor, weight, scale) -> torch.Tensor:
    """y [..., N], the product of x [..., K] in FP8 with a weight; its gradient is that of the
    product without x's rounding."""
    return _Learned.apply(x, y, weight, scale)
