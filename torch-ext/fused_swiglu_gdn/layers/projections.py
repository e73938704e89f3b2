"""Several projections of one tensor: by calls of the modules, or in one launch."""

from typing import List

import torch
from torch import nn

from ..projection.call import MAX_TOKENS
from ..projection.project import project
from . import fp8
from .plain import parameters_of
from .untouched import torch_unpatched


def projections(
    x: torch.Tensor, *linears: nn.Module, unpatched: bool = False
) -> List[torch.Tensor]:
    """linear(x [..., K]) for each linear.

    A few tokens take one launch, if reading the weights is equivalent; it overlaps the previous
    one's end. For FP8Linears x is quantised once, and others beside them take one launch of one
    token. unpatched: the caller knows that torch_unpatched.
    """
    if x.numel() <= MAX_TOKENS * x.shape[-1] and (unpatched or torch_unpatched()):
        found = parameters_of(*linears)
        if found is not None and all([bias is None for _, bias in found]):
            y = project(x, [weight for weight, _ in found])
            if y is not None:
                return y
    if len(linears) > 1 and type(linears[0]) is not nn.Linear:
        found = fp8.project(x, linears)
        if found is not None:
            rest = [linear for linear, y in zip(linears, found) if y is None]
            if len(rest) > 1 and x.numel() == x.shape[-1]:  # of more tokens cuBLAS is faster
                others = iter(projections(x, *rest, unpatched=unpatched))
            else:
                others = (linear(x) for linear in rest)
            return [next(others) if y is None else y for y in found]
    return [linear(x) for linear in linears]
