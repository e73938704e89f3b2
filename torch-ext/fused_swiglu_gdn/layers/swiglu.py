"""MLPs with a gate: down(act(gate(x)) * up(x)).

A call uses kernels if they exist for its device and if calling the MLP's parts does nothing beyond
a product with their weights. Every other call runs the forward of the MLP's own class.
"""

import functools
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..projection.project import mlp_of_a_token, project
from ..runtime import dispatch
from ..runtime.checks import FLOATING
from ..swiglu.api import fused_swiglu, fused_swiglu_mlp, silu_mul
from ..swiglu.reference import ACTIVATIONS
from .activations import activation_of
from .forward import Layer
from .fp8 import linear as fp8
from .norm import does_nothing
from .pinned import Pinned, call_check
from .plain import PLAIN_TENSORS, parameters_of, same_dtype, torch_unpatched
from .projections import projections as of_linears
from .tensor_parallel import Shards, mlp_on_shards, shards

SWIGLU = ("swiglu.forward", "swiglu_fwd")
DROPOUTS = (nn.Dropout, nn.Identity)  # which drop nothing in evaluation


class Roles(NamedTuple):
    """The attributes of an MLP by their role in down(act(gate(x)) * up(x))."""

    gate: str
    up: Optional[str]  # None: gate makes both, one half each
    down: str
    act: Optional[str]  # the attribute that is the activation, or None and
    function: Optional[str] = None  # the name of the one that the forward calls itself
    gate_first: bool = True  # gate is the first half of what `gate` makes
    dropouts: Tuple[str, ...] = ()  # attributes of DROPOUTS
    rates: Tuple[str, ...] = ()  # attributes that are the p of a call of dropout
    casts: bool = False  # it casts to the dtype of down's weight, or reads weights itself


def activation(mlp: nn.Module, roles: Roles) -> Optional[str]:
    """The name of its activation for fused_swiglu, or None."""
    if roles.act is None:
        return roles.function
    attributes = mlp.__dict__
    if roles.act in attributes:  # a function, or what hides the module of this name
        return activation_of(attributes[roles.act])
    return activation_of(attributes["_modules"].get(roles.act))


def drops_out(mlp: nn.Module, roles: Roles) -> bool:
    """True if this call would drop values."""
    for name in roles.dropouts:
        if name in mlp.__dict__ or not does_nothing(mlp.__dict__["_modules"].get(name)):
            return True
    return bool(roles.rates) and mlp.training and any(getattr(mlp, name) for name in roles.rates)


def projections(mlp: nn.Module, roles: Roles) -> Optional[tuple]:
    """w_gate, w_up, b_gate, b_up of an MLP whose projections are plain, else None."""
    modules = mlp.__dict__["_modules"]
    names = (roles.gate,) if roles.up is None else (roles.gate, roles.up)
    found = parameters_of(*map(modules.get, names))
    if found is None:
        return None
    weight, bias = found[0]
    if roles.up is not None:
        w_up, b_up = found[1]
        return weight, w_up, bias, b_up
    if weight.shape[0] % 2:
        return None
    w_gate, w_up = weight.chunk(2)  # [N, K] each
    b_gate, b_up = (None, None) if bias is None else bias.chunk(2)
    return (w_gate, w_up, b_gate, b_up) if roles.gate_first else (w_up, w_gate, b_up, b_gate)


def shards_of(mlp: nn.Module, roles: Roles) -> Optional[Shards]:
    """The weights of an MLP that is sharded for tensor parallelism, else None."""
    if roles.up is None or roles.casts or roles.dropouts or roles.rates:
        return None
    modules = mlp.__dict__["_modules"]
    return shards(modules.get(roles.gate), modules.get(roles.up), modules.get(roles.down))


