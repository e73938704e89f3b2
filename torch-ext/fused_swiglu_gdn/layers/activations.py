"""Maps a model's activation to the name of fused_swiglu's activation."""

import functools
import sys
from typing import Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .plain import HOOKS, is_torchs_own

_OF_TORCH = {"SiLU": "silu", "ReLU": "relu", "GELU": "gelu_tanh"}
# NewGELUActivation spells out the formula that the other two ask torch for
_OF_TRANSFORMERS = {
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}
_HOMES = {"torch.nn.modules.activation": _OF_TORCH, "transformers.activations": _OF_TRANSFORMERS}
_FUNCTIONS = {F.silu: "silu", F.relu: "relu", torch.relu: "relu"}


# of classes that were met: the name, and the class's forward as it was then
_known: Dict[type, Tuple[str, Callable]] = {}


def _meet(kind: type) -> Optional[Tuple[str, Callable]]:
    """The entry of a class whose forward is that of its file, or None."""
    home = kind.__module__
    name = _HOMES.get(home, {}).get(kind.__name__)
    if name is None or getattr(sys.modules[home], kind.__name__, None) is not kind:
        return None
    if not is_torchs_own(kind.forward, sys.modules[home].__file__):
        return None
    _known[kind] = name, kind.forward
    return _known[kind]


for _kind in (nn.SiLU, nn.ReLU, nn.GELU):  # what torch compiles may not look into files
    _meet(_kind)


def activation_of(function) -> Optional[str]:
    """The name that fused_swiglu has for an activation, or None."""
    if not isinstance(function, nn.Module):
        return _of_function(function)
    kind = type(function)
    name, forward = _known.get(kind) or _meet(kind) or (None, None)
    if name is None or kind.forward is not forward:
        return None
    attributes = function.__dict__
    if any(map(attributes.get, HOOKS)) or "_call_impl" in attributes or "_hf_hook" in attributes:
        return None
    if "forward" in attributes:
        # `kernels` binds the class's own where it has no kernel
        if getattr(attributes["forward"], "__func__", None) is not forward:
            return None
    return None if name == "gelu_tanh" and not _by_tanh(attributes) else name


def _by_tanh(attributes: dict) -> bool:
    """True if a GELU uses the tanh form, if its class leaves that to the instance."""
    if "approximate" in attributes:  # nn.GELU
        return attributes["approximate"] == "tanh"
    return "act" not in attributes or _of_function(attributes["act"]) == "gelu_tanh"


def _of_function(function) -> Optional[str]:
    if isinstance(function, functools.partial):
        tanh = function.func is F.gelu and function.keywords == {"approximate": "tanh"}
        return "gelu_tanh" if tanh and not function.args else None
    try:
        return _FUNCTIONS.get(function)
    except TypeError:  # cannot be hashed, so it is none of torch's
        return None
