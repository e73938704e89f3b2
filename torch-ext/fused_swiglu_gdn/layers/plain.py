"""Checks that calling a module is equivalent to reading its weight.

A layer replaces a forward, so it meets all other changes to the model: adapters, quantized or
sharded weights, hooks. Functions `why_...` return the reason against it, or None.

Reading a weight is also less than a call of the module if nn.Linear or torch.nn.functional is
patched, if there is a hook for all modules, if torch traces or computes forward derivatives, or
inside a TorchFunctionMode other than that of torch.set_default_device. None of this is visible on
the module, so it is checked at every call: torch_unpatched().
"""

import functools
from types import BuiltinFunctionType, FunctionType
from typing import List, Optional, Tuple

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..runtime.checks import FLOATING

# What an instance holds whose call does more than its class's forward: hooks, and others' functions
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OWN = ("forward", "_call_impl", "_hf_hook")  # the last: accelerate's
OWN_LINEAR = (*OWN, "weight", "bias")
PLAIN_TENSORS = (nn.Parameter, torch.Tensor)


def told(x: object, name: str) -> object:
    """x.name, bypassing the tensor's class; None if there is no such attribute or it raises.

    Subclasses of Tensor may answer such a question in their own way, or raise.
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return getattr(x, name, None)
    except Exception:
        return None


def why_hooked(module: nn.Module) -> Optional[str]:
    """Reason if calling the module does more than its class's forward, or None."""
    attributes = module.__dict__
    if any(map(attributes.get, HOOKS)):
        return f"has {'forward' if any(map(attributes.get, HOOKS[:2])) else 'backward'} hooks"
    if "_hf_hook" in attributes:
        return "has an accelerate hook (offloading, or several devices)"
    return None


def why_not_tensor(x: Optional[torch.Tensor]) -> Optional[str]:
    """Why x is not a plain dense tensor, or None."""
    if x is None:
        return None
    if type(x) not in PLAIN_TENSORS:
        return f"is a {type(x).__name__}"
    if hasattr(x, "ds_id"):
        return "is partitioned by ZeRO-3"
    if x.dtype not in FLOATING:
        return f"is of dtype {str(x.dtype).replace('torch.', '')}"
    if x.is_meta:
        return "is on the meta device"
    return None


