"""RMSNorm modules, computed by rms_norm."""

import functools
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..norm.api import rms_norm
from ..norm.ops import FAMILY
from ..runtime import dispatch
from ..runtime.checks import FLOATING
from .pinned import Pinned, has_values
from .plain import PLAIN_TENSORS, is_plain
from .untouched import torch_unpatched


class NormForm(NamedTuple):
    """A class of norms whose forward is rms_norm."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    checks: Tuple[Callable, ...]  # (module, arguments by name) -> whether the forward raises not
    argument: str
    weight: Optional[str]  # the names of its attributes
    eps: str
    casting_mode: str
    offset: float


FORMS: Dict[type, NormForm] = {}  # by the classes of served modules


def does_nothing(module: nn.Module) -> bool:
    """True if the module returns its input."""
    kind = type(module)
    return (kind is nn.Identity or kind is nn.Dropout and not module.p) and is_plain(module)


def parameters_of_norm(norm: nn.Module) -> Optional[tuple]:
    """(weight, eps, casting_mode, offset) if calling the norm is rms_norm with these alone, else
    None."""
    form = FORMS.get(type(norm))
    if form is None or form.checks or not is_plain(norm):
        return None
    return _parameters(norm, form)


def _parameters(norm: nn.Module, form: NormForm) -> Optional[tuple]:
    if not form.pinned.unchanged(norm) or form.guards and not has_values(norm, form.guards):
        return None
    attributes, weight = norm.__dict__, None
    if form.weight is not None:
        weight = attributes["_parameters"].get(form.weight)
        if type(weight) not in PLAIN_TENSORS or form.weight in attributes:
            return None
        if weight.dtype not in FLOATING:
            return None
    eps = attributes.get(form.eps)
    if type(eps) is not float or not eps >= 0.0:  # nan is neither
        return None
    return weight, eps, form.casting_mode, form.offset


def serves(x: torch.Tensor) -> bool:
    """True if a kernel may compute rms_norm of x: outside torch.compile, with unwatched module
    calls."""
    if type(x) not in PLAIN_TENSORS or x.is_nested or x.dtype not in FLOATING:
        return False
    return dispatch.serves(FAMILY, "rms_norm_fwd", x, False) and torch_unpatched(False)


def normed(
    x: torch.Tensor, found: tuple, residual: Optional[torch.Tensor] = None, after: bool = False
):
    """rms_norm with the result of parameters_of_norm."""
    weight, eps, casting_mode, offset = found
    return rms_norm(
        x, weight, eps, casting_mode=casting_mode, offset=offset, residual=residual, after=after
    )


@functools.lru_cache(maxsize=1024)
def forward_of(form: NormForm) -> Callable:
    """Returns a forward for the modules of a class: rms_norm, or the class's own for other
    calls."""
    kind, argument = form.kind, form.argument

    def forward(self, *args, **kwargs):
        x = args[0] if len(args) == 1 and not kwargs else kwargs.get(argument)
        if len(args) + len(kwargs) != 1 or torch.compiler.is_compiling() or not serves(x):
            return kind.forward(self, *args, **kwargs)
        found = _parameters(self, form)
        if found is None or not fits(x, found[0]):
            return kind.forward(self, x)
        if form.checks and not all([check(self, {argument: x}) for check in form.checks]):
            return kind.forward(self, x)
        return normed(x, found)

    forward.__wrapped__ = kind.forward  # whose arguments inspect and torch.fx then find
    forward.__qualname__ = "RMSNorm.forward"
    return forward


def fits(x: torch.Tensor, weight: Optional[torch.Tensor]) -> bool:
    """True if rms_norm takes x and weight; otherwise the norm's own forward raises its error."""
    if weight is None:
        return x.ndim > 0
    return weight.ndim == 1 and x.shape[-1:] == weight.shape and x.device == weight.device
