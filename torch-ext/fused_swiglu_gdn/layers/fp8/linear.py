"""transformers' FP8Linear, alone and in fewer launches: several of one tensor, whole MLPs, and
output projections whose input attention over a cache, its gate, or the gated norm of Gated DeltaNet
quantises in its own launch.

A scale stands for 128 columns of x and 128 x 128 values of the weight. x is quantised once for
modules that are asked together, as an attention module's queries, keys and values, and in every
call of a module by itself: nothing is kept. Whatever is traced or compiled is the forward of the
module's own class.
"""

import functools
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ...attention.ops_fp8 import ATTENTION_QUANTISE, GATE_QUANTISE
from ...fp8.call import BLOCK, MAX_PLAIN, MOST, is_scaled
from ...fp8.ops import DEQUANTISE, MLP, PRODUCT, Weight, products
from ...fp8.reference import dequantise_fwd
from ...runtime import dispatch
from ..plain import parameters_of
from .weights import FORMS, Fp8Form, given, taken, takes, weights_of


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
            weights = weights_of((self,), input, called=True)
            if weights[0] is not None:
                found = products(input.shape[:-1], weights, input)
        if found is None:
            return own(self, input)
        if input.requires_grad and torch.is_grad_enabled():
            return _Learned.apply(input, *found, *weights[0][:2])
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
    x: torch.Tensor, linears: Sequence[nn.Module], eager: bool = False
) -> Optional[List[Optional[torch.Tensor]]]:
    """linear(x) of the FP8Linears, x quantised once for all, and of others beside them that the
    same launch takes, None of others yet; None if none is a product alone. eager: as in takes()."""
    # first, for torch.compile traces no isdisjoint
    if not takes(x, eager=eager) or FORMS.keys().isdisjoint(map(type, linears)):
        return None
    weights = weights_of(linears, x)
    known = weights if None not in weights else [w for w in weights if w is not None]
    if not known:
        return None
    M, count = x.numel() // x.shape[-1], len(linears)
    beside = _beside(x, linears) if len(known) < count and 1 < M <= MOST else {}
    found = products(x.shape[:-1], known, x, taken(x)[0], tuple(beside.values()))
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


def mlp(
    x: torch.Tensor, gate: nn.Module, up: Optional[nn.Module], down: nn.Module, gate_first: bool
) -> Optional[torch.Tensor]:
    """down(silu(gate(x)) * up(x)) of FP8Linears in eager mode, in five launches or less; None where
    it is not. The caller knows that torch is unpatched.

    up=None: gate makes both, one half each.
    """
    if type(gate) not in FORMS or not takes(x, eager=True):
        return None
    found = weights_of((gate, down) if up is None else (gate, up, down), x)
    if None in found:
        return None
    if up is None:
        found.insert(1, (None, None, None))
    codes, residual = taken(x)
    weights, scales, biases = zip(*found)
    tensors = (*weights, *scales, *biases, x, *(codes or (None, None)), residual)
    options = x.shape[:-1], gate_first
    if torch.is_grad_enabled():  # the weights say that they need one, and get none
        with torch.no_grad():
            y = MLP(tensors, options)
    else:
        y = MLP(tensors, options)
    given.added = y is not None and residual is not None
    return y


# -- output projections


def weight_of_out(
    linear: nn.Module, x: torch.Tensor, K: int, eager: bool = False
) -> Optional[Weight]:
    """Returns what calling the FP8Linear multiplies K columns of x's tokens by, if it does no more,
    no gradient can be asked for, and the product of these tokens is known to be computed. x [B, T,
    ...]; eager: as in takes()."""
    if type(linear) not in FORMS or torch.is_grad_enabled():
        return None
    if not takes(x, eager=eager) or K % BLOCK:
        return None
    (found,) = weights_of((linear,), x)
    if found is None or found[0].shape[1] != K:
        return None
    if x.shape[0] * x.shape[1] > MOST or dispatch.forced is not None:
        return found if PRODUCT.serving(found[:2]) is not None else None
    return found if is_scaled(*found[:2]) else None


def gated(out: torch.Tensor, gate: torch.Tensor, linear: nn.Module) -> Optional[torch.Tensor]:
    """linear(out * sigmoid(gate)) of heads [B, T, HQ, D], [B, T, N]; None where the parts are to be
    called."""
    if out.ndim != 4 or out.shape != gate.shape:
        return None
    B, T, HQ, D = out.shape
    weight = weight_of_out(linear, out, HQ * D, True)
    codes = None if weight is None else GATE_QUANTISE((out, gate))
    return None if codes is None else products((B, T), (weight,), None, codes)[0]


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length, mask, scale, linear: nn.Module
) -> Optional[tuple]:
    """(linear() of attention_with_kvcache's result [B, 1, N], None): without weights of attention.
    None where the parts are to be called."""
    B, T, HQ, D = q.shape
    if T > 1 or D != BLOCK:
        return None
    weight = weight_of_out(linear, q, HQ * D, True)
    codes = None if weight is None else ATTENTION_QUANTISE((q, k, v, length, mask), (scale,))
    return None if codes is None else (products((B, T), (weight,), None, codes)[0], None)
