"""What a module is, told by its parts, and whether one of our layers computes the same.

A module is served only if that is certain: an MLP's class is run on stand-in parts and must give
the formula; a GDN layer has the parts of a known family and transformers' own forward.
"""

import functools
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn

from .. import layers
from ..layers.plain import activation_of, why_not_linear
from .gated_delta_net import gated_delta_net
from .serving import is_served, why_replaced


class Finding(NamedTuple):
    layer: str  # the name of our layer, or what the module resembles
    reason: Optional[str] = None  # why it is left alone; None if it is served


def recognise(module: nn.Module) -> Optional[Finding]:
    """What our layers can do for a module; None if it is nothing like what they replace."""
    if is_served(module):
        return Finding(type(module).served_as)
    parts = set(module._modules)
    if {"gate_proj", "up_proj", "down_proj"} <= parts:
        finding = Finding("SwiGLUMLP", why_not_mlp(module, ("gate_proj", "up_proj")))
    elif {"gate_up_proj", "down_proj"} <= parts:
        finding = Finding("SwiGLUGateUp", why_not_mlp(module, ("gate_up_proj",)))
    elif "conv1d" in parts and "A_log" in module._parameters:
        finding = Finding(*gated_delta_net(module))
    elif getattr(module._parameters.get("gate_up_proj"), "ndim", 0) == 3:
        return Finding("SwiGLU", "experts in one 3-D weight are not served yet")
    else:
        return None
    replaced = why_replaced(module)
    return finding if replaced is None else Finding(finding.layer, replaced)


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
