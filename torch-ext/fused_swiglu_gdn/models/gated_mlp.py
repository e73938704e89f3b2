"""Which modules are gated MLPs, down(act(gate(x)) * up(x)), and which of them are served.

A module is served if its class's forward is a form that forms.py reads, if a run of it on stand-in
parts agrees, if nothing in the class or on the instance stands between the forward and its parts,
and if these are what the kernels can read. What can change later is looked at again in every call.
"""

import functools
from typing import NamedTuple, Optional, Union

from torch import nn

from ..layers import swiglu
from ..layers.plain import told, why_not_linear
from ..layers.swiglu import Form, Roles
from ..layers.untouched import why_patched
from .forms import Formula, Refused, formula_of
from .mlp_trial import why_another_formula
from .serving import own_class
from .source import static, why_odd_class

# the parts by which a module that is left alone is told to be a gated MLP: the report names it
KNOWN_PARTS = (
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"w1", "w2", "w3"},
    {"wi_0", "wi_1", "wo"},
    {"Wi", "Wo"},
    {"input_linear", "output_linear"},
)


class GatedMLP(NamedTuple):
    layer: str  # the name of our layer
    reason: Optional[str]  # why it is left alone; None if it is served
    form: Optional[Form] = None


def gated_mlp(module: nn.Module) -> Optional[GatedMLP]:
    """What our layers can do for a module; None if it is no gated MLP."""
    kind, parts = own_class(module), module._modules
    resembles = any(names <= set(parts) for names in KNOWN_PARTS)
    if not resembles and sum(type(part) is nn.Linear for part in parts.values()) < 2:
        return None
    forward = static(kind, "forward")
    code = getattr(forward, "__code__", None)
    formula = _formula(forward, code)
    layer = "SwiGLUGateUp" if "gate_up_proj" in parts else "SwiGLUMLP"
    if not isinstance(formula, Formula):
        return GatedMLP(layer, formula) if resembles else None
    layer = "SwiGLUGateUp" if formula.up is None else "SwiGLUMLP"
    names = (formula.gate, formula.up, formula.act, *formula.calls, *formula.rates, "training")
    reason = why_patched() or why_odd_class(kind, filter(None, names), "__call__")
    if reason is not None:
        return GatedMLP(layer, reason)
    roles = _roles(module, formula)
    if isinstance(roles, str):
        return GatedMLP(layer, roles)
    reason = _why_another_formula(kind, forward, code, roles) or _why_not_parts(module, roles)
    form = Form(kind, forward, code, formula.argument, roles)
    if reason is None:
        swiglu.FORMS[kind] = form
    return GatedMLP(layer, reason, form)


@functools.lru_cache(maxsize=4096)
def _formula(forward: object, code: object) -> Union[Formula, str]:
    """What the forward is while it has this code, or why it is no known form."""
    try:
        return formula_of(forward)
    except Refused as error:
        return str(error)


@functools.lru_cache(maxsize=4096)
def _why_another_formula(kind: type, forward: object, code: object, roles: Roles) -> Optional[str]:
    return why_another_formula(kind, forward, roles)


def _roles(module: nn.Module, formula: Formula) -> Union[Roles, str]:
    """Which attribute is what, or why that is not certain."""
    parts, attributes = module._modules, module.__dict__
    dropouts = tuple(name for name in formula.calls if type(parts.get(name)) is nn.Dropout)
    down = [name for name in formula.calls if name not in dropouts]
    if len(down) != 1:
        return f"its forward also calls {down[0]}" if down else "its forward is another formula"
    if not set(formula.casts) <= set(down):
        return "its forward casts to another dtype"
    for name in (formula.gate, formula.up, *formula.calls):
        if name is not None and (name in attributes or parts.get(name) is None):
            return f"{name} is no module of its own"
    for name in formula.rates:
        if not isinstance(attributes.get(name), (int, float)):
            return f"{name} is no number"
    return Roles(
        gate=formula.gate,
        up=formula.up,
        down=down[0],
        act=formula.act,
        function=formula.function,
        gate_first=formula.gate_first,
        dropouts=dropouts,
        rates=formula.rates,
        casts=bool(formula.casts),
    )


def _why_not_parts(module: nn.Module, roles: Roles) -> Optional[str]:
    """The parts are not plain weights, or the kernels have not its activation."""
    if swiglu.activation(module, roles) is None:
        act = module.__dict__.get(roles.act, module._modules.get(roles.act))
        return f"its activation is {_name_of(act)}"
    if swiglu.shards_of(module, roles) is not None:
        return None
    if swiglu.drops_out(module, roles):
        return "it drops values out: it has dropout and is in training"
    for name in filter(None, (roles.gate, roles.up)):
        reason = why_not_linear(module._modules[name])
        if reason is not None:  # then it is called
            weights = module._modules[name].parameters()
            nowhere = roles.casts or any(told(weight, "is_meta") for weight in weights)
            return f"{name} {reason}" if nowhere else None
    found = swiglu.projections(module, roles)
    if found is None or found[0].shape != found[1].shape or found[0].dtype != found[1].dtype:
        return "its weights are of several dtypes, or sizes"
    return None


def _name_of(function: object) -> str:
    kind = type(function) if isinstance(function, nn.Module) else function
    name = getattr(kind, "__name__", repr(kind))
    exact = name in ("GELU", "GELUActivation", "gelu") and _exact(function)
    return f"{name}, by erf" if exact else name


def _exact(gelu: object) -> bool:
    return getattr(gelu, "approximate", "none") == "none"
