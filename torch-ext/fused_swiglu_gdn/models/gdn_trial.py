"""A GDN layer of transformers and ours on the same small parts: do they give the same?"""

import functools
import itertools
from types import FunctionType, MethodType, SimpleNamespace
from typing import Optional

import torch
import torch.nn.functional as F

from .. import layers
from ..layers.own_code import OwnCode
from ..runtime.recording import pretending
from .stand_ins import quiet

H, HV, K, V, W, HIDDEN = 2, 4, 3, 5, 4, 7
WIDTHS = {  # the outputs of each projection
    "Qwen3_5GatedDeltaNet": {
        "in_proj_qkv": 2 * H * K + HV * V, "in_proj_z": HV * V, "in_proj_b": HV, "in_proj_a": HV,
    },
    "Qwen3NextGatedDeltaNet": {"in_proj_qkvz": 2 * H * K + 2 * HV * V, "in_proj_ba": 2 * HV},
    "OlmoHybridGatedDeltaNet": {
        "q_proj": H * K, "k_proj": H * K, "v_proj": HV * V, "g_proj": HV * V, "a_proj": HV,
        "b_proj": HV,
    },
}  # fmt: skip
# relative to the largest value; transformers' rule is in fp32 also within a layer of fp64
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class _Twin:
    """Has the parts of a family of layers, and nothing else."""

    def __init__(self, parts):
        self.__dict__.update(parts)

    def __getattr__(self, name):
        raise AttributeError(name)


def _twin(found: OwnCode, layer: str, allow_neg_eigval: bool, dtype: torch.dtype) -> _Twin:
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    def projection(n, k):
        weight = draw(n, k)
        return lambda x: x @ weight.T

    def norm(x, gate):
        return F.rms_norm(x, (V,), norm_weight, 1e-6) * F.silu(gate)

    olmo, norm_weight = layer == "OlmoHybridGatedDeltaNet", draw(V)
    parts = {name: projection(n, HIDDEN) for name, n in WIDTHS[layer].items()}
    parts["o_proj" if olmo else "out_proj"] = projection(HIDDEN, HV * V)
    parts["o_norm" if olmo else "norm"] = norm
    if olmo:
        parts["allow_neg_eigval"] = allow_neg_eigval
    channels = 2 * H * K + HV * V
    twin = _Twin({
        **parts, "num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V,
        "key_dim": H * K, "value_dim": HV * V, "conv_kernel_size": W, "layer_idx": 0,
        "conv1d": SimpleNamespace(weight=draw(channels, 1, W), bias=draw(channels)),
        "activation": "silu", "A_log": draw(HV), "dt_bias": draw(HV),
    })  # fmt: skip
    for _, name, method in found.names[1:]:
        if isinstance(method, FunctionType) and method.__code__.co_varnames[:1] == ("self",):
            setattr(twin, name, MethodType(_in_torch(method, _torch_functions(found)), twin))
    return twin


def _convolution_of_each(function):
    """A convolution of transformers, which keeps no packed sequences apart, one after another."""

    def convolve(x, *args, seq_idx=None, **options):
        lengths = [x.shape[-1]] if seq_idx is None else seq_idx[0].bincount().tolist()
        return torch.cat([function(part, *args, **options) for part in x.split(lengths, -1)], -1)

    return convolve


def _rule_of_each(function):
    """The same for the rule in chunks."""

    def rule(*tensors, g, beta, cu_seqlens=None, **options):
        if cu_seqlens is None:
            return function(*tensors, g=g, beta=beta, **options)
        lengths = cu_seqlens.diff().tolist()
        parts = zip(*(x.split(lengths, 1) for x in (*tensors, g, beta)))
        return torch.cat([function(*part, **options)[0] for part in parts], 1), None

    return rule


def _in_torch(function: FunctionType, functions: dict) -> FunctionType:
    """The same function, which finds these where its module has others of their names."""
    namespace = {**function.__globals__, **functions}
    code, defaults = function.__code__, function.__defaults__
    made = FunctionType(code, namespace, function.__name__, defaults, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _torch_functions(found: OwnCode) -> dict:
    """What their forward calls by name: torch functions and no kernels, also within helpers."""
    functions = dict(found.functions)
    for name, function in found.functions.items():
        names = (name, function.__name__)
        if any(n.endswith("causal_conv1d_fn") for n in names):
            functions[name] = _convolution_of_each(function)
        elif any(n.endswith("chunk_gated_delta_rule") for n in names):
            functions[name] = _rule_of_each(function)
    replaced = {n: f for n, f in functions.items() if f is not found.functions[n]}
    for name, function in found.functions.items():
        if name not in replaced and function.__globals__ is found.forward.__globals__:
            functions[name] = _in_torch(function, replaced)
    return functions


def _outputs(forward, twin: _Twin, dtype: torch.dtype):
    """What a layer gives in each kind of use, and the states it leaves."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    random = torch.Generator().manual_seed(1)
    x = torch.randn(2, 70, HIDDEN, generator=random, dtype=torch.float64).to(dtype)
    mask = torch.ones(2, 70)
    mask[0, :3] = 0
    yield forward(twin, x, attention_mask=mask)
    cache = Cache(layers=[LinearAttentionLayer()])
    for part in x[:, :13].split([2, 1, 1, 6, 3], dim=1):
        yield forward(twin, part, cache)
    yield cache.layers[0].conv_states[0]
    yield cache.layers[0].recurrent_states[0]
    lengths = torch.tensor([0, 5, 6, 12])
    index = torch.arange(3).repeat_interleave(lengths.diff()).int()[None]
    yield forward(twin, x[:1, :12], cu_seq_lens_q=lengths, seq_idx=index)


@functools.cache
def _why_not_same(forward, functions: tuple, names: tuple, layer: str) -> Optional[str]:
    found = OwnCode(forward, dict(functions), tuple((None, *name) for name in names))
    ours = getattr(layers, layer).forward
    theirs = _in_torch(forward, _torch_functions(found))
    flags = (False, True) if layer == "OlmoHybridGatedDeltaNet" else (False,)
    for allow_neg_eigval, dtype in itertools.product(flags, TOLERANCES):
        twin = _twin(found, layer, allow_neg_eigval, dtype)
        try:
            with quiet(), pretending(None):
                pairs = list(zip(_outputs(theirs, twin, dtype), _outputs(ours, twin, dtype)))
        except AttributeError as error:
            return f"its forward also uses {error}"
        except Exception as error:
            return f"its forward does not run on a small twin ({type(error).__name__}: {error})"
        for expected, got in pairs:
            limit = TOLERANCES[dtype] * expected.abs().max()
            if got.shape != expected.shape or not (got - expected).abs().max() <= limit:
                return "its forward gives other values on a small twin"
    return None


def why_not_same(found: OwnCode, layer: str) -> Optional[str]:
    """The forward gives other values than our layer, or does not run on parts of its family."""
    names = tuple((name, value) for _, name, value in found.names[1:])
    return _why_not_same(found.forward, tuple(found.functions.items()), names, layer)
