"""What surrounds attention: values against transformers' own code and fp64, gradients, errors."""

import pytest
import torch
from conftest import DEVICES, assert_close, relative_error, submodule

attention = submodule("attention.api")
reference = submodule("attention.reference")
ops = submodule("attention.ops")

# B, T, HQ, HK, D, R
SHAPES = [(2, 5, 4, 2, 16, 16), (1, 1, 3, 1, 64, 16), (3, 7, 5, 5, 24, 10), (2, 1, 8, 2, 32, 0)]


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    random = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(device, dtype)


def tables(B, T, R, dtype, device="cpu", seed=5):
    """cos and sin of random angles, both halves alike as in models."""
    if not R:
        return None, None
    angle = normal(B, T, R // 2, seed=seed, dtype=torch.float64).mul(7).repeat(1, 1, 2)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def problem(B, T, HQ, HK, D, R, dtype=torch.float32, device="cpu", norm="head", rows=1, gate=False):
    """Arguments of fused_qk_norm_rope by name; gate: heads lie twice as far apart."""
    far = 2 * D if gate else D
    weights = (HQ * D, HK * D) if norm == "all" else (D, D)
    cos, sin = tables(rows, T, R, dtype, device)
    heads = [None, None]
    if norm is not None:
        heads = [normal(n, seed=seed, dtype=dtype, device=device) for seed, n in enumerate(weights)]
    return {
        "q": normal(B, T, HQ, far, seed=1, dtype=dtype, device=device)[..., :D],
        "k": normal(B, T, HK, D, seed=2, dtype=dtype, device=device),
        "cos": cos,
        "sin": sin,
        "q_weight": heads[0],
        "k_weight": heads[1],
        "norm": norm or "head",
    }


def wide(x):
    return x.double() if torch.is_tensor(x) and x.is_floating_point() else x


def exact(**arguments):
    """fused_qk_norm_rope in fp64, by plain torch."""
    return attention.fused_qk_norm_rope(**{name: wide(x) for name, x in arguments.items()})


def test_the_formula_is_transformers(kernel):
    llama = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    zero = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    for module, norm, offset, R in (
        (llama, llama.Qwen3RMSNorm, 0.0, 32), (zero, zero.Qwen3_5RMSNorm, 1.0, 8),
    ):  # fmt: skip
        x = problem(2, 5, 4, 2, 32, R, dtype=torch.float32, gate=True)
        norms = [norm(32, eps=1e-5) for _ in "qk"]
        for own, name in zip(norms, ("q_weight", "k_weight")):
            own.weight.data.copy_(x[name])
        own = [f(x[name]).transpose(1, 2) for f, name in zip(norms, "qk")]
        want = module.apply_rotary_pos_emb(*own, x["cos"], x["sin"])
        found = kernel.fused_qk_norm_rope(**x, eps=1e-5, offset=offset)
        for a, b in zip(found, want):
            assert_close(a, b.transpose(1, 2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", ["head", "all"])
def test_gradient_of_the_reference(shape, norm):
    x = {n: wide(t) for n, t in problem(*shape, norm=norm, rows=shape[0]).items()}
    names = ("q", "k", "q_weight", "k_weight")
    leaves = [x[name].detach().requires_grad_() for name in names]
    y = attention.fused_qk_norm_rope(**{**x, **dict(zip(names, leaves))}, offset=0.5)
    d = [normal(*t.shape, seed=9, dtype=torch.float64) for t in y]
    want = torch.autograd.grad(y, leaves, d)
    options = submodule("attention.call").QkOptions(1e-6, 0.5, norm == "all")
    tensors = (x["q"], x["k"], x["cos"], x["sin"], x["q_weight"], x["k_weight"])
    found = reference.qk_norm_rope_bwd(*d, *tensors, options)
    for a, b in zip(found, want):
        assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [0, 1, 3])
def test_caches_are_written_at_the_position(kernel, device, T):
    x = problem(2, T, 4, 2, 16, 8, device=device)
    v = normal(2, T, 2, 24, seed=6, device=device)
    held = normal(2, 2, 9, 16, seed=7, device=device), normal(2, 2, 9, 24, seed=8, device=device)
    keys, values = (cache.clone() for cache in held)
    position = torch.tensor(4, device=device)
    q, k = kernel.fused_qk_norm_rope(
        **x, v=v, key_cache=keys, value_cache=values, cache_position=position
    )
    want = exact(**x)
    assert_close(q, want[0])
    for cache, before, new in ((keys, held[0], k), (values, held[1], v)):
        assert torch.equal(cache[:, :, 4 : 4 + T], new.transpose(1, 2))
        assert torch.equal(cache[:, :, :4], before[:, :, :4])
        assert torch.equal(cache[:, :, 4 + T :], before[:, :, 4 + T :])


@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize("lengths", ["one", "each"])
def test_attention_is_sdpa_over_the_filled_slots(kernel, device, kind, lengths):
    B, HQ, HK, S, D = 3, 6, 2, 40, 16
    q = normal(B, 1, HQ, D, seed=1, device=device)
    k, v = (normal(B, HK, S, D, seed=seed, device=device) for seed in (2, 3))
    filled = torch.tensor(29 if lengths == "one" else [29, 1, 40], device=device)
    mask = None
    if kind is not None:
        mask = normal(B, 1, 1, S, seed=4, device=device)
        mask = mask > -0.5 if kind == "bool" else mask
        if kind == "bool":
            mask[1] = False  # attends to nothing
    seen = (torch.arange(S, device=device) < filled.view(-1, 1)).view(-1, 1, 1, S)
    if kind == "float":
        bias = mask.double().masked_fill(~seen, -torch.inf)
    else:
        bias = seen if mask is None else seen & mask
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(1, 2), k.double(), v.double(), attn_mask=bias, enable_gqa=True
    )
    for cache in (k, v):
        cache.masked_fill_(~seen.view(-1, 1, S, 1), torch.nan)
    found = kernel.attention_with_kvcache(q, k, v, filled, attention_mask=mask)
    assert_close(found, want.transpose(1, 2))


def test_gate(kernel, device):
    x, gate = (
        normal(2, 5, 3, 16, device=device),
        normal(2, 5, 3, 32, seed=1, device=device)[..., 16:],
    )
    want = x.double() * gate.double().sigmoid()
    found = kernel.sigmoid_gate(x.transpose(1, 2).contiguous().transpose(1, 2), gate)
    assert found.is_contiguous() and relative_error(found, want) < 1e-6
    leaves = [t.double().requires_grad_() for t in (x, gate)]
    want = torch.autograd.grad(kernel.sigmoid_gate(*leaves).sum(), leaves)
    for a, b in zip(reference.sigmoid_gate_bwd(*leaves, torch.ones_like(leaves[0])), want):
        assert_close(a.detach(), b)