def _of_wrapped(mlp: nn.Module, x: torch.Tensor, roles: Roles, name: str) -> Optional[torch.Tensor]:
    """serve() for an MLP whose projections do more than a product: each is called."""
    modules = mlp.__dict__["_modules"]
    gate, up, down = (modules.get(part) for part in (roles.gate, roles.up, roles.down))
    if gate is None or down is None or roles.casts or (up is None) != (roles.up is None):
        return None
    if up is not None:
        g, u = of_linears(x, gate, up)
    else:
        g = gate(x)
        g, u = g.chunk(2, dim=-1) if roles.gate_first else reversed(g.chunk(2, dim=-1))
    plain = type(g) in PLAIN_TENSORS and type(u) in PLAIN_TENSORS
    if plain and g.shape == u.shape and g.dtype is u.dtype and g.dtype in FLOATING:
        return down(silu_mul(g, u, activation=name))
    act = getattr(mlp, roles.act) if roles.act is not None else ACTIVATIONS[name]
    return down(act(g) * u)


def _of_others(
    mlp: nn.Module, x: torch.Tensor, roles: Roles, name: str, compiling: bool
) -> Optional[torch.Tensor]:
    """serve() for an MLP whose projections are not plain."""
    y, modules = None, mlp.__dict__["_modules"]
    gate = modules.get(roles.gate)
    if not compiling:
        if gate is not None and "forward" in gate.__dict__:
            found = shards_of(mlp, roles)
            fits = found is not None and x.shape[-1] == found.w_gate.shape[1]
            y = mlp_on_shards(x, found, name) if fits and same_dtype(x, *found[:6]) else None
        elif name == "silu" and not roles.casts:
            y = fp8.mlp(x, gate, modules.get(roles.up), modules.get(roles.down), roles.gate_first)
    return _of_wrapped(mlp, x, roles, name) if y is None else y


def _without_gradient(
    x: torch.Tensor, found: tuple, w_down: torch.Tensor, b_down: Optional[torch.Tensor], name: str
) -> torch.Tensor:
    """fused_swiglu_mlp of weights and biases as projections() has them, by kernels for few tokens
    where there are no biases."""
    w_gate, w_up, b_gate, b_up = found
    plain = b_gate is None and b_up is None and b_down is None
    y = mlp_of_a_token(x, w_gate, w_up, w_down, name) if plain else None
    if y is not None:
        return y
    z = fused_swiglu(x, *found, activation=name)
    products = project(z, [w_down]) if plain else None
    return products[0] if products else F.linear(z, w_down, b_down)


def serve(
    mlp: nn.Module, x: torch.Tensor, roles: Roles, compiling: Optional[bool] = None
) -> Optional[torch.Tensor]:
    """The MLP's output for x [..., K] by kernels, or None if the MLP itself must be called.
    compiling: torch.compiler.is_compiling(), if the caller knows it."""
    if type(x) not in PLAIN_TENSORS:
        return None
    if compiling is None:
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
    if compiling or dispatch.forced is not None:
        if not dispatch.serves(*SWIGLU, x, compiling):
            return None
    elif x.dtype is torch.float64 or not dispatch.has_kernels_at(*SWIGLU, x.device):
        return None
    attributes = mlp.__dict__
    if roles.gate in attributes or roles.up in attributes or roles.down in attributes:
        return None  # they hide the modules of these names
    if x.is_nested or not torch_unpatched(compiling):
        return None
    if (roles.dropouts or roles.rates) and drops_out(mlp, roles):
        return None
    name = activation(mlp, roles)
    if name is None:
        return None
    gate = attributes["_modules"].get(roles.gate)
    plain = type(gate) is nn.Linear and "forward" not in gate.__dict__  # as that of shards is
    found = projections(mlp, roles) if plain else None
    if found is None:
        return _of_others(mlp, x, roles, name, compiling)
    down = attributes["_modules"].get(roles.down)
    last = parameters_of(down)
    try:
        if last is not None and same_dtype(x, *found, *last[0]):
            if not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
                return _without_gradient(x, found, *last[0], name)
            (w_gate, w_up, b_gate, b_up), (w_down, b_down) = found, last[0]
            return fused_swiglu_mlp(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation=name)
        if down is None or roles.casts or not same_dtype(x, *found):
            return None
        z = fused_swiglu(x, *found, activation=name)
    except (TypeError, ValueError):  # what does not fit is the modules' to take or to refuse
        return None
    return down(z)