def why_not_linear(module: Optional[nn.Module]) -> Optional[str]:
    """Why the module is not just x @ weight.T + bias, or None."""
    if type(module) is not nn.Linear:
        return f"is a {type(module).__module__}.{type(module).__name__}, not nn.Linear"
    attributes = module.__dict__
    if "forward" in attributes or "_call_impl" in attributes:
        return "has a forward of its own"
    reason = why_hooked(module)
    if reason is not None:
        return reason
    parameters = attributes["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or "weight" in attributes or "bias" in attributes:
        return "has a weight or a bias that is no parameter of its own"
    reason = why_not_tensor(weight)
    if reason is not None:
        return f"has a weight that {reason}"
    if bias is not None and (type(bias) not in PLAIN_TENSORS or bias.dtype is not weight.dtype):
        return f"has a bias that {why_not_tensor(bias) or 'is of another dtype'}"
    return None


def parameters_of(*modules: Optional[nn.Module]) -> Optional[List[tuple]]:
    """(weight, bias) of each module if calling it is only a product with them, else None.

    It makes the checks of why_not_linear, at every call, except for dtypes and devices.
    """
    found = []
    for module in modules:
        if type(module) is not nn.Linear:
            return None
        attributes = module.__dict__
        if any(map(attributes.get, HOOKS)) or any(map(attributes.__contains__, OWN_LINEAR)):
            return None
        parameters = attributes["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if type(weight) not in PLAIN_TENSORS:
            return None
        if bias is not None and type(bias) not in PLAIN_TENSORS:
            return None
        found.append((weight, bias))
    return found


def is_plain(module: nn.Module) -> bool:
    """True if calling the module does no more than the forward of its class."""
    attributes = module.__dict__
    return (
        not any(map(attributes.get, HOOKS))
        and not any(map(attributes.__contains__, OWN))
        and type(module).__call__ is nn.Module.__call__
    )


def around_by_torch(kind: type) -> Optional[type]:
    """The class that torch.distributed has put before a module's class, as fully_shard does, or
    None: it makes a subclass of the two, and has no forward."""
    first, *others = kind.__bases__
    return first if others and first.__module__.startswith("torch.distributed.") else None


def served_as(module: nn.Module) -> Optional[str]:
    """The name of our layer whose forward runs where the module is called, or None: as well if its
    class is a subclass of the one that serve() made, which inherits the name, since the forward of
    that may do more. Where a call asks it of modules without hooks, type(module).__dict__ is read
    instead."""
    kind = type(module)
    kind = kind if around_by_torch(kind) is None else kind.__bases__[1]
    return kind.__dict__.get("served_as")


def same_dtype(x: torch.Tensor, *weights: Optional[torch.Tensor]) -> bool:
    """True if x can be multiplied with the weights, or autocast converts them."""
    if type(x) not in PLAIN_TENSORS:
        return False
    dtype = x.dtype
    for weight in weights:
        if weight is not None and weight.dtype is not dtype:
            castable = all([w is None or w.dtype in FLOATING for w in weights])
            return castable and torch.is_autocast_enabled(x.device.type)
    return True


# -- torch as it was when this package was imported

_LINEAR, _SILU, _RELU, _GELU = F.linear, F.silu, F.relu, F.gelu
_LINEAR_FORWARD, _CALL, _CALL_IMPL = nn.Linear.forward, nn.Module.__call__, nn.Module._call_impl
_functorch = torch._C._functorch.peek_interpreter_stack  # None outside vmap, grad, jvp, ...


def is_torchs_own(function, file: str) -> bool:
    """True if the function is a built-in one, or defined in this file: no patch, no wrapper."""
    if isinstance(function, FunctionType):
        return function.__code__.co_filename == file and not hasattr(function, "__wrapped__")
    return isinstance(function, BuiltinFunctionType)


@functools.cache
def why_patched() -> Optional[str]:
    """Reason if torch had been patched before this package was imported, or None."""
    for name, function in (("linear", _LINEAR), ("silu", _SILU), ("relu", _RELU), ("gelu", _GELU)):
        if not is_torchs_own(function, F.__file__):
            return f"torch.nn.functional.{name} is patched"
    if not is_torchs_own(_LINEAR_FORWARD, nn.modules.linear.__file__):
        return "nn.Linear.forward is patched"
    if not (is_torchs_own(_CALL, modules.__file__) and is_torchs_own(_CALL_IMPL, modules.__file__)):
        return "nn.Module.__call__ is patched"
    return None


def torch_unpatched(compiling: Optional[bool] = None) -> bool:
    """True if reading a plain module's weight is equivalent to calling the module, in this call.

    compiling: torch.compiler.is_compiling(), if the caller knows it.
    """
    if (
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
        or F.linear is not _LINEAR
        or F.silu is not _SILU
        or F.gelu is not _GELU
        or F.relu is not _RELU
        or nn.Linear.forward is not _LINEAR_FORWARD
        or nn.Linear.__call__ is not _CALL
        or nn.Linear._call_impl is not _CALL_IMPL
        or forward_ad._current_level >= 0
    ):
        return False
    if compiling is None:
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
    if compiling:
        return True
    if _functorch() is not None or torch._C._get_tracing_state() is not None:
        return False
    return not torch._C._len_torch_function_stack() or all(
        [type(mode) is DeviceContext for mode in _get_current_function_mode_stack()]
    )


Named = List[Tuple[str, nn.Module]]  # modules of a model by their paths


def named_modules(model: nn.Module) -> Named:
    """All (name, module) of a model in nn.Module's order, without its generator for each level."""
    found, known, left = [], set(), [("", model)]
    while left:
        name, module = left.pop()
        if id(module) not in known:
            known.add(id(module))
            found.append((name, module))
            inner = list(module._modules.items()) if module._modules else ()
            for part, each in reversed(inner):
                if each is not None:
                    left.append((f"{name}.{part}" if name else part, each))
    return found
