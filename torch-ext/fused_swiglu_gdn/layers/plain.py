"""Whether reading a module's weight is the same as calling the module.

A layer replaces a forward, so it meets whatever else was done to the model: adapters, quantized or
sharded weights, hooks. Each function gives the reason why not, or None if all is plain.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..runtime.checks import FLOATING

PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_ACTIVATIONS = {F.silu: "silu", F.relu: "relu", nn.SiLU: "silu", nn.ReLU: "relu"}
_TRANSFORMERS_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def why_hooked(module: nn.Module) -> Optional[str]:
    """Calling the module does more than its class's forward."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "has backward hooks"
    if "_hf_hook" in module.__dict__:
        return "has an accelerate hook (offloading, or several devices)"
    return None


def why_not_tensor(x: Optional[torch.Tensor]) -> Optional[str]:
    """x is sharded, quantized or without data."""
    if x is None:
        return None
    if type(x) not in PLAIN_TENSORS:
        return f"is a {type(x).__name__}"
    if x.dtype not in FLOATING:
        return f"is of dtype {str(x.dtype).replace('torch.', '')}"
    if x.is_meta:
        return "is on the meta device"
    return None


def why_not_linear(module: nn.Module) -> Optional[str]:
    """The module is not just x @ weight.T + bias."""
    if type(module) is not nn.Linear:
        return f"is a {type(module).__module__}.{type(module).__name__}, not nn.Linear"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    reason = why_hooked(module)
    if reason is not None:
        return reason
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None:
        return "has a weight that is no parameter of its own"
    reason = why_not_tensor(weight)
    if reason is not None:
        return f"has a weight that {reason}"
    if bias is not None and type(bias) not in PLAIN_TENSORS:
        return f"has a bias that {why_not_tensor(bias)}"
    return None


def activation_of(function) -> Optional[str]:
    """The name that fused_swiglu has for an activation; None for one that it has not."""
    if isinstance(function, nn.Module):
        kind = type(function)
        if why_hooked(function) is not None:
            return None
        if kind is nn.GELU:
            return "gelu_tanh" if function.approximate == "tanh" else None
        if kind.__module__ == "transformers.activations":
            return _TRANSFORMERS_ACTIVATIONS.get(kind.__name__)
        return _ACTIVATIONS.get(kind)
    return _ACTIVATIONS.get(function)


def parameters_of(module: nn.Module) -> Optional[Tuple[torch.Tensor, Optional[torch.Tensor]]]:
    """The weight and the bias, if calling the module is no more than a product with them."""
    if why_not_linear(module) is not None:
        return None
    parameters = module._parameters  # quicker than module.weight, which nn.Module looks for
    return parameters["weight"], parameters["bias"]


def same_dtype(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """x can be multiplied with the weights, or autocast will see to it."""
    if type(x) not in PLAIN_TENSORS:
        return False
    for weight in weights:
        if x.dtype is not weight.dtype:
            return torch.is_autocast_enabled(x.device.type)
    return True
