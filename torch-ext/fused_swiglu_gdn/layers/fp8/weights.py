"""FP8Linears in a call: their weights, looked at each time, and what a decoder layer gives to the
part that it calls, the result of its norm in FP8."""

import threading
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ...fp8.call import BLOCK, Quantised
from ...fp8.ops import MULTIPLY, Weight
from ...runtime import dispatch
from ..pinned import Pinned
from ..plain import HOOKS, OWN, PLAIN_TENSORS, is_plain, torch_unpatched


class Fp8Form(NamedTuple):
    """transformers' FP8Linear, as it was recognised."""

    kind: type
    pinned: Pinned


FORMS: Dict[type, Fp8Form] = {}  # by the classes of modules, served or not

SCHEME = ((BLOCK, BLOCK), "dynamic", None)  # that is served
NAMED = frozenset(("weight", "weight_scale_inv", "bias"))  # which hide parameters
NOT_OWN = NAMED | frozenset(OWN)  # and what a call of the class does
BLOCKS = (SCHEME[0], list(SCHEME[0]))
MLPS = ("SwiGLUMLP", "SwiGLUGateUp")  # that add a residual to their result


def takes(x: torch.Tensor, operation: tuple = MULTIPLY, eager: bool = False) -> bool:
    """Returns True if x may be quantised here for an operation: bf16 in memory, in eager mode.
    eager: the caller knows that torch is in eager mode, and unpatched."""
    if not eager:
        if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
            return False
        if not torch_unpatched(False):
            return False
    if type(x) not in PLAIN_TENSORS or x.dtype is not torch.bfloat16:
        return False
    if dispatch.forced is None and not dispatch.has_kernels_at(*operation, x.device):
        return False
    return not x.is_nested and x.numel() > 0 and not torch._C._len_torch_dispatch_stack()


def scheme_of(linear: nn.Module) -> Tuple[object, object, object]:
    """Returns how an FP8Linear scales: blocks of the weight, how x is scaled, and by what."""
    attributes = linear.__dict__
    block = attributes.get("block_size")
    block = tuple(block) if isinstance(block, (list, tuple)) else block
    scale = attributes["_parameters"].get("activation_scale")
    return block, attributes.get("activation_scheme"), scale


def weights_of(
    linears: Sequence[Optional[nn.Module]], x: torch.Tensor, called: bool = False
) -> List[Optional[Weight]]:
    """Returns what each FP8Linear multiplies tokens by if its forward does no more, None of other
    modules; x: what the tokens are made of. Dtypes, sizes and devices are the operation's to check.

    called: by a call of the module; if not, that does no more than its class's forward, too, and no
    gradient of x is asked for.
    """
    found: List[Optional[Weight]] = [None] * len(linears)
    learns, pinned = torch.is_grad_enabled(), given.pinned
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
        if not attributes.keys().isdisjoint(NAMED if called else NOT_OWN):
            continue
        hooked = not called and any(map(attributes.get, HOOKS))
        if hooked or not called and type(linear).__call__ is not nn.Module.__call__:
            continue
        parameters, scheme = attributes["_parameters"], attributes.get("activation_scheme")
        if attributes.get("block_size") not in BLOCKS or scheme != SCHEME[1]:
            continue
        if parameters.get("activation_scale") is not None:
            continue
        weight, scale = parameters.get("weight"), parameters.get("weight_scale_inv")
        if type(weight) not in PLAIN_TENSORS or type(scale) not in PLAIN_TENSORS:
            continue
        bias = parameters.get("bias")
        if bias is not None:
            other = type(bias) not in PLAIN_TENSORS or bias.dtype is not x.dtype
            if other or learns and bias.requires_grad:
                continue
        # of 16 bits or more it is no weight in FP8 any more
        if weight.element_size() == 1 and not (weight.data_ptr() | scale.data_ptr()) & 15:
            found[i] = (weight, scale, bias)
    return found


# -- from a decoder layer to a part of it


class Coded(NamedTuple):
    """The result of a norm in FP8."""

    codes: Quantised
    pinned: Pinned  # the class of the FP8Linears that take it, which is unchanged


class _Given(threading.local):
    """Values that a decoder layer gives to the part that it calls: x in FP8, for the first that
    asks for it, and the residual, which an MLP that adds it to its result says by `added`. pinned:
    of the FP8Linears, whose class is not looked at again during the call."""

    x: Optional[torch.Tensor] = None
    codes: Optional[Quantised] = None
    residual: Optional[torch.Tensor] = None
    pinned: Optional[Pinned] = None
    added = False


given = _Given()


def quantises(part: nn.Module, x: torch.Tensor, before: Optional[Coded] = None) -> Optional[Pinned]:
    """The class of FP8Linears among a module's parts, if a decoder layer that calls the module with
    a norm's result gives that in FP8: nothing can change x before their products, since the module
    is ours and calling it does no more than its forward. x: what is normed in eager mode, a plain
    tensor, where torch is as it was (norm.serves). before: what the layer gave to the part before
    this one, in the same call, and so has looked at."""
    if x.dtype is not torch.bfloat16:
        return None
    form = next(filter(None, map(FORMS.get, map(type, part._modules.values()))), None)
    if form is None or type(part).__dict__.get("served_as") is None or not is_plain(part):
        return None
    if before is not None and before.pinned is form.pinned:
        return form.pinned
    return form.pinned if takes(x, eager=True) and form.pinned.unchanged() else None


def with_codes(
    x: torch.Tensor, coded: Coded, residual: Optional[torch.Tensor], call: Callable, *args
) -> tuple:
    """(call(*args), whether that has added the residual); call is of a module that quantises x, and
    takes the codes once. A patch of the FP8Linears' class during it counts from the next layer
    on."""
    given.x, given.residual, given.added = x, residual, False
    given.codes, given.pinned = coded
    try:
        return call(*args), given.added
    finally:
        given.x = given.codes = given.residual = given.pinned = None


def taken(x: torch.Tensor) -> tuple:
    """Returns the codes and the residual that are given with x, once: later, x may be another
    value. A write by x.data, numpy, a graph or another library is counted nowhere."""
    if given.x is not x:
        return None, None
    found = given.codes, given.residual
    given.x = given.codes = given.residual = None
    return found
