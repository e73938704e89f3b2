"""Routed experts of transformers' models, served through transformers' own choice of experts
implementation: no forward is replaced, so that expert parallelism and hooks stay as they are.

A class is served if transformers dispatches its forward, and its gate and its own loop over the
experts, run on small weights, give the formula of experts/reference.py. All else is left to the
implementation that was chosen before, or to transformers' grouped_mm where that was ours.
"""

import inspect
import itertools
from typing import Iterator, List, Optional, Set, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..experts import ops
from ..experts.api import fused_experts
from ..experts.call import ALPHA
from ..layers.activations import activation_of
from ..layers.pinned import Pinned
from ..layers.pins import Walk, is_of, names_in
from ..layers.plain import Named, told, why_not_tensor
from ..runtime.dtypes import HALF
from .code import Refused
from .experts_before import BEFORE, fall_back, loop_of
from .experts_trial import FLAGS, Form, computes
from .facts import ASK
from .fp8 import (
    form_of_fp8,
    fp8_experts_forward,
    is_fp8_experts,
    why_not_fp8_experts,
    why_not_fp8_here,
)
from .mlp import NAMED
from .report import Row
from .serving import is_of_transformers, why_not_on
from .trial import while_unchanged
from .trust import code_of, is_named

NAME = "fused_swiglu_gdn"
REPLACED = (None, "eager", "batched_mm", "grouped_mm")  # implementations that kernelize replaces
STACKED = frozenset(("gate_up_proj", "up_proj"))  # weights of experts, of all of them in one


def register_experts() -> str:
    """Makes "fused_swiglu_gdn" an experts implementation of transformers.

    After it, `from_pretrained(..., experts_implementation="fused_swiglu_gdn")` and
    `model.set_experts_implementation("fused_swiglu_gdn")` work; kernelize(model) calls it itself.
    Experts that the kernels do not serve are computed by transformers' grouped_mm.

    Returns:
        The name.

    Raises:
        ImportError: transformers is not installed, or has no experts implementations.

    Example:
        >>> from transformers import AutoModelForCausalLM, Qwen3MoeConfig
        >>> config = Qwen3MoeConfig(vocab_size=99, hidden_size=32, moe_intermediate_size=16,
        ...                         num_hidden_layers=2, num_attention_heads=2, num_experts=4,
        ...                         num_key_value_heads=2, num_experts_per_tok=2)
        >>> model = AutoModelForCausalLM.from_config(config).eval()
        >>> model.set_experts_implementation(register_experts())
        >>> model(torch.tensor([[3, 1, 4]])).logits.shape
        torch.Size([1, 3, 99])
    """
    from transformers.integrations import finegrained_fp8, moe

    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_forward)
    return NAME


def experts_forward(
    self: nn.Module, *given: torch.Tensor, **named: torch.Tensor
) -> torch.Tensor:  # [T, H]
    """The function that transformers calls for a module of experts: x [T, H], ids [T, K], weights
    [T, K]."""
    if torch.compiler.is_compiling() and "parametrizations" in self.__dict__["_modules"]:
        # a guard on what is kept of a parametrized weight (PEFT's target_parameters) fails at once
        reason = "its weights are parametrized, and the call is traced"
    else:
        reason = why_not_experts(self) or why_not_here(self)
    if reason is None and (named or len(given) != 3 or not isinstance(given[0], torch.Tensor)):
        reason = "it is not called with three tensors by position"
    if reason is not None:
        return _fall_back(self, reason, *given, **named)
    hidden_states, top_k_index, top_k_weights = given
    dtype, kind = self.gate_up_proj.dtype, hidden_states.device.type
    mixed = torch.is_autocast_enabled(kind)
    if hidden_states.dtype is not dtype and not mixed and self.__dict__.get(BEFORE) == "eager":
        return _fall_back(self, "its input is of another dtype", *given)
    form = form_of(type(self))
    activation = form.activation or activation_of(self.act_fn)
    limit = None if form.limit is None else float(getattr(self, form.limit))
    args = (hidden_states.to(dtype), *weights_of(self), top_k_index, top_k_weights)
    options = {"activation": activation, "limit": limit, "interleaved": form.interleaved}
    if flag(self, "has_bias"):
        options |= {"b_gate_up": self.gate_up_proj_bias, "b_down": self.down_proj_bias}
    try:
        if mixed:
            with torch.autocast(kind, enabled=False):  # in the weights' dtype, as grouped_mm
                return fused_experts(*args, **options).to(hidden_states.dtype)
        return fused_experts(*args, **options).to(hidden_states.dtype)
    except (TypeError, ValueError) as error:  # what does not fit is transformers' to take or refuse
        reason = str(error)
    return _fall_back(self, reason, *given)


