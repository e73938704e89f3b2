"""Several projections of one tensor: by calls of the modules, or in one launch."""

from typing import List, Optional

import torch
from torch import nn

from ..projection.project import project
from ..runtime import device
from . import lora
from .fp8 import linear as fp8
from .plain import PLAIN_TENSORS, parameters_of, torch_unpatched

# numbers of a weight from which one token takes .91 to .94 of cuBLAS' time (docs/notes/decoding.md)
LARGE = 2**28


def projections(
    x: torch.Tensor, *linears: nn.Module, eager: bool = False, together: bool = False
) -> Optional[List[torch.Tensor]]:
    """linear(x [..., K]) for each linear.

    A few tokens take one launch, if reading the weights is equivalent; it overlaps the previous
    one's end. For FP8Linears x is quantised once; others beside them are part of the launch of a
    few tokens, and of one token a launch of their own. eager: the caller knows that torch is in
    eager mode, and unpatched. together: None where each would be called by itself.
    """
    plain = type(linears[0]) is nn.Linear
    found = parameters_of(*linears) if plain and (eager or torch_unpatched()) else None
    if found is not None and all([bias is None for _, bias in found]):
        y = project(x, [weight for weight, _ in found])
        if y is not None:
            return y
    if not plain and fp8.FORMS:
        found = fp8.project(x, linears, eager)
        if found is not None:
            rest = [linear for linear, y in zip(linears, found) if y is None]
            if not rest:
                return found
            if len(rest) > 1 and x.numel() == x.shape[-1]:
                others = iter(projections(x, *rest, eager=eager))
            else:
                others = (linear(x) for linear in rest)
            return [next(others) if y is None else y for y in found]
    if lora.FORMS and lora.is_step(linears[0]):
        found = lora.projections(x, linears, projections)
        if found is not None:
            return found
    return None if together else [linear(x) for linear in linears]


def joined(x: torch.Tensor, first: List[nn.Module], others: List[nn.Module]) -> tuple:
    """linear(x [..., K]) of `first`, side by side, and of each other one, unless these have to be
    called one by one: of a few tokens all in one launch, of more without a copy, where calling them
    is only a product."""
    weights = _weights(*first, *others)
    y = None if weights is None else project(x, weights, apart=False)
    sizes = [] if weights is None else [weight.shape[0] for weight in weights]
    n = len(first)
    if y is not None:
        return y[0].split_with_sizes([sum(sizes[:n]), *sizes[n:]], -1)
    apart, weights = projections(x, *others, together=True) or (), _weights(*first)
    if weights is None or not _may_write(x, weights):
        return torch.cat(projections(x, *first), -1), *apart
    rows, sizes = x.reshape(-1, x.shape[-1]), [weight.shape[0] for weight in weights]
    y = x.new_empty((rows.shape[0], sum(sizes)))
    for weight, part in zip(weights, y.split_with_sizes(sizes, -1)):
        torch.mm(rows, weight.t(), out=part)
    return y.view(*x.shape[:-1], sum(sizes)), *apart


def _weights(*linears: nn.Module) -> Optional[List[torch.Tensor]]:
    """Their weights, where calling each is only a product with it, else None."""
    found = parameters_of(*linears) if torch_unpatched() else None
    if found is None or any([bias is not None for _, bias in found]):
        return None
    return [weight for weight, _ in found]


def linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """nn.Linear's forward; that of one token, of a large weight, in fewer microseconds than by
    cuBLAS, where launches overlap."""
    weight = module.weight
    if x.numel() == x.shape[-1] and weight.numel() >= LARGE and module.bias is None:
        plain = not torch.compiler.is_compiling() and type(weight) in PLAIN_TENSORS
        if plain and device.overlaps_launches(x.device) and torch_unpatched():
            y = project(x, [weight])
            if y is not None:
                return y[0]
    return nn.Linear.forward(module, x)


def _may_write(x: torch.Tensor, weights: List[torch.Tensor]) -> bool:
    """True if products may be written to a given tensor: without a gradient, autocast or trace."""
    tensors = (x, *weights)
    learns = torch.is_grad_enabled() and any([y.requires_grad for y in tensors])
    alike = all([y.dtype is x.dtype and y.device == x.device for y in weights])
    others = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    return alike and not learns and not others
