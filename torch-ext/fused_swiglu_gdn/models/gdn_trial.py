"""A GDN layer of transformers and ours on the same small parts: do they give the same?"""

import functools
from types import FunctionType, MethodType, SimpleNamespace
from typing import Optional

import torch
import torch.nn.functional as F

from .. import layers
from ..layers.own_code import OwnCode

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
TOLERANCE = 1e-5  # relative to the largest value; transformers' rule is in fp32


class _Twin:
    """Has the parts of a family of layers, and nothing else."""

    def __init__(self, parts):
        self.__dict__.update(parts)

    def __getattr__(self, name):
        raise AttributeError(name)


def _twin(found: OwnCode, layer: str, allow_neg_eigval: bool) -> _Twin:
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

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
            setattr(twin, name, MethodType(method, twin))
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


def _theirs(found: OwnCode) -> FunctionType:
    """Their forward, calling their torch functions and no kernels."""
    functions = dict(found.functions)
    for name, function in functions.items():
        if name.endswith("causal_conv1d_fn"):
            functions[name] = _convolution_of_each(function)
        elif name.endswith("chunk_gated_delta_rule"):
            functions[name] = _rule_of_each(function)
    forward = found.forward
    namespace = {**forward.__globals__, **functions}
    return FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__)


def _outputs(forward, twin: _Twin):
    """What a layer gives in each kind of use, and the states it leaves."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    random = torch.Generator().manual_seed(1)
    x = torch.randn(2, 70, HIDDEN, generator=random, dtype=torch.float64)
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
    for allow_neg_eigval in (False, True) if layer == "OlmoHybridGatedDeltaNet" else (False,):
        twin = _twin(found, layer, allow_neg_eigval)
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
                pairs = list(zip(_outputs(_theirs(found), twin), _outputs(ours, twin)))
        except AttributeError as error:
            return f"its forward also uses {error}"
        except Exception as error:
            return f"its forward does not run on a small twin ({type(error).__name__}: {error})"
        for expected, got in pairs:
            limit = TOLERANCE * expected.abs().max()
            if got.shape != expected.shape or not (got - expected).abs().max() <= limit:
                return "its forward gives other values on a small twin"
    return None


def why_not_same(found: OwnCode, layer: str) -> Optional[str]:
    """The forward gives other values than our layer, or does not run on parts of its family."""
    names = tuple((name, value) for _, name, value in found.names[1:])
    return _why_not_same(found.forward, tuple(found.functions.items()), names, layer)