def _fall_back(self, reason: str, *args, **named) -> torch.Tensor:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return fall_back(self, ALL_EXPERTS_FUNCTIONS, reason, *args, **named)


def flag(module: nn.Module, name: str) -> bool:
    """A flag of transformers' classes; older ones have not all of them."""
    return getattr(module, name, FLAGS[name])


def weights_of(module: nn.Module) -> Tuple[torch.Tensor, torch.Tensor]:
    """w_gate_up [E, 2 I, H] and w_down [E, H, I]."""
    w_gate_up, w_down = module.gate_up_proj, module.down_proj
    return (w_gate_up.mT, w_down.mT) if flag(module, "is_transposed") else (w_gate_up, w_down)


_named: Set[type] = set()  # classes that a user has named


@torch.compiler.assume_constant_result
def form_of(kind: type) -> Union[Form, str]:
    """The form of a class's experts, or why it is not served: a constant while tracing."""
    functions = kind.forward, getattr(kind, "_apply_gate", None), kind in _named
    return while_unchanged(_find, kind, functions)


def _find(kind: type) -> Tuple[Union[Form, str], Tuple[Pinned, ...]]:
    try:
        from transformers.integrations import moe
    except ImportError:
        raise Refused("transformers has no experts implementations") from None
    loop = loop_of(kind, moe.ALL_EXPERTS_FUNCTIONS)
    flags = {**FLAGS, **inspect.getclosurevars(kind.__init__).nonlocals}
    named = kind in _named or None
    forward = code_of(kind, named=named)  # it is tried again when that has changed
    for function in forward.walk.walked:
        if ASK & names_in(function.__code__) and not is_of(function.__code__, "transformers"):
            raise Refused("it asks for attributes by strings", (forward.pins,))
    reason, gate = "its formula is another", None
    forms = [Form(activation=name) for name in (None, *NAMED)]
    if kind._apply_gate is not moe._default_apply_gate:
        reason = "its gate is one of its own"
        gate = code_of(kind, "_apply_gate", named)
        forms = list(_forms_of(gate.walk))
    pins = (forward.pins,) if gate is None else (forward.pins, gate.pins)
    for form in forms:
        if computes(kind, loop, form, flags):
            return form, pins
    return reason, pins


def _forms_of(gate: Walk) -> Iterator[Form]:
    """Returns the possible forms of a gate, by the names in its code."""
    names = {name for function in gate.walked for name in names_in(function.__code__)}
    reads = sorted(names - {"act_fn", "torch", *dir(torch), *dir(F), *dir(torch.Tensor)})
    for interleaved, limit in itertools.product((False, True), (None, *reads)):
        for activation in (None,) if "act_fn" in names else NAMED:
            yield Form(limit, activation, None, interleaved)
        for alpha in reads:
            yield Form(limit, "swigluoai", alpha, interleaved)


def is_experts(module: nn.Module) -> bool:
    """The module holds experts in one 3-D weight."""
    weights = map(module._parameters.get, STACKED)
    return any([x is not None and told(x, "ndim") == 3 for x in weights])


def experts_in(modules: Named) -> Named:
    return [(n, m) for n, m in modules if not STACKED.isdisjoint(m._parameters) and is_experts(m)]


