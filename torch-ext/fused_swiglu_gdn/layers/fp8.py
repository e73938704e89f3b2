"""transformers' FP8Linear, and MLPs of them: x in e4m3 by one launch, the product by another.

A scale stands for 128 columns of x and 128 x 128 values of the weight. x is quantised once for
modules that are asked together, as an attention module's queries, keys and values, and in every
call of a module by itself: nothing is kept. Whatever is traced or compiled is the forward of the
module's own class.
"""

import contextlib
import functools
import threading
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ..fp8.call import BLOCK, MAX_PLAIN, MOST, Quantised
from ..fp8.ops import MULTIPLY, PRODUCT, QUANTISE, QUANTISE_FEW, few
from ..runtime import dispatch
from .fp8_gradient import with_gradient
from .own_code import Pinned
from .plain import HOOKS, OWN, PLAIN_TENSORS, is_plain, parameters_of, torch_unpatched


class Fp8Form(NamedTuple):
    """transformers' FP8Linear, as it was recognised."""

    kind: type
    pinned: Pinned


FORMS: Dict[type, Fp8Form] = {}  # by the classes of modules, served or not


class Weight(NamedTuple):
    """The parameters of an FP8Linear, and what multiplies with them."""

    weight: torch.Tensor  # [N, K] e4m3
    scale: torch.Tensor  # [ceil(N / 128), K / 128]
    bias: Optional[torch.Tensor]
    product: Optional[Callable] = None  # which tokens in any number need

    def times(self, x: Quantised, M: int) -> Optional[torch.Tensor]:
        """The product with the M tokens of x, and with zeros behind them: [P, N], or [M, N]. None
        where nothing computes it."""
        y = few(x, M, (self.weight,), (self.scale,)) if M <= MOST else None
        if y is None:
            product = self.product or PRODUCT.serving((self.weight, self.scale))
            if product is None:
                return None
            y = product(self.weight, self.scale, x)
        return y if self.bias is None else y.add_(self.bias)


def takes(x: torch.Tensor, operation: tuple = MULTIPLY, unpatched: bool = False) -> bool:
    """Returns True if x may be quantised here for an operation: bf16 in memory, in eager mode.
    unpatched: the caller knows that torch_unpatched."""
    if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        return False
    if type(x) not in PLAIN_TENSORS or x.dtype is not torch.bfloat16:
        return False
    if dispatch.forced is None and not dispatch.has_kernels_at(*operation, x.device):
        return False
    if not (unpatched or torch_unpatched(False)):
        return False
    return not x.is_nested and x.numel() > 0 and not torch._C._len_torch_dispatch_stack()


def scheme_of(linear: nn.Module) -> Tuple[object, object, object]:
    """Returns how an FP8Linear scales: blocks of the weight, how x is scaled, and by what."""
    attributes = linear.__dict__
    block = attributes.get("block_size")
    block = tuple(block) if isinstance(block, (list, tuple)) else block
    scale = attributes["_parameters"].get("activation_scale")
    return block, attributes.get("activation_scheme"), scale


MLPS = ("SwiGLUMLP", "SwiGLUGateUp")  # that add a residual to what few tokens give
SCHEME = ((BLOCK, BLOCK), "dynamic", None)  # that is served
PARAMETERS = ("weight", "weight_scale_inv", "bias")
NAMED, LISTED = frozenset(PARAMETERS), list(SCHEME[0])
NOT_OWN = frozenset((*PARAMETERS, *OWN))  # which hide parameters, or what a call of the class does


def weight_of(linear: nn.Module, x: torch.Tensor, K: int) -> Optional[Weight]:
    """Returns what the forward of an FP8Linear multiplies tokens with K columns by, if it does no
    more; x: what the tokens are made of. It is that of a call of the module."""
    (found,) = weights_of((linear,), x, called=True)
    return found if found is not None and found.weight.shape[1] == K else None


