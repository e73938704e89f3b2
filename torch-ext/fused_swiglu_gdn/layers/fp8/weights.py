"""Weights and scales of an FP8Linear, looked at in every call."""

import threading
from operator import itemgetter
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ...fp8.call import BLOCK
from ...fp8.ops import MULTIPLY
from ...runtime import dispatch
from ..pinned import Pinned
from ..plain import HOOKS, OWN, PLAIN_TENSORS, torch_unpatched


class Fp8Form(NamedTuple):
    """transformers' FP8Linear, as it was recognised."""

    kind: type
    pinned: Pinned


FORMS: Dict[type, Fp8Form] = {}  # by the classes of modules, served or not


# The parameters of an FP8Linear: [N, K] e4m3, [ceil(N / 128), ceil(K / 128)], and the bias
Weight = Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]
SCHEME = ((BLOCK, BLOCK), "dynamic", None)  # that is served
PARAMETERS = ("weight", "weight_scale_inv", "bias")
NAMED, LISTED = frozenset(PARAMETERS), list(SCHEME[0])
NOT_OWN = frozenset((*PARAMETERS, *OWN))  # which hide parameters, or what a call of the class does
_CALL = nn.Module.__call__


class _Looked(threading.local):
    """The class of FP8Linears that a decoder layer has found unchanged, while it calls a part."""

    at: Optional[Pinned] = None


looked = _Looked()
_own = itemgetter("block_size", "activation_scheme", "_parameters", *HOOKS)
_three = itemgetter(*PARAMETERS)


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


def weights_of(  # noqa: C901  one function: three calls of each layer of each token
    linears: Sequence[Optional[nn.Module]], x: torch.Tensor, called: bool = False
) -> List[Optional[Weight]]:
    """Returns what each FP8Linear multiplies tokens by if its forward does no more, None of other
    modules; x: what the tokens are made of. Dtypes, sizes and devices are the operation's to check.

    called: by a call of the module; if not, that does no more than its class's forward, too, and no
    gradient of x is asked for.
    """
    found: List[Optional[Weight]] = [None] * len(linears)
    learns, pinned = torch.is_grad_enabled(), None
    hiding = NAMED if called else NOT_OWN
    if learns and not called and x.requires_grad:
        return found
    for i, linear in enumerate(linears):
        kind = type(linear)
        form = FORMS.get(kind)
        if form is None:
            continue
        if form.pinned is not pinned:  # those of one class have the same
            pinned = form.pinned
            if pinned is not looked.at and not pinned.unchanged():
                return found
        attributes = linear.__dict__
        if not attributes.keys().isdisjoint(hiding):
            continue
        try:
            block, scheme, parameters, *hooks = _own(attributes)
            weight, scale, bias = _three(parameters)
        except KeyError:
            continue
        if not called and (any(hooks) or kind.__call__ is not _CALL):
            continue
        if block != SCHEME[0] and block != LISTED or scheme != SCHEME[1]:
            continue
        if parameters.get("activation_scale") is not SCHEME[2]:
            continue
        if type(weight) not in PLAIN_TENSORS or type(scale) not in PLAIN_TENSORS:
            continue
        if weight.element_size() > 1:  # turned into 16 bits or more
            continue
        if bias is not None:
            if type(bias) not in PLAIN_TENSORS or bias.dtype is not x.dtype:
                continue
            if learns and bias.requires_grad:
                continue
        if not (weight.data_ptr() | scale.data_ptr()) & 15:
            found[i] = (weight, scale, bias)
    return found
