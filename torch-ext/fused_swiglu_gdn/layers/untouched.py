"""Checks that torch is not patched and that nothing watches the calls of modules.

A kernel that reads a module's weight does less than a call of the module if nn.Linear or
torch.nn.functional is patched, if there is a hook for all modules, if torch traces or computes
forward derivatives, or inside a TorchFunctionMode other than that of torch.set_default_device. None
of this is visible on the module, so it is checked at every call.
"""

from types import BuiltinFunctionType, FunctionType
from typing import Optional

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_LINEAR, _SILU, _RELU, _GELU = F.linear, F.silu, F.relu, F.gelu
_LINEAR_FORWARD, _CALL, _CALL_IMPL = nn.Linear.forward, nn.Module.__call__, nn.Module._call_impl
_functorch = torch._C._functorch.peek_interpreter_stack  # None outside vmap, grad, jvp, ...


def is_torchs_own(function, file: str) -> bool:
    """True if the function is a built-in one, or defined in this file: no patch, no wrapper."""
    if isinstance(function, FunctionType):
        return function.__code__.co_filename == file and not hasattr(function, "__wrapped__")
    return isinstance(function, BuiltinFunctionType)


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
