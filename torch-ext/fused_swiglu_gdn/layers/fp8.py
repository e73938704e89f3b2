"""transformers' FP8Linear, and MLPs of them: x in e4m3 by one launch, the product by another.

A scale stands for 128 columns of x and 128 x 128 values of the weight. x is quantised once for all
modules that take it one after another: an attention module's queries, keys and values. Whatever is
traced or compiled is the forward of the module's own class.
"""

import contextlib
import functools
import threading
import weakref
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


MLPS = ("SwiGLUMLP", "SwiGLUGateUp")
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


class _Last(threading.local):
    """The result that was quantised last in a thread, while its source is alive."""

    x: Optional[weakref.ref] = None
    found: Optional[Quantised] = None
    facts: tuple = ()
    users: tuple = ()  # the modules that have had it; one that comes again gets a new one

    def keep(self, x: torch.Tensor, found: Quantised, facts: tuple, user: int) -> None:
        mine = self.__dict__

        def forget(x):
            if mine.get("x") is x:
                mine.update(x=None, found=None)

        self.x, self.found = weakref.ref(x, forget), found
        self.facts, self.users = facts, (user,)


_last = _Last()


class _Given(threading.local):
    """The result of a norm in FP8, for the module that is called with it."""

    it: Optional["Given"] = None


_given = _Given()


class Given:
    """x in FP8 is `found`, as long as x does not change. Both are of one launch, so what may read x
    may read it; x is no inference tensor, whose changes are not counted.

    residual: of x's shape, or None. An MLP of a few tokens adds it to its result, and says so by
    `added`.
    """

    __slots__ = ("x", "version", "found", "residual", "added")


def with_codes(
    x: torch.Tensor, codes: Quantised, residual: Optional[torch.Tensor], call: Callable, *args
) -> tuple:
    """(call(*args), whether that has added the residual), inside of which codes are x in FP8."""
    it, before = Given(), _given.it
    it.x, it.version, it.found, it.residual, it.added = x, x._version, codes, residual, False
    _given.it = it
    try:
        return call(*args), it.added
    finally:
        _given.it = before


def given_of(x: torch.Tensor) -> Optional[Given]:
    """Returns x in FP8, if that has been given."""
    it = _given.it
    return it if it is not None and it.x is x and it.version == x._version else None


def takes_residual(part: nn.Module) -> bool:
    """An MLP of ours, whose call gives its result and does no more."""
    return getattr(type(part), "served_as", None) in MLPS and is_plain(part)


def _facts(x: torch.Tensor) -> Optional[tuple]:
    """Returns what identifies x's values, beside its identity; None where they cannot be: an
    inference tensor does not count its changes, and what a graph captures is made when it is
    replayed."""
    if x.is_inference():
        return None
    if x.device.type != "cuda":
        return (x._version, x.data_ptr())
    if torch.cuda.is_current_stream_capturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    return (x._version, x.data_ptr(), stream)


def _quantised(x: torch.Tensor, user: int) -> Optional[Quantised]:
    """x [..., K] in FP8, as the module before `user` had it where that took the same x."""
    it = given_of(x)
    if it is not None:
        return it.found
    facts = _facts(x)
    if facts is not None and _last.x is not None and _last.x() is x and _last.facts == facts:
        if user not in _last.users:
            _last.users += (user,)
            return _last.found
    found = QUANTISE((rows_of(x),))
    if facts is not None and found is not None:
        _last.keep(x, found, facts, user)
    return found


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
                    x = _quantised(input, id(self))
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
    it, y, one = given_of(x), None, len(weights) == 1 and not plain
    if one and it is None:
        y = QUANTISE_FEW((x, weights[0].weight, weights[0].scale))
    else:
        codes = QUANTISE((rows_of(x),)) if it is None else it.found
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
    """A module that is called with a norm's result quantises it: some of its parts are FP8Linears.
    x: what is normed in eager mode, a plain tensor, where torch is as it was (norm.serves)."""
    if x.dtype is not torch.bfloat16 or FORMS.keys().isdisjoint(map(type, part._modules.values())):
        return False
    if dispatch.forced is None and not dispatch.has_kernels_at(*MULTIPLY, x.device):
        return False
    # what a norm gives in inference mode does not count its changes, whatever x is
    usual = not (torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack())
    return usual and x.numel() > 0
