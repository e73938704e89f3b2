"""What surrounds attention: values against transformers' own code and fp64, gradients, errors."""

import pytest
import torch
from conftest import DEVICES, assert_close, relative_error, submodule

attention = submodule("attention.api")
reference = submodule("attention.reference")
ops = submodule("attention.ops")

# B, T, HQ, HK, D, R
SHAPES = [(2, 3, 4, 2, 16, 16), (1, 1, 3, 1, 64, 16), (3, 2, 5, 5, 24, 10), (2, 1, 8, 2, 32, 0)]


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    random = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(device, dtype)


def tables(B, T, R, dtype, device="cpu", seed=5):
    """cos and sin of random angles, both halves alike as in models."""
    if not R:
        return None, None
    angle = normal(B, T, R // 2, seed=seed, dtype=torch.float64).mul(7).repeat(1, 1, 2)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def problem(
    B, T, HQ, HK, D, R, dtype=torch.float32, device="cpu", norm="head", rows=1, gate=False, angles=0
):  # fmt: skip
    """Arguments of fused_qk_norm_rope by name; gate: heads lie twice as far apart; angles: of an
    interleaved pair."""
    far = 2 * D if gate else D
    weights = (HQ * D, HK * D) if norm == "all" else (D, D)
    cos, sin = tables(rows, T, R, dtype, device)
    if angles and R:  # as GLM has them, a part of wider tables; as GLM-4V has them
        cos, sin = normal(2, rows, T, R, seed=5, dtype=dtype, device=device)
        cos, sin = (
            x[..., : R // 2] if angles == 1 else x.unflatten(-1, (-1, 2)) for x in (cos, sin)
        )
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
        "interleaved": angles > 0,
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


@pytest.mark.parametrize("module, turn", [
    ("glm", "apply_rotary_pos_emb"), ("helium", "apply_rotary_pos_emb"),
    ("ernie4_5", "apply_rotary_pos_emb"), ("glm4v", "apply_rotary_pos_emb"),
])  # fmt: skip
def test_interleaved_is_transformers(kernel, module, turn):
    name = f"transformers.models.{module}.modeling_{module}"
    turn = getattr(pytest.importorskip(name), turn)
    R = 16 if module in ("glm", "glm4v") else 32
    x = problem(2, 5, 4, 2, 32, R, norm=None)
    cos, sin = normal(2, 2, 5, R, seed=5)
    want = turn(x["q"].transpose(1, 2), x["k"].transpose(1, 2), cos, sin)
    each = module == "glm4v"
    x["cos"], x["sin"] = (
        t.unflatten(-1, (-1, 2)) if each else t[..., : R // 2] for t in (cos, sin)
    )
    for a, b in zip(kernel.fused_qk_norm_rope(**{**x, "interleaved": True}), want):
        assert_close(a, b.transpose(1, 2))


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


@pytest.mark.gpu
def test_full_caches_are_not_silent(kernel):
    """Tokens without a slot give NaN through both kinds of attention; the others are right."""
    B, T, HQ, HK, D, S = 2, 3, 4, 2, 64, 9
    x = problem(B, T, HQ, HK, D, D, dtype=torch.bfloat16, device="cuda")
    v = normal(B, T, HK, D, seed=6, dtype=torch.bfloat16, device="cuda")
    keys, values = torch.zeros(2, B, HK, S, D, dtype=torch.bfloat16, device="cuda")
    position = torch.tensor(S - 2, device="cuda")
    with torch.no_grad():
        q, _ = kernel.fused_qk_norm_rope(
            **x, v=v, key_cache=keys, value_cache=values, cache_position=position
        )
    want, k = kernel.fused_qk_norm_rope(**x)
    assert torch.equal(q[:, :2], want[:, :2]) and q[:, 2].isnan().all()
    assert torch.equal(keys[:, :, S - 2 :], k[:, :2].transpose(1, 2))
    assert torch.equal(values[:, :, S - 2 :], v[:, :2].transpose(1, 2))
    mask = torch.ones(B, 1, T, S, dtype=torch.bool, device="cuda")
    args = (q.transpose(1, 2), *(c.repeat_interleave(HQ // HK, 1) for c in (keys, values)))
    out = torch.nn.functional.scaled_dot_product_attention(*args, attn_mask=mask)
    assert out[:, :, :2].isfinite().all() and out[:, :, 2].isnan().all()
    length = torch.tensor(S + 1, device="cuda")
    for kept in (None, mask[:, :, :1]):
        out = kernel.attention_with_kvcache(q[:, 2:], keys, values, length, attention_mask=kept)
        assert out.isnan().all()


@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize("lengths", ["one", "each", "all"])
def test_attention_is_sdpa_over_the_filled_slots(kernel, device, kind, lengths):
    B, HQ, HK, S, D = 3, 6, 2, 40, 16
    q = normal(B, 1, HQ, D, seed=1, device=device)
    k, v = (normal(B, HK, S, D, seed=seed, device=device) for seed in (2, 3))
    given = {"one": 29, "each": [29, 1, S], "all": S}[lengths]
    filled = torch.tensor(given, device=device)
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
    filled = None if lengths == "all" else filled
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


def test_gradients_through_the_operators(kernel, device):
    """Gradients of the public functions, eager and compiled, equal those of autograd in fp64."""
    x = problem(2, 5, 4, 2, 16, 8, device=device, gate=True)
    names = ("q", "k", "q_weight", "k_weight")
    leaves = [x[name].detach().requires_grad_() for name in names]
    right = [wide(x[name]).detach().requires_grad_() for name in names]

    def loss(leaves, tables):
        given = dict(zip(names, leaves), cos=tables[0], sin=tables[1])
        q, k = kernel.fused_qk_norm_rope(**given, offset=1.0)
        return (kernel.sigmoid_gate(q, leaves[0]) ** 2).sum() + (k**3).sum()

    want = torch.autograd.grad(loss(right, (wide(x["cos"]), wide(x["sin"]))), right)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for function in (loss, compiled):
        found = torch.autograd.grad(function(leaves, (x["cos"], x["sin"])), leaves)
        for a, b in zip(found, want):
            assert_close(a, b)


def test_gradients_of_tables(kernel, device):
    x = problem(1, 3, 2, 1, 8, 8, device=device)
    x["cos"].requires_grad_()
    q, _ = kernel.fused_qk_norm_rope(**x)
    assert torch.autograd.grad(q.sum(), x["cos"])[0].any()


def test_decoding_is_differentiable_by_the_reference(kernel, device):
    q = normal(1, 1, 4, 16, device=device).requires_grad_()
    k, v = (normal(1, 2, 9, 16, seed=seed, device=device) for seed in (1, 2))
    y = kernel.attention_with_kvcache(q, k, v, torch.tensor(5, device=device))
    assert torch.autograd.grad(y.sum(), q)[0].any()


def test_compiled_decoding(kernel, device):
    dtype = torch.bfloat16
    x = problem(2, 1, 4, 2, 16, 8, dtype=dtype, device=device)
    v = normal(2, 1, 2, 16, dtype=dtype, device=device)

    def step(keys, values, position, q):
        q, _ = kernel.fused_qk_norm_rope(
            **{**x, "q": q}, v=v, key_cache=keys, value_cache=values, cache_position=position
        )
        return kernel.sigmoid_gate(kernel.attention_with_kvcache(q, keys, values, position + 1), q)

    caches = [torch.zeros(2, 2, 2, 9, 16, dtype=dtype, device=device).unbind(0) for _ in "ab"]
    position = torch.tensor(0, device=device)
    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        found, want = (f(*c, position, x["q"]) for f, c in zip((compiled, step), caches))
    assert torch.equal(found, want)
    for a, b in zip(*caches):
        assert torch.equal(a, b) and a[:, :, 0].any()
