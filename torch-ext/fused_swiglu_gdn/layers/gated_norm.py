"""Checks that calling a gated norm is equivalent to reading its weight."""

from types import MethodType, SimpleNamespace
from typing import Dict

import torch
import torch.nn.functional as F
from torch import nn

from ..runtime.checks import FLOATING
from .functions import FusedRMSNormGated
from .own_code import NotOwn, OwnCode, own_code
from .plain import PLAIN_TENSORS, why_hooked
from .untouched import torch_unpatched

_norms: Dict[type, OwnCode] = {}
_others: Dict[type, object] = {}  # classes that are not, with their forwards


def is_gated_norm(norm: nn.Module) -> bool:
    """True if calling the norm computes weight * x / rms(x) * act(gate) and nothing else.

    It is of a class of transformers with its own forward, whose values were compared with the
    formula; there are no hooks, and no forward on the instance but its class's or ours.
    """
    kind = type(norm)
    if not issubclass(kind, nn.Module):
        return False
    known = _norms.get(kind)
    if torch.compiler.is_compiling():  # what is known is a constant; files cannot be read
        if known is None:
            return False
    elif known is None or not known.unchanged():
        if _others.get(kind) is kind.forward or not _recognised(kind):
            return False
    bound = norm.__dict__.get("forward")
    if bound is not None:
        function = bound.__func__ if isinstance(bound, MethodType) else None
        if function is not kind.forward and function is not FusedRMSNormGated.forward:
            return False
    if not torch_unpatched() or why_hooked(norm) is not None:
        return False
    weight, eps = norm._parameters.get("weight"), norm.__dict__.get("variance_epsilon")
    if type(weight) not in PLAIN_TENSORS or weight.ndim != 1 or weight.dtype not in FLOATING:
        return False
    return type(eps) is float and eps >= 0.0


def _recognised(kind: type) -> bool:
    _norms.pop(kind, None)
    try:
        found = own_code(kind)
        if kind.__call__ is not nn.Module.__call__ or not _is_the_formula(found.forward):
            raise NotOwn
    except NotOwn:
        _others[kind] = kind.forward
        return False
    _others.pop(kind, None)
    _norms[kind] = found
    return True


def _is_the_formula(forward) -> bool:
    """True if the forward agrees with the formula on small inputs; transformers computes in
    fp32."""
    x, gate, weight = torch.linspace(-3, 5, 15, device="cpu").view(3, 5).tensor_split(3)
    for eps in (1e-6, 0.5):
        norm = SimpleNamespace(weight=weight[0], variance_epsilon=eps, activation="silu")
        expected = F.rms_norm(x, (5,), weight[0], eps) * F.silu(gate)
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                got = forward(norm, x, gate)
        except Exception:
            return False
        if got.shape != x.shape or not torch.allclose(got, expected, rtol=1e-5, atol=1e-6):
            return False
    return True
