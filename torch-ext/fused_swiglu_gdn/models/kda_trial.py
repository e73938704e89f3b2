"""A Kimi Delta Attention layer of transformers and ours on the same small parts: do they give the
same?"""

import itertools
from types import FunctionType, MethodType
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.kda import KdaForm, bound_of, kimi_delta_attention
from ..layers.own_code import undispatched
from ..runtime.recording import pretending
from .stand_ins import quiet

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


def why_not_same(form: KdaForm) -> Optional[str]:
    """The forward of the class gives other values than ours, or does not run on such parts."""
    layer_code, gate_code = form.codes
    theirs, gate = in_torch(layer_code.forward), in_torch(gate_code.forward)
    bounds = BOUNDS if form.bounded[0] is not None else BOUNDS[:1]
    for dtype, bound in itertools.product(LIMITS, bounds):
        twin = _twin(form, gate, bound).to(dtype)

        def ours(layer, x, cache, mask):
            return kimi_delta_attention(
                layer, x, cache, mask, None, bound_of(layer.forget_gate, form)
            )

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
