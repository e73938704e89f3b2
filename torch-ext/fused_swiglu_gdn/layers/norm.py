"""RMSNorm modules, computed by rms_norm."""

import functools
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..norm.api import FAMILY, rms_norm
from ..runtime import dispatch
from ..runtime.checks import FLOATING
from .pinned import Pinned
from .plain import HOOKS, OWN, PLAIN_TENSORS, is_plain, torch_unpatched


class NormForm(NamedTuple):
    """A class of norms whose forward is rms_norm."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    argument: str
    weight: Optional[str]  # the names of its attributes
    eps: str
    casting_mode: str
    offset: float


FORWARD = (FAMILY, "rms_norm_fwd")
FORMS: Dict[type, NormForm] = {}  # by the classes of served modules


def does_nothing(module: nn.Module) -> bool:
    """True if a call of the module returns its input."""
    kind = type(module)
    drops = kind is nn.Dropout and module.training and module.p
    return kind in (nn.Dropout, nn.Identity) and not drops and is_plain(module)


def parameters_of_norm(
    norm: nn.Module,
    x: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
    form: Optional[NormForm] = None,
) -> Optional[tuple]:
    """(weight, eps, casting_mode, offset) if calling the norm is rms_norm with these alone, else
    None. x, residual: rms_norm takes them, too, where the norm's own forward may raise its error.
    form: of a norm that is being called."""
    attributes, weight = norm.__dict__, None
    if form is None:
        form = FORMS.get(type(norm))
        if form is None or type(norm).__call__ is not nn.Module.__call__:
            return None
        if any(map(attributes.get, HOOKS)) or any(map(attributes.__contains__, OWN)):
            return None
    if not form.pinned.unchanged(norm, form.guards):
        return None
    if form.weight is not None:
        weight = attributes["_parameters"].get(form.weight)
        if type(weight) not in PLAIN_TENSORS or form.weight in attributes:
            return None
        if weight.dtype not in FLOATING:
            return None
        if x is not None and (
            weight.ndim != 1 or x.shape[-1:] != weight.shape or x.device != weight.device
        ):
            return None
    elif x is not None and not x.ndim:
        return None
    if residual is not None and not (
        type(x) is type(residual) and x.dtype is residual.dtype and x.shape == residual.shape
    ):
        return None
    eps = attributes.get(form.eps)
    if type(eps) is not float or not eps >= 0.0:  # nan is neither
        return None
    return weight, eps, form.casting_mode, form.offset


def serves(x: torch.Tensor, whatever: bool = False) -> bool:
    """True if a kernel may compute rms_norm of x: outside torch.compile, with unwatched module
    calls. whatever: x may be anything, and only torch.compile is looked for."""
    if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        return False
    if whatever:
        return True
    if type(x) not in PLAIN_TENSORS or x.is_nested or x.dtype not in FLOATING:
        return False
    if dispatch.forced is None:
        if x.dtype is torch.float64 or not dispatch.has_kernels_at(*FORWARD, x.device):
            return False
    return torch_unpatched(False)


@functools.lru_cache(maxsize=1024)
def forward_of(form: NormForm) -> Callable:
    """Returns a forward for the modules of a class: rms_norm, or the class's own for other
    calls."""
    kind, argument = form.kind, form.argument

    def forward(self, *args, **kwargs):
        x = args[0] if len(args) == 1 and not kwargs else kwargs.get(argument)
        if len(args) + len(kwargs) != 1 or not serves(x):
            return kind.forward(self, *args, **kwargs)
        found = parameters_of_norm(self, x, form=form)
        if found is None:
            return kind.forward(self, x)
        weight, eps, mode, offset = found
        return rms_norm(x, weight, eps, casting_mode=mode, offset=offset)

    forward.__wrapped__ = kind.forward  # whose arguments inspect and torch.fx then find
    forward.__qualname__ = "RMSNorm.forward"
    return forward
