"""transformers' FP8Linear: x in e4m3 by one launch, the product by another.

A scale stands for 128 columns of x and 128 x 128 values of the weight. x is quantised once for
modules that are asked together, as an attention module's queries, keys and values, and in every
call of a module by itself: nothing is kept. Whatever is traced or compiled is the forward of the
module's own class.
"""

import functools
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ...fp8.call import MAX_PLAIN, MOST, Quantised
from ...fp8.ops import DEQUANTISE, MULTIPLY, products
from ...fp8.reference import dequantise_fwd
from ..plain import parameters_of
from .given import taken
from .weights import FORMS, Fp8Form, Weight, takes, weights_of


def multiplied(
    lead: tuple,
    weights: Sequence[Weight],
    x: torch.Tensor,
    codes: Optional[Quantised] = None,
    plain: tuple = (),
) -> Optional[List[torch.Tensor]]:
    """Products of FP8Linears with x [*lead, K], or with codes of x; then those with weights in
    bf16. None where nothing computes them. The weights say that they need a gradient, and get
    none."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return multiplied(lead, weights, x, codes, plain)
    tensors, scales, biases = zip(*weights)
    found = products(lead, tensors, scales, x, codes, plain)
    if found is not None:
        for bias, y in zip(biases, found):
            if bias is not None:
                y.add_(bias)
    return found


class _Learned(torch.autograd.Function):
    """y [..., N] = x W^T of x [..., K], which is computed already, in FP8.

    The gradient of x is that of the product without x's rounding: one product of torch with a
    constant, the weight in bf16, its codes times their scales, and so has a derivative of its own.
    The weight gets none: adapters learn on top of it."""

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


@functools.lru_cache(maxsize=64)
def forward_of(form: Fp8Form) -> Callable:
    """A forward for FP8Linear modules, or the class's own where that differs."""
    own = form.kind.forward

    def forward(self, input):
        found = None
        if takes(input):
            (weight,) = weights_of((self,), input, called=True)
            if weight is not None:
                found = multiplied(input.shape[:-1], (weight,), input)
        if found is None:
            return own(self, input)
        if input.requires_grad and torch.is_grad_enabled():
            return _Learned.apply(input, *found, *weight[:2])
        return found[0]

    forward.__wrapped__ = own
    forward.__qualname__ = "FP8Linear.forward"
    return forward


def scaled(
    linear: nn.Module, x: torch.Tensor, operation: tuple
) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    """The weight of an FP8Linear that only multiplies by it, and its scales, for tokens made of x,
    which are not quantised by an operation; None of other modules, and if x is not taken."""
    if not FORMS or not takes(x, operation):
        return None
    (found,) = weights_of((linear,), x)
    return found[:2] if found is not None and found[2] is None else None


def project(
    x: torch.Tensor, linears: Sequence[nn.Module], unpatched: bool = False
) -> Optional[List[Optional[torch.Tensor]]]:
    """linear(x) of the FP8Linears, x quantised once for all, and of others beside them that the
    same launch takes, None of others yet; None if none is a product alone.
    unpatched: the caller knows that torch_unpatched."""
    # first, for torch.compile traces no isdisjoint
    if not takes(x, MULTIPLY, unpatched) or FORMS.keys().isdisjoint(map(type, linears)):
        return None
    weights = weights_of(linears, x)
    known = weights if None not in weights else [w for w in weights if w is not None]
    if not known:
        return None
    M, count = x.numel() // x.shape[-1], len(linears)
    beside = _beside(x, linears) if len(known) < count and 1 < M <= MOST else {}
    it = taken(x)
    codes = None if it is None else it.codes
    found = multiplied(x.shape[:-1], known, x, codes, tuple(beside.values()))
    if found is None or len(known) == count:
        return found
    made, others = iter(found), dict(zip(beside, found[len(known) :]))
    return [others.get(i) if w is None else next(made) for i, w in enumerate(weights)]


def _beside(x: torch.Tensor, linears: Sequence[nn.Module]) -> Dict[int, torch.Tensor]:
    """Weights in bf16, by their places, by which few tokens x are multiplied in the launch of those
    in FP8: of all modules that are no FP8Linears, or of none."""
    places = [i for i, linear in enumerate(linears) if type(linear) not in FORMS]
    found = parameters_of(*[linears[i] for i in places])
    if not found or len(found) > MAX_PLAIN or torch.is_autocast_enabled(x.device.type):
        return {}
    learns = torch.is_grad_enabled()
    for weight, bias in found:
        dense = weight.dtype is x.dtype and weight.ndim == 2 and weight.is_contiguous()
        if not dense or weight.shape[1] != x.shape[-1] or weight.device != x.device:
            return {}
        if weight.data_ptr() & 15:
            return {}
        if bias is not None or learns and (weight.requires_grad or x.requires_grad):
            return {}
    return {i: weight for i, (weight, _) in zip(places, found)}
