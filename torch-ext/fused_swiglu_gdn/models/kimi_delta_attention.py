"""Recognises the Kimi Delta Attention layers that layers/kda.py computes.

That is certain only if the forwards of its class and of its forget gate's, with all that they call,
are transformers' own code, and give what ours gives on a small twin: for a prompt with padding and
for tokens after a cache.
"""

import inspect
import itertools
from types import FunctionType, MethodType
from typing import Dict, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..gdn.checks import MAX_HEAD_DIM
from ..gdn_layer.checks import MAX_TAPS
from ..layers import kda
from ..layers.forward import Arguments
from ..layers.functions import is_gated_norm
from ..layers.kda import KdaForm, bound_of
from ..layers.own_code import NotOwn, names_in, own_code, undispatched
from ..layers.plain import why_not_tensor
from ..runtime.recording import pretending
from .code import BY_NAME
from .gdn_body import FOREIGN
from .serving import own_class
from .stand_ins import quiet

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


def kimi_delta_attention(
    module: nn.Module,
) -> Optional[Tuple[str, Optional[str], Optional[KdaForm]]]:
    """Our layer for a module, why it is left alone or None, and the form of its class; None for a
    module without the parts by which such a layer is known."""
    if not {"conv1d", "forget_gate", "o_norm"} <= module._modules.keys():
        return None
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
        found = own_code(kind), own_code(gate)
    except NotOwn as error:
        return f"its forward {error}"
    (forward, of_layer), (gate_forward, of_gate) = found
    reason = _why_not_certain(kind, forward) or _why_not_certain(gate, gate_forward)
    if reason is not None:
        return reason
    key = kind, gate, bounded, forward, gate_forward
    known = _forms.get(key)
    if known is None or isinstance(known, KdaForm) and not known.unchanged():
        pinned = of_layer, of_gate
        known = _forms[key] = _found(kind, gate, bounded, (forward, gate_forward), pinned)
    return known


def _why_not_certain(kind: type, forward: FunctionType) -> Optional[str]:
    """Returns what a class's forward depends on that the trial does not set; None if nothing."""
    names = names_in(forward)
    own = {name for base in kind.__mro__[: kind.__mro__.index(nn.Module)] for name in vars(base)}
    odd = names & (own | BY_NAME | FOREIGN)
    return f"its forward uses {', '.join(sorted(odd))}" if odd else None


def _found(
    kind: type, gate: type, bounded: tuple, forwards: tuple, pinned: tuple
) -> Union[KdaForm, str]:
    _, *names = inspect.signature(forwards[0]).parameters
    cache = names[1] if len(names) == 4 and names[1] in CACHE_NAMES else "cache"
    if names != ["hidden_states", cache, "attention_mask", "kwargs"]:
        return "its forward takes other arguments"
    named, others = tuple(names[:3]), frozenset(CACHE_NAMES) - {cache}
    arguments = Arguments(named, frozenset(named), (), True, "hidden_states", own=others)
    form = KdaForm(kind, gate, arguments, cache, (), pinned, bounded)
    return _why_not_same(form, *map(in_torch, forwards)) or form


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


# -- the trial: the class's forward and ours on the same small parts

H, K, W, HIDDEN = 2, 3, 4, 7
# relative to the largest value; transformers' rule is in fp32
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
BOUNDS = (None, -5.0, -1.5)


class _Norm(nn.Module):
    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x, gate):
        return F.rms_norm(x, (K,), self.weight, 1e-5) * torch.sigmoid(gate)


