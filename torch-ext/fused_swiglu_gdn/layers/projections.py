"""Several projections of one tensor: by calls of the modules, or in one launch."""

from typing import List, Optional

import torch
from torch import nn

from ..projection.call import MAX_TOKENS
from ..projection.project import project
from ..runtime import dispatch
from . import fp8
from .plain import parameters_of
from .untouched import torch_unpatched


def projections(
    x: torch.Tensor, *linears: nn.Module, compiling: Optional[bool] = None
) -> List[torch.Tensor]:
    """linear(x) for each linear.

    A few tokens take one launch, if reading the weights is equivalent. For FP8Linears x is
    quantised once.
    """
    served = dispatch.serves("projection.project", "project_fwd", x, compiling)
    if served and torch_unpatched(compiling):
        weights = []
        for linear in linears:
            found = parameters_of(linear)
            if found is None or found[1] is not None:
                break
            weights.append(found[0])
        else:
            y = project(x, weights)
            if y is not None:
                return y
    y = None
    if type(linears[0]) is not nn.Linear and len(linears) > 1:
        y = fp8.project(x, linears, compiling)
    return [linear(x) for linear in linears] if y is None else y


def projected(linear: nn.Module, x: torch.Tensor, compiling: Optional[bool] = None) -> torch.Tensor:
    """linear(x) of x [B, T, K]; few tokens by launches that overlap the previous one's end."""
    few = x.shape[0] * x.shape[1] <= MAX_TOKENS
    return projections(x, linear, compiling=compiling)[0] if few else linear(x)
