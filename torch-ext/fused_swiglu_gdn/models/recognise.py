"""What a module is, told by its parts, and whether one of our layers computes the same.

A module is served only if that is certain: an MLP's class is run on stand-in parts and must give
the formula; a GDN layer has the parts of a known family and transformers' own forward.
"""

import functools
import inspect
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn

from .. import layers
from ..gdn.checks import MAX_HEAD_DIM
from ..gdn_layer.checks import MAX_TAPS
from ..layers.plain import activation_of, why_not_linear, why_not_tensor


class Finding(NamedTuple):
    layer: str  # the name of our layer, or what the module resembles
    reason: Optional[str] = None  # why it is left alone; None if it is served


GDN_PARTS = {
    "Qwen3_5GatedDeltaNet": {
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj",
    },
    "Qwen3NextGatedDeltaNet": {"in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj"},
    "OlmoHybridGatedDeltaNet": {
        "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_proj", "o_norm", "conv1d",
    },
}  # fmt: skip


def recognise(module: nn.Module) -> Optional[Finding]:
    """What our layers can do for a module; None if it is nothing like what they replace."""
    parts = set(module._modules)
    if {"gate_proj", "up_proj", "down_proj"} <= parts:
        finding = Finding("SwiGLUMLP", why_not_mlp(module, ("gate_proj", "up_proj")))
    elif {"gate_up_proj", "down_proj"} <= parts:
        finding = Finding("SwiGLUGateUp", why_not_mlp(module, ("gate_up_proj",)))
    elif "conv1d" in parts and "A_log" in module._parameters:
        finding = _gated_delta_net(module, parts)
    elif getattr(module._parameters.get("gate_up_proj"), "ndim", 0) == 3:
        return Finding("SwiGLU", "experts in one 3-D weight are not served yet")
    else:
        return None
    replaced = why_replaced(module)
    return finding if replaced is None else Finding(finding.layer, replaced)


def is_ours(forward) -> bool:
    """A forward bound to a module is the one of a layer of this package."""
    function = getattr(forward, "__func__", None)
    return any(function is getattr(layers, name).__dict__.get("forward") for name in layers.__all__)


def why_replaced(module: nn.Module) -> Optional[str]:
    """Somebody else gave the module another forward than its class's."""
    forward = module.__dict__.get("forward")
    if forward is None or is_ours(forward):
        return None
    function = getattr(forward, "__func__", forward)
    if function is type(module).forward:  # what `kernels` puts where it has no kernel
        return None
    if hasattr(module, "_hf_hook"):
        return "has an accelerate hook (offloading, or several devices)"
    where = getattr(function, "__module__", None) or type(function).__module__
    return f"its forward is replaced already, by {where}"


def why_not_mlp(module: nn.Module, inputs) -> Optional[str]:
    """The module is not down(act(gate(x)) * up(x)) on plain weights."""
    reason = _why_not_formula(type(module).forward, inputs)
    if reason is not None:
        return reason
    act = layers.swiglu.activation_function(module)
    if activation_of(act) is None:
        return f"its activation is {_name_of(act)}"
    for name in inputs:
        reason = why_not_linear(getattr(module, name))
        if reason is not None:
            return f"{name} {reason}"
    dtypes = {getattr(module, name).weight.dtype for name in inputs}
    return None if len(dtypes) == 1 else "its weights are of several dtypes"


def _name_of(function) -> str:
    kind = type(function) if isinstance(function, nn.Module) else function
    return getattr(kind, "__name__", repr(kind))


class _StandIn:
    """Has the parts that the formula names, and nothing else."""

    def __init__(self, parts):
        self.__dict__.update(parts)

    def __getattr__(self, name):
        raise AttributeError(name)


@functools.cache
def _why_not_formula(forward, inputs) -> Optional[str]:
    """The class's forward is not the formula: told by running it on small stand-in parts."""
    random = torch.Generator().manual_seed(0)
    x, gate, up, down = (
        torch.randn(shape, generator=random, dtype=torch.float64)
        for shape in ((2, 5), (3, 5), (3, 5), (4, 3))
    )
    parts = {"act_fn": F.silu, "activation_fn": F.silu, "down_proj": lambda z: z @ down.T}
    if inputs == ("gate_up_proj",):
        parts["gate_up_proj"] = lambda y: y @ torch.cat([gate, up]).T
    else:
        parts.update(gate_proj=lambda y: y @ gate.T, up_proj=lambda y: y @ up.T)
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    try:
        with torch.no_grad():
            got = forward(_StandIn(parts), x)
    except AttributeError as error:
        return f"its forward also uses self.{error}"
    except Exception as error:
        return f"its forward takes other arguments ({type(error).__name__})"
    if isinstance(got, torch.Tensor) and got.shape == expected.shape:
        if torch.allclose(got, expected, rtol=1e-9, atol=1e-12):
            return None
    return "its forward is another formula"


def _gated_delta_net(module: nn.Module, parts) -> Finding:
    for name, family in GDN_PARTS.items():
        if parts == family:
            return Finding(name, why_not_gated_delta_net(module, name))
    return Finding("GatedDeltaNet", "its parts are not those of a Gated DeltaNet layer known here")


def why_not_gated_delta_net(module: nn.Module, layer: str) -> Optional[str]:
    """The module has the parts of a family, but not its forward, sizes or plain weights."""
    forward = inspect.unwrap(type(module).forward)
    if not forward.__module__.startswith("transformers.models."):
        return "its forward is not that of transformers"
    ours = inspect.signature(getattr(layers, layer).forward).parameters
    if [p.name for p in ours.values()] != list(inspect.signature(forward).parameters):
        return "its forward takes other arguments"
    conv = module.conv1d
    tensors = {
        "A_log": module.A_log,
        "dt_bias": module.dt_bias,
        "conv1d.weight": conv.weight,
        "conv1d.bias": conv.bias,
    }
    for name, x in tensors.items():
        reason = why_not_tensor(x)
        if reason is not None:
            return f"{name} {reason}"
    taps = module.conv_kernel_size
    if type(conv) is not nn.Conv1d or conv.weight.shape[1:] != (1, taps):
        return f"conv1d is not a depthwise nn.Conv1d of {taps} taps"
    if not 2 <= taps <= MAX_TAPS:
        return f"its convolution has {taps} taps"
    if module.num_v_heads % module.num_k_heads or len(module.A_log) != module.num_v_heads:
        return "its heads of q, k and v do not match"
    if max(module.head_k_dim, module.head_v_dim) > MAX_HEAD_DIM:
        return f"its head dims are above {MAX_HEAD_DIM}"
    return None