def weights_of(
    linears: Sequence[Optional[nn.Module]], x: torch.Tensor, called: bool = False
) -> List[Optional[Weight]]:
    """Returns what each FP8Linear multiplies tokens by if its forward does no more, None of other
    modules; x: what the tokens are made of, in as many columns as the weight has.

    called: by a call of the module; if not, that does no more than its class's forward, too, and no
    gradient of x is asked for.
    """
    found: List[Optional[Weight]] = [None] * len(linears)
    learns, device, pinned = torch.is_grad_enabled(), x.device, None
    hiding = NAMED if called else NOT_OWN
    if learns and not called and x.requires_grad:
        return found
    for i, linear in enumerate(linears):
        form = FORMS.get(type(linear))
        if form is None:
            continue
        if form.pinned is not pinned:  # those of one class have the same
            pinned = form.pinned
            if not pinned.unchanged():
                return found
        attributes = linear.__dict__
        if not attributes.keys().isdisjoint(hiding):
            continue
        if not called and (
            any(map(attributes.get, HOOKS)) or type(linear).__call__ is not nn.Module.__call__
        ):
            continue
        block, scheme = attributes.get("block_size"), attributes.get("activation_scheme")
        parameters = attributes["_parameters"]
        scheme = scheme, parameters.get("activation_scale")
        if block != SCHEME[0] and block != LISTED or scheme != SCHEME[1:]:
            continue
        weight, scale, bias = map(parameters.get, PARAMETERS)
        if type(weight) not in PLAIN_TENSORS or type(scale) not in PLAIN_TENSORS:
            continue
        if weight.ndim != 2 or weight.device != device:
            continue
        if weight.dtype is not torch.float8_e4m3fn or scale.dtype is not torch.float32:
            continue
        if bias is not None and (type(bias) not in PLAIN_TENSORS or bias.dtype is not x.dtype):
            continue
        if bias is not None and learns and bias.requires_grad:
            continue
        if not (weight.data_ptr() | scale.data_ptr()) & 15:
            found[i] = tuple.__new__(Weight, (weight, scale, bias, None))
    return found


def for_many(weights: Sequence[Weight]) -> Optional[List[Weight]]:
    """The weights with what multiplies by each, whatever the number of tokens; None if nothing
    does with one of them."""
    found = [w._replace(product=PRODUCT.serving((w.weight, w.scale))) for w in weights]
    return None if any([w.product is None for w in found]) else found


class Given:
    """The result x of a norm is `codes` in FP8, for the module that is called with x.

    residual: of x's shape, or None. An MLP of a few tokens adds it to its result, and says so by
    `added`.
    """

    __slots__ = ("x", "codes", "residual", "added")


class _Waiting(threading.local):
    """What a decoder layer gives to the module that it calls, until that has taken it."""

    it: Optional[Given] = None


_waiting = _Waiting()


def with_codes(
    x: torch.Tensor, codes: Quantised, residual: Optional[torch.Tensor], call: Callable, *args
) -> tuple:
    """(call(*args), whether that has added the residual); call is of a module that quantises x, and
    takes the codes once."""
    it = Given()
    it.x, it.codes, it.residual, it.added = x, codes, residual, False
    _waiting.it = it
    try:
        return call(*args), it.added
    finally:
        _waiting.it = None


def taken(x: torch.Tensor) -> Optional[Given]:
    """Returns what is given with x, once: later, nobody can know that x is what it was. A write by
    x.data, numpy, a graph or another library is counted nowhere."""
    it = _waiting.it
    if it is None or it.x is not x:
        return None
    _waiting.it = None
    return it


def rows_of(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])  # [M, K]
    return x if x.stride(1) == 1 else x.contiguous()