def _twin(form: KdaForm, gate_forward: FunctionType, bound: Optional[float]) -> nn.Module:
    """The parts of a layer of the class, and nothing else."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random)

    def linear(name: str, n: int, m: int, owner: nn.Module) -> None:
        part = nn.Linear(m, n, bias=False)
        part.weight.data = draw(n, m)
        setattr(owner, name, part)

    layer, gate, name, switch = nn.Module(), nn.Module(), *form.bounded
    for projection in ("q_proj", "k_proj", "v_proj"):
        linear(projection, H * K, HIDDEN, layer)
    linear("b_proj", H, HIDDEN, layer)
    linear("o_proj", HIDDEN, H * K, layer)
    if switch is None:
        for owner, word in ((gate, "f"), (layer, "g")):
            linear(f"{word}_a_proj", K, HIDDEN, owner)
            linear(f"{word}_b_proj", H * K, K, owner)
    else:
        linear("f_proj", H * K, HIDDEN, gate)
        linear("g_proj", H * K, HIDDEN, layer)
        setattr(gate, switch, bound is not None)
    if name is not None:
        setattr(gate, name, bound if switch is None else bound or -5.0)
    shape = (1, 1, H, 1) if name is None else (H,)
    gate.A_log = nn.Parameter(draw(*shape))
    gate.dt_bias = nn.Parameter(torch.linspace(-30.0, 25.0, H * K))  # to both sides of its bends
    gate.forward = MethodType(gate_forward, gate)
    layer.conv1d = nn.Conv1d(3 * H * K, 3 * H * K, W, groups=3 * H * K, bias=False, padding=W - 1)
    layer.conv1d.weight.data = draw(3 * H * K, 1, W)
    layer.forget_gate, layer.o_norm = gate, _Norm(draw(K))
    sizes = {
        "num_heads": H, "head_dim": K, "qkv_dim": H * K, "conv_kernel_size": W, "conv_dim": 9 * H,
        "layer_idx": 0, "activation": "silu", "hidden_size": HIDDEN,
    }  # fmt: skip
    layer.__dict__.update(sizes)
    gate.__dict__.update(num_heads=H, head_dim=K, qkv_dim=H * K)
    return layer.requires_grad_(False)


def in_torch(function: FunctionType) -> FunctionType:
    """The same function, which calls torch functions where it would ask for kernels."""
    names, own = dict(function.__globals__), function.__code__.co_names
    names.update({name: undispatched(names[name]) for name in own if name in names})
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _outputs(forward, layer, dtype):
    """Yields the outputs of a layer in each kind of use, and the states that it leaves."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    random = torch.Generator().manual_seed(1)
    x, mask = torch.randn(2, 70, HIDDEN, generator=random).to(dtype), torch.ones(2, 70)
    mask[0, :3] = 0
    yield forward(layer, x, None, mask)
    cache = Cache(layers=[LinearAttentionLayer()])
    for part in x[:, :13].split([2, 1, 1, 6, 3], dim=1):
        yield forward(layer, part, cache, None)
    yield cache.layers[0].conv_states[0]
    yield cache.layers[0].recurrent_states[0]


def _why_not_same(form: KdaForm, theirs: FunctionType, gate: FunctionType) -> Optional[str]:
    """The forward of the class gives other values than ours, or does not run on such parts."""

    def ours(layer, x, cache, mask):
        bound = bound_of(layer.forget_gate, form)
        return kda.kimi_delta_attention(layer, x, cache, mask, None, bound)

    bounds = BOUNDS if form.bounded[0] is not None else BOUNDS[:1]
    for dtype, bound in itertools.product(LIMITS, bounds):
        twin = _twin(form, gate, bound).to(dtype)
        try:
            with quiet(), pretending(None), torch.no_grad():
                pairs = list(zip(_outputs(theirs, twin, dtype), _outputs(ours, twin, dtype)))
        except Exception as error:
            return f"its forward does not run on a small twin ({type(error).__name__}: {error})"
        for expected, got in pairs:
            limit, alike = LIMITS[dtype] * expected.abs().max(), got.shape == expected.shape
            if got.dtype is not expected.dtype or not alike:
                return "its forward gives another dtype or shape on a small twin"
            if not (got - expected).abs().max() <= limit:
                return "its forward gives other values on a small twin"
    return None
