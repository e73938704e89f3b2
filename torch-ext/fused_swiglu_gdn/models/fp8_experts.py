"""transformers' FP8Experts, the routed experts of checkpoints in FP8 with block scales: which are
served, through transformers' own table of implementations (experts.py).

The class is transformers' own. Its loop over its experts is run on small weights in 16 and more
bits, where it takes no scales; what it multiplies with in FP8, its method `linear`, is to give
transformers' fp8_linear what it is given. What does not fit a call is computed by the
implementation that was chosen before, or by transformers' grouped_mm where that was ours.
"""

import sys
from types import SimpleNamespace
from typing import Dict, Optional, Tuple, Union

import torch
from torch import nn

from ..experts.ops_fp8 import FP8, fp8_experts
from ..fp8.call import BLOCK, SCALES
from ..layers.activations import activation_of
from ..layers.fp8.weights import SCHEME, takes
from ..layers.pinned import Pinned
from ..layers.plain import PLAIN_TENSORS, told
from .code import Refused
from .experts_before import fall_back, loop_of
from .experts_trial import FLAGS, Form, computes
from .fp8_linear import (
    ARGUMENTS,
    HOME,
    code_above,
    given_to_products,
    why_not_parameter,
    why_not_scheme,
)
from .serving import own_class, why_not_on
from .stand_ins import quiet
from .trial import while_unchanged

WEIGHTS = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")


_forms: Dict[type, tuple] = {}


def is_fp8_experts(module: nn.Module) -> bool:
    """A module is transformers' FP8Experts, or of a class made of it."""
    kind = getattr(sys.modules.get(HOME), "FP8Experts", None)
    return kind is not None and issubclass(own_class(module), kind)


def form_of_fp8(kind: type) -> Union[Tuple[str, ...], str]:
    """The attributes that the gate of FP8Experts reads, which are to be None, or why a class is
    not served."""
    functions = kind.forward, kind._apply_gate, kind.linear, sys.modules[HOME].fp8_linear
    return while_unchanged(_forms, kind, functions, _find)


def _find(kind: type) -> Tuple[Union[Tuple[str, ...], str], Tuple[Pinned, ...]]:
    home = sys.modules[HOME]
    if kind is not home.FP8Experts:
        raise Refused(
            f"is a {kind.__name__}, not FP8Experts: its class computes in a way of its own"
        )
    loop = loop_of(kind, home.ALL_FP8_EXPERTS_FUNCTIONS)
    codes = [code_above(home, kind, name) for name in ("forward", "_apply_gate", "linear")]
    weight, scale, x = (torch.ones(4, 4) for _ in range(3))
    weight, block = weight.to(torch.float8_e4m3fn), (4, 4)
    module = SimpleNamespace(block_size=block, _deepgemm_disabled=False, training=False)
    found = given_to_products(codes[-1].inner, module, x, weight, scale)
    given = [x, weight, scale, block, None, None, True]
    if [[call.get(name) for name in ARGUMENTS] for call in found] != [given]:
        raise Refused("its products are none that are known")
    unset = tuple(sorted({*kind._apply_gate.__code__.co_names} - {"act_fn", *dir(torch.Tensor)}))
    ones = torch.ones(8)
    more = {
        **FLAGS, **dict.fromkeys(unset), "linear": kind.linear, "activation_scheme": SCHEME[1],
        "gate_up_proj_scale_inv": ones, "down_proj_scale_inv": ones,
    }  # fmt: skip
    pinned = tuple([code.pins for code in codes])
    with quiet():
        if not computes(kind, loop, Form(), FLAGS, **more):
            return "its formula is another", pinned
    return unset, pinned


def why_not_fp8_experts(module: nn.Module) -> Optional[str]:
    """Why a module of FP8 experts is left alone, whatever the device; None if it is not."""
    form = form_of_fp8(own_class(module))
    if isinstance(form, str):
        return form
    return _why_not_formula(module, form) or _why_not_weights(module)


def _why_not_formula(module: nn.Module, unset: Tuple[str, ...]) -> Optional[str]:
    for name in ("_apply_gate", "linear"):
        if name in module.__dict__:
            return f"it has a {name} of its own"
    for name, value in FLAGS.items():
        if getattr(module, name, value) is not value:
            return f"{name} is {getattr(module, name)}"
    for name in unset:
        if getattr(module, name, None) is not None:
            return f"its gate is another: {name} is {getattr(module, name)}"
    activation = getattr(module, "act_fn", None)
    if activation_of(activation) != "silu":
        return f"its activation is {type(activation).__name__}, not silu"
    return why_not_scheme(module)


def _why_not_weights(module: nn.Module) -> Optional[str]:
    found = [module._parameters.get(name) for name in WEIGHTS]
    for name, x in zip(WEIGHTS, found):
        if x is None or name in module.__dict__:
            return f"{name} is no parameter of its own"
        if told(x, "dtype") is torch.int8:
            return f"{name} is FP4, packed in int8; float8_e4m3fn is served"
        wanted = SCALES if "scale" in name else (torch.float8_e4m3fn,)
        reason = why_not_parameter(name, x, *wanted)
        if reason is not None:
            return reason
    w_gate_up, s_gate_up, w_down, s_down = found
    if w_down.ndim != 3 or w_gate_up.ndim != 3:
        return "its weights are not of three dimensions"
    E, H, I = w_down.shape
    if w_gate_up.shape != (E, 2 * I, H):
        return f"gate_up_proj is of shape {list(w_gate_up.shape)}, not {[E, 2 * I, H]}"
    if H % BLOCK or I % BLOCK or not H * I:
        return f"its widths, {H} and {I}, are not multiples of {BLOCK}"
    for name, x, w in (("gate_up", s_gate_up, w_gate_up), ("down", s_down, w_down)):
        if x.shape != (E, w.shape[1] // BLOCK, w.shape[2] // BLOCK):
            return (
                f"{name}_proj_scale_inv is of shape {list(x.shape)}, not one for {BLOCK} x {BLOCK}"
            )
    if not all(x.is_contiguous() for x in found):
        return "its weights or scales are not contiguous"
    return None


def why_not_fp8_here(module: nn.Module) -> Optional[str]:
    """Why no kernel serves FP8Experts that are the formula, by the device."""
    return why_not_on(module.down_proj.device, *FP8)


def fp8_experts_forward(
    self: nn.Module, *given: torch.Tensor, **named: torch.Tensor
) -> torch.Tensor:  # [T, H]
    """Computes FP8Experts for transformers: x [T, H], ids [T, K], weights [T, K]."""
    y, reason = None, "it is not called with three tensors by position"
    if not named and len(given) == 3:
        y, reason = _computed(self, *given)
    if y is not None:
        return y
    table = sys.modules[HOME].ALL_FP8_EXPERTS_FUNCTIONS
    return fall_back(self, table, reason, *given, **named)


def _computed(
    self: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> Tuple[Optional[torch.Tensor], Optional[str]]:
    """Returns our result; or None, and the reason if the user should know it."""
    if torch.compiler.is_compiling():
        return None, None
    form = form_of_fp8(own_class(self))
    if isinstance(form, str):
        return None, form
    reason = _why_not_formula(self, form)
    if reason is not None or not takes(x, FP8):
        return None, reason
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        return None, "a gradient is needed"
    tensors = (x, *map(self._parameters.get, WEIGHTS), ids, weights)
    if all([type(t) in PLAIN_TENSORS for t in tensors]):
        with torch.no_grad():
            y = fp8_experts(*tensors)
        if y is not None:
            return y, None
    return None, _why_not_weights(self) or why_not_fp8_here(self)