def shaped(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The rows of y [P, N] that are those of x [..., K]: [..., N], no view."""
    return y.resize_((*x.shape[:-1], y.shape[1]))


_NOTHING = contextlib.nullcontext()


def no_grad():
    """The weights say that they need a gradient, and get none."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


@functools.lru_cache(maxsize=64)
def forward_of(form: Fp8Form) -> Callable:
    """A forward for FP8Linear modules, or the class's own where that differs."""
    own = form.kind.forward

    def forward(self, input):
        y = None
        if takes(input):
            weight, M = weight_of(self, input, input.shape[-1]), input.numel() // input.shape[-1]
            if weight is not None and M > MOST:
                (weight,) = for_many([weight]) or (None,)
            if weight is not None:
                with no_grad():
                    x = QUANTISE((rows_of(input),))
                    y = None if x is None else weight.times(x, M)
                    y = None if y is None else shaped(y, input)
        if y is not None and input.requires_grad and torch.is_grad_enabled():
            return with_gradient(input, y, weight.weight, weight.scale)
        return own(self, input) if y is None else y

    forward.__wrapped__ = own
    forward.__qualname__ = "FP8Linear.forward"
    return forward


def project(
    x: torch.Tensor, linears: Sequence[nn.Module], unpatched: bool = False
) -> Optional[List[Optional[torch.Tensor]]]:
    """linear(x) of the FP8Linears, x quantised once for all, and of others beside them that the
    same launch takes, None of others yet; None if they are few, but for one module and few tokens.
    unpatched: the caller knows that torch_unpatched."""
    if FORMS.keys().isdisjoint(map(type, linears)) or not takes(x, MULTIPLY, unpatched):
        return None
    K = x.shape[-1]
    weights = [w if w and w.weight.shape[1] == K else None for w in weights_of(linears, x)]
    known = [w for w in weights if w is not None]
    M, count = x.numel() // K, len(linears)
    beside = _beside(x, linears) if 0 < len(known) < count and 1 < M <= MOST else {}
    if len(known) > 1 and M > MOST:
        known = for_many(known) or []
    if len(known) + len(beside) < 2 and (count > 1 or not known or M > MOST):
        return None
    if torch.is_grad_enabled():
        with torch.no_grad():
            found = _together(x, M, known, list(beside.values()))
    else:
        found = _together(x, M, known, list(beside.values()))
    if found is None or len(known) == count:
        return found
    products, others = iter(found), dict(zip(beside, found[len(known) :]))
    return [others.get(i) if w is None else next(products) for i, w in enumerate(weights)]


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


def _together(
    x: torch.Tensor, M: int, weights: List[Weight], plain: List[torch.Tensor]
) -> Optional[List[torch.Tensor]]:
    """The products of the M tokens x [..., K] with all weights, [..., N_i]; of few tokens in one
    launch, with those in bf16 behind them. None where nothing computes them."""
    it, y, one = taken(x), None, len(weights) == 1 and not plain
    if one and it is None:
        y = QUANTISE_FEW((x, weights[0].weight, weights[0].scale))
    else:
        codes = QUANTISE((rows_of(x),)) if it is None else it.codes
        if codes is None:
            return None
        if M <= MOST:
            more = (tuple(plain), rows_of(x)) if plain else ()
            both = tuple([w.weight for w in weights]), tuple([w.scale for w in weights])
            y = few(codes, M, *both, *more)
        if y is None and not one:
            products = [weight.times(codes, M) for weight in weights]
            return None if any([y is None for y in products]) else [shaped(y, x) for y in products]
    if y is None:
        return None
    if y.ndim != x.ndim:
        y.resize_((*x.shape[:-1], y.shape[1]))
    found = [y]
    if not one:
        sizes = [w.weight.shape[0] for w in weights]
        found = list(y.split_with_sizes([*sizes, *[p.shape[0] for p in plain]], -1))
    for weight, part in zip(weights, found):
        if weight.bias is not None:
            part.add_(weight.bias)
    return found


def quantises(part: nn.Module, x: torch.Tensor) -> bool:
    """A module that a decoder layer calls with a norm's result takes that in FP8: some of its parts
    are FP8Linears, and nothing can change x before their products, since the module is ours and
    calling it does no more than its forward. x: what is normed in eager mode, a plain tensor, where
    torch is as it was (norm.serves)."""
    if x.dtype is not torch.bfloat16 or FORMS.keys().isdisjoint(map(type, part._modules.values())):
        return False
    if dispatch.forced is None and not dispatch.has_kernels_at(*MULTIPLY, x.device):
        return False
    if getattr(type(part), "served_as", None) is None or not is_plain(part):
        return False
    return x.numel() > 0 and not torch._C._len_torch_dispatch_stack()
