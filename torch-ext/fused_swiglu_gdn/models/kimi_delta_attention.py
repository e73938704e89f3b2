"""Recognises the Kimi Delta Attention layers that layers/kda.py computes.

That is certain only if the forwards of its class and of its forget gate's, with all that they call,
are transformers' own code, and give what ours gives on a small twin: for a prompt with padding and
for tokens after a cache.
"""

import inspect
from typing import Dict, Optional, Tuple, Union

from torch import nn

from ..gdn.checks import MAX_HEAD_DIM
from ..gdn_layer.checks import MAX_TAPS
from ..layers.forward import Arguments
from ..layers.gated_norm import is_gated_norm
from ..layers.kda import KdaForm
from ..layers.own_code import NotOwn, names_in, own_code
from ..layers.plain import why_not_tensor
from .code import BY_NAME
from .gdn_body import FOREIGN
from .kda_trial import why_not_same
from .serving import own_class

LAYER = "KimiDeltaAttention"
_SHARED = {"q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "conv1d", "forget_gate", "o_norm"}
# parts of a layer beside those, parts of its gate, names of the gate's bound and of its switch
FAMILIES = (
    ({"g_a_proj", "g_b_proj"}, {"f_a_proj", "f_b_proj"}, "safe_gate_lower_bound", None),
    ({"g_a_proj", "g_b_proj"}, {"f_a_proj", "f_b_proj"}, None, None),
    ({"g_proj"}, {"f_proj"}, "lower_bound", "safe_gate"),
)
CACHE_NAMES = ("cache_params", "cache")  # before transformers 5.24 and from it on

_forms: Dict[tuple, Union[KdaForm, str]] = {}


def is_kimi_delta_attention(module: nn.Module) -> bool:
    return {"conv1d", "forget_gate", "o_norm"} <= set(module._modules)


def kimi_delta_attention(module: nn.Module) -> Tuple[str, Optional[str], Optional[KdaForm]]:
    """Our layer for such a module; why it is left alone, or None; the form of its class."""
    gate = module.forget_gate
    for parts, parts_of_gate, bound, switch in FAMILIES:
        named = [name for name in (bound, switch) if name is not None]
        if set(module._modules) != _SHARED | parts or set(gate._modules) != parts_of_gate:
            continue
        if all(name in gate.__dict__ for name in named):
            reason = _why_not_plain(module)
            form = _form(own_class(module), type(gate), (bound, switch)) if not reason else reason
            is_gated_norm(module.o_norm)  # while tracing it cannot look
            return (LAYER, form, None) if isinstance(form, str) else (LAYER, None, form)
    return LAYER, "its parts are not those of a Kimi Delta Attention layer known here", None


def _form(kind: type, gate: type, bounded: tuple) -> Union[KdaForm, str]:
    """The form of a class with a gate's, or why there is none."""
    try:
        codes = own_code(kind), own_code(gate)
    except NotOwn as error:
        return f"its forward {error}"
    for owner, code in zip((kind, gate), codes):
        reason = _why_not_certain(owner, names_in(code.forward))
        if reason is not None:
            return reason
    key = (kind, gate, bounded, *[code.forward for code in codes])
    if key not in _forms or isinstance(_forms[key], KdaForm) and _forms[key].codes != codes:
        _forms[key] = _found(kind, gate, bounded, codes)
    return _forms[key]


def _why_not_certain(kind: type, names: set) -> Optional[str]:
    """Returns what a class's forward depends on that the trial does not set; None if nothing."""
    own = {name for base in kind.__mro__[: kind.__mro__.index(nn.Module)] for name in vars(base)}
    odd = names & (own | BY_NAME | FOREIGN)
    return f"its forward uses {', '.join(sorted(odd))}" if odd else None


def _found(kind: type, gate: type, bounded: tuple, codes: tuple) -> Union[KdaForm, str]:
    _, *names = inspect.signature(codes[0].forward).parameters
    cache = names[1] if len(names) == 4 and names[1] in CACHE_NAMES else "cache"
    if names != ["hidden_states", cache, "attention_mask", "kwargs"]:
        return "its forward takes other arguments"
    named, others = tuple(names[:3]), frozenset(CACHE_NAMES) - {cache}
    arguments = Arguments(named, frozenset(named), (), True, "hidden_states", own=others)
    form = KdaForm(kind, gate, arguments, cache, (), codes, bounded)
    return why_not_same(form) or form


def _why_not_plain(module: nn.Module) -> Optional[str]:
    gate, conv = module.forget_gate, module.conv1d
    tensors = {
        "forget_gate.A_log": gate.A_log, "forget_gate.dt_bias": gate.dt_bias,
        "conv1d.weight": conv.weight, "conv1d.bias": conv.bias,
    }  # fmt: skip
    for name, x in tensors.items():
        reason = why_not_tensor(x)
        if reason is not None:
            return f"{name} {reason}"
    taps, heads, K = module.conv_kernel_size, module.num_heads, module.head_dim
    if type(conv) is not nn.Conv1d or conv.weight.shape != (3 * heads * K, 1, taps):
        return f"conv1d is not a depthwise nn.Conv1d of {taps} taps"
    if not 2 <= taps <= MAX_TAPS:
        return f"its convolution has {taps} taps"
    if gate.A_log.numel() != heads or gate.dt_bias.numel() != heads * K:
        return "its heads and those of its forget gate do not match"
    if K > MAX_HEAD_DIM:
        return f"its head dim is above {MAX_HEAD_DIM}"
    return None