def why_not_experts(module: nn.Module) -> Optional[str]:
    """Why a module of experts is not the formula, whatever the device; None if it is."""
    form = form_of(type(module))
    if isinstance(form, str):
        return form
    if "_apply_gate" in module.__dict__:
        return "its gate is one of its own"
    expected = {
        "has_gate": True, "is_concatenated": not form.interleaved, "has_post_expert_norm": False,
    }  # fmt: skip
    for name, value in expected.items():
        if flag(module, name) is not value:
            return f"{name} is {flag(module, name)}"
    if form.interleaved and not flag(module, "is_transposed"):
        return "gate and up lie in turn"
    if form.alpha is not None and getattr(module, form.alpha) != ALPHA:
        return f"{form.alpha} is {getattr(module, form.alpha)}, not {ALPHA}"
    activation = getattr(module, "act_fn", None)
    if form.activation in NAMED:  # a loop may name what the gate has in act_fn
        fits = activation is None or activation_of(activation) == form.activation
    else:
        fits = form.activation is not None or activation_of(activation) is not None
    if not fits:
        return f"its activation is {type(activation).__name__}"
    biases = ("gate_up_proj_bias", "down_proj_bias") if flag(module, "has_bias") else ()
    for name in ("gate_up_proj", "down_proj", *biases):
        weight = getattr(module, name, None)
        reason = "is not there" if weight is None else why_not_tensor(weight)
        if reason is not None:
            return f"{name} {reason}"
        if weight.dtype is not module.gate_up_proj.dtype:
            return f"{name} has a dtype of its own"
    return None


def why_not_here(module: nn.Module) -> Optional[str]:
    """Why no kernel serves a module that is the formula, by device, dtype and sizes."""
    w_down = weights_of(module)[1]
    _, H, I = w_down.shape
    reason = why_not_on(w_down.device, ops.FAMILY, "experts_fwd")
    if reason is not None:
        return reason
    if w_down.dtype not in HALF:
        return f"its weights are {str(w_down.dtype).replace('torch.', '')}, not bfloat16 or float16"
    if H % 8 or I % 8:
        return f"its widths, {H} and {I}, are not multiples of 8"
    return None


def serve_experts(modules: Named) -> List[Row]:
    """Has transformers call our kernels for all modules of experts that they serve.

    The choice is the configuration's, which modules share: it is made where all of them are served.
    """
    found = experts_in(modules)
    reasons = [_why_left(module) for _, module in found]
    refused = {id(m.config) for (_, m), why in zip(found, reasons) if why and hasattr(m, "config")}
    before = {id(m.config): m.__dict__[BEFORE] for _, m in found if BEFORE in m.__dict__}
    if None in reasons:
        register_experts()
    rows = []
    for (name, module), reason in zip(found, reasons):
        if reason is None and id(module.config) in refused:
            reason = "other experts of the same configuration are not served"
        if reason is None:
            _choose(module, before)
        else:
            _restore(module)
        form = (form_of_fp8 if is_fp8_experts(module) else form_of)(type(module))
        unknown = isinstance(form, str) and is_of_transformers(module)
        rows.append(Row(name, type(module).__name__, "fused_experts", None, reason, unknown))
    return rows


def _why_left(module: nn.Module) -> Optional[str]:
    if is_named(type(module)):
        _named.add(type(module))
    if is_fp8_experts(module):
        reason = why_not_fp8_experts(module) or why_not_fp8_here(module)
    else:
        reason = why_not_experts(module) or why_not_here(module)
    if reason is not None:
        return reason
    chosen = module.config._experts_implementation
    if chosen not in (*REPLACED, NAME):
        return f"its experts implementation was set to {chosen}"
    return None


def _choose(module: nn.Module, before: dict) -> None:
    """Chooses ours for a module. `before` has the implementation of each configuration until then:
    none where the user asked for ours."""
    config = module.config
    if config._experts_implementation != NAME:
        before[id(config)] = config._experts_implementation
        config._experts_implementation_internal = NAME
    if id(config) in before:
        module.__dict__[BEFORE] = before[id(config)]


def _restore(module: nn.Module) -> bool:
    if BEFORE not in module.__dict__:
        return False
    module.config._experts_implementation_internal = module.__dict__.pop(BEFORE)
    return True


def restore_experts(modules: Named) -> int:
    """Gives the configurations their own choice back; returns how many modules were served."""
    found = [m for _, m in experts_in(modules)]
    chosen = [getattr(getattr(m, "config", None), "_experts_implementation", None) for m in found]
    served = [m for m, implementation in zip(found, chosen) if implementation == NAME]
    configs = {id(m.config) for m in found if _restore(m)}
    return sum(id(m.config) in configs for m in served)
