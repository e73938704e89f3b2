"""Products of cuBLAS whose sums are in fp32."""

from typing import Optional

import torch
from torch import Tensor

ADDS_TO_FP32 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b in the dtype of total, fp32: one product of cuBLAS without further rounding.

    torch before 2.10 cannot accumulate products of fp16 or bf16 in fp32; there the product is
    rounded.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and ADDS_TO_FP32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(a, b))


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], out: Tensor) -> Tensor:
    """x weight^T + bias, written into `out`."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