class Form(NamedTuple):
    """A class of MLPs whose forward is the formula."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    argument: str  # the name of its argument
    roles: Roles


FORMS: Dict[type, Form] = {}  # what was recognised so far, for forwards that `kernels` binds


@functools.lru_cache(maxsize=1024)
def forward_of(form: Form) -> Callable:
    """Returns a forward for the modules of a class: by kernels, or the class's own for other
    calls."""
    kind, pinned, guards, argument, roles = form
    unchanged = call_check(pinned, guards)

    def forward(self, *args, **kwargs):
        if len(args) == 1 and not kwargs:
            x = args[0]
        elif not args and len(kwargs) == 1 and argument in kwargs:
            x = kwargs[argument]
        else:
            return kind.forward(self, *args, **kwargs)  # raises, as ever
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
        same = unchanged(self, True) if compiling else pinned.unchanged(self, guards)
        y = serve(self, x, roles, compiling) if same else None
        return kind.forward(self, x) if y is None else y

    forward.__wrapped__ = kind.forward  # whose arguments inspect and torch.fx then find
    forward.__qualname__ = f"{'SwiGLUMLP' if roles.up else 'SwiGLUGateUp'}.forward"
    return forward


def _bound(mlp: nn.Module, x: torch.Tensor, default: Roles) -> torch.Tensor:
    """The output of an MLP to which `kernels` has bound our forward: by the form of its class, if
    that is known, else with the names of `default`."""
    if type(mlp) in FORMS:
        return forward_of(FORMS[type(mlp)])(mlp, x)
    act = default.act if hasattr(mlp, default.act) else "activation_fn"
    y = serve(mlp, x, default._replace(act=act))
    if y is not None:
        return y
    gate = getattr(mlp, default.gate)(x)
    gate, up = gate.chunk(2, dim=-1) if default.up is None else (gate, mlp.up_proj(x))
    return mlp.down_proj(getattr(mlp, act)(gate) * up)


_SEPARATE = Roles("gate_proj", "up_proj", "down_proj", "act_fn")
_JOINED = Roles("gate_up_proj", None, "down_proj", "act_fn")


class SwiGLUMLP(Layer):
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)), both products and the gate in one launch.

    For the MLP of Llama, Mistral, Qwen2, Qwen3, Qwen3.5, OLMo and every other of that shape, with
    or without biases. With an activation, adapter, hook or weight that the kernel does not support
    the modules themselves are called.

    Shapes:
        x: [..., K] -> [..., K]
    """

    def forward(self, x):
        return _bound(self, x, _SEPARATE)


class SwiGLUGateUp(Layer):
    """SwiGLUMLP on one weight [gate; up]: gate, up = gate_up_proj(x).chunk(2, -1). Phi-3, GLM-4.

    Shapes:
        x: [..., K] -> [..., K]
    """

    def forward(self, x):
        return _bound(self, x, _JOINED)


class _GateUpConversion:
    """The conversion of a checkpoint's gate_proj and up_proj to gate_up_proj, and back for saving.

    It is a descriptor, since a kernel may import transformers only when transformers reads this.
    """

    def __get__(self, instance, owner):
        from transformers.core_model_loading import Concatenate, WeightConverter

        return [
            WeightConverter(
                [f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"],
                f"mlp.gate_up_proj.{kind}",
                operations=[Concatenate(dim=0)],
            )
            for kind in ("weight", "bias")
        ]


class SwiGLUGateUpLayout(nn.Module):
    """The parameters of SwiGLUGateUp, which transformers builds in place of an MLP.

    With from_pretrained(..., kernel_config=KernelConfig({"LlamaMLP": "org/repo:SwiGLUGateUp"})).
    """

    conversion_mapping = _GateUpConversion()

    def __init__(self, config, intermediate_size=None):
        super().__init__()
        from transformers.activations import ACT2FN

        hidden = intermediate_size or config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)
