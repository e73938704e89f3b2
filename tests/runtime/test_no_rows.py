"""Tensors without elements, and dimensions of one, have strides that mean nothing: a rank without
data, an empty selection, the gradient of a sum. Each function takes any, with its kernels."""

import pytest
import torch
from interpreter import compiled

pytest.importorskip("triton.experimental.gluon")
from test_host_calls import hopper  # noqa: E402, F401

pytestmark = compiled
DTYPE = torch.bfloat16


def rule(kernel, *tensors):
    return kernel.chunk_gated_delta_rule(*tensors)[0]


def channels(kernel, *tensors):
    return kernel.chunk_kda(*tensors)[0]


def rope(kernel, *tensors):
    q, k, cos, sin, *weights = tensors
    weights = dict(zip(("q_weight", "k_weight"), weights))
    return torch.cat(kernel.fused_qk_norm_rope(q, k, cos.detach(), sin.detach(), **weights), 2)


def convolution(kernel, x, weight):
    return kernel.causal_conv1d_fn(x, weight)


def experts(kernel, x, weights, w_gate_up, w_down):
    ids = torch.zeros(0, 2, dtype=torch.int64)
    return kernel.fused_experts(x, w_gate_up, w_down, ids, weights)


def router(kernel, logits):
    return kernel.fused_topk(logits, 2)[0]


# by function: the call; shapes of what has a row for each token; of parameters
CALLS = {
    "rms_norm": (None, [(0, 64)], [(64,)]),
    "rms_norm, heads": (None, [(2, 0, 4, 64)], [(64,)]),
    "rms_norm_gated": (None, [(0, 64), (0, 64)], [(64,)]),
    "silu_mul": (None, [(0, 64), (0, 64)], []),
    "silu_mul, no columns": (None, [(3, 0), (3, 0)], []),
    "fused_swiglu": (None, [(0, 64)], [(128, 64), (128, 64), (128,)]),
    "fused_swiglu, batch": (None, [(2, 0, 64)], [(128, 64), (128, 64)]),
    "fused_swiglu_mlp": (None, [(0, 64)], [(128, 64), (128, 64), (64, 128)]),
    "fused_swiglu_mlp, batch": (None, [(2, 0, 64)], [(128, 64), (128, 64), (64, 128)]),
    "sigmoid_gate": (None, [(0, 64), (0, 64)], []),
    "sigmoid_gate, heads": (None, [(2, 0, 4, 64), (2, 0, 4, 64)], []),
    "fused_qk_norm_rope": (rope, [(2, 0, 4, 64)] * 2 + [(2, 0, 64)] * 2, [(64,), (64,)]),
    "causal_conv1d_fn": (convolution, [(2, 64, 0)], [(64, 4)]),
    "chunk_gated_delta_rule": (rule, [(1, 0, 2, 128)] * 3 + [(1, 0, 2)] * 2, []),
    "chunk_gated_delta_rule, no batch": (rule, [(0, 9, 2, 128)] * 3 + [(0, 9, 2)] * 2, []),
    "chunk_gated_delta_rule, no value heads": (
        rule, [(1, 9, 2, 128)] * 2 + [(1, 9, 0, 128)] + [(1, 9, 0)] * 2, []
    ),
    "chunk_kda": (channels, [(1, 0, 2, 128)] * 4 + [(1, 0, 2)], []),
    "chunk_kda, no batch": (channels, [(0, 9, 2, 128)] * 4 + [(0, 9, 2)], []),
    "chunk_kda, no value heads": (
        channels, [(1, 9, 2, 128)] * 2 + [(1, 9, 0, 128)] * 2 + [(1, 9, 0)], []
    ),
    "fused_experts": (experts, [(0, 64), (0, 2)], [(4, 128, 64), (4, 64, 64)]),
    "fused_topk": (router, [(0, 8)], []),
}  # fmt: skip


def called(kernel, name, tensors):
    call = CALLS[name][0]
    if call is None:
        return getattr(kernel, name.split(",")[0])(*tensors)
    return call(kernel, *tensors)


def stepped(*shape):
    """Every second element of the last dimension of a tensor twice as wide."""
    return torch.randn(*shape[:-1], 2 * shape[-1], dtype=DTYPE)[..., ::2]


FORMS = {
    "plain": lambda *shape: torch.randn(*shape, dtype=DTYPE),
    "stepped": stepped,
    "expanded": lambda *shape: torch.randn((), dtype=DTYPE).expand(*shape),
    "turned": lambda *shape: torch.randn(*shape[::-1], dtype=DTYPE).permute(
        *reversed(range(len(shape)))
    ),
}


PAIRS = [
    ("plain", "of a sum"),
    ("stepped", "of a sum"),
    ("expanded", "stepped"),
    ("turned", "turned"),
]


@pytest.mark.parametrize("form, gradient", PAIRS)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_to_compute(hopper, name, form, gradient):  # noqa: F811
    """Results are empty or zero, and so are gradients."""
    _, tokens, parameters = CALLS[name]
    leaves = [FORMS[form](*shape).detach().requires_grad_() for shape in tokens]
    leaves += [torch.randn(*shape, dtype=DTYPE).requires_grad_() for shape in parameters]
    for _ in range(2):  # prepared; known
        out = called(hopper, name, leaves)
        assert out.numel() == 0
        if gradient == "of a sum":
            found = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
        else:
            found = torch.autograd.grad(out, leaves, FORMS[gradient](*out.shape), allow_unused=True)
        for x, y in zip(leaves, found):
            assert y is None or y.shape == x.shape and not y.any()
        with torch.no_grad():
            assert called(hopper, name, leaves).shape == out.shape


@torch.no_grad()
def test_dimensions_of_one(hopper):  # noqa: F811
    """Of any stride: heads of one channel, weights of one column or one row, a single far row."""
    q = torch.randn(2, 1, 4, 2, dtype=DTYPE)[..., ::2]
    k, v = torch.randn(2, 2, 2, 7, 1, dtype=DTYPE).unbind(0)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    assert hopper.attention_with_kvcache(q, k, v, lengths).shape == q.shape
    column, other = torch.randn(8, 1, dtype=DTYPE), torch.randn(8, 5, dtype=DTYPE)[:, :1]
    wide = column.as_strided((8, 1), (1, 3))
    for weights in ((column, wide), (wide, column), (other, column), (wide, other)):
        assert hopper.fused_swiglu(torch.randn(3, 1, dtype=DTYPE), *weights).shape == (3, 8)
    far = torch.randn(64, dtype=DTYPE).as_strided((1, 64), (2**40, 1))
    weight = torch.randn(64, 64, dtype=DTYPE)
    assert hopper.fused_swiglu(far, weight, weight).shape == (1, 64)
    assert hopper.rms_norm(far, weight[0]).shape == (1, 64)
    assert hopper.rms_norm(q, torch.ones(1, dtype=DTYPE)).shape == q.shape
    assert hopper.rms_norm_gated(q, q, torch.ones(1, dtype=DTYPE)).shape == q.shape
    assert hopper.silu_mul(q, q).shape == hopper.sigmoid_gate(q, q).shape == q.shape
