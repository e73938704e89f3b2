"""Parts and methods that are put in the place of others after kernelize, or before it."""

import pytest
import torch
import torch.nn.functional as F
from conftest import submodule
from test_model_layers import pair
from tiny_models import assert_same, logits, random_model, serve_blocks, serving, tokens
from torch import nn

transformers = pytest.importorskip("transformers")
attention_trial = submodule("models.attention_trial")
attention = submodule("layers.attention")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trusts_all")]


def test_a_forward_given_to_a_subclass(kernel):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    kind = type("SubRMSNorm", (LlamaRMSNorm,), {})
    norm, x = kind(8), torch.randn(3, 8)
    assert kernel.kernelize(norm).served
    kind.forward = lambda self, hidden_states: hidden_states * 2
    with serving():
        assert torch.equal(norm(x), x * 2)


def test_attention_functions_of_a_registry_of_ones_own(kernel, monkeypatch):
    """transformers' registry is what our forward asks."""
    from transformers.models.qwen3 import modeling_qwen3

    def doubled(module, q, k, v, mask, **keywords):
        out, weights = transformers.AttentionInterface()["sdpa"](module, q, k, v, mask, **keywords)
        return out * 2, weights

    own = transformers.AttentionInterface()
    own["sdpa"] = doubled
    monkeypatch.setattr(modeling_qwen3, "ALL_ATTENTION_FUNCTIONS", own)
    model, served = pair(kernel, "qwen3")
    ids = tokens(2, 5)
    with serving():
        assert_same(logits(served, ids), logits(model, ids))


def decoded(model, kind, held=None):
    """Logits of a token on a cache; held: gives what of it has another `update` after the prompt,
    by which keys and values are not those that were given."""
    size = {"max_cache_len": 12} if kind is transformers.StaticCache else {}
    cache, ids = kind(config=model.config, **size), tokens(2, 6)
    logits(model, ids, past_key_values=cache)
    with pytest.MonkeyPatch.context() as patch:
        if held is not None:
            own = held(cache).update
            twice = lambda *a, **k: tuple(x * 2 for x in own(*a, **k))  # noqa: E731
            patch.setattr(held(cache), "update", twice)
        return logits(model, ids[:, :1], past_key_values=cache)


CACHES = [transformers.StaticCache, transformers.DynamicCache]
HELD = {
    "the cache": lambda cache: cache, "its class": lambda cache: transformers.Cache,
    "a layer": lambda cache: cache.layers[1], "its layers": lambda cache: type(cache.layers[1]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_a_patched_cache(kernel, held, kind):
    model, served = pair(kernel, "qwen3")
    with serving():
        assert_same(decoded(served, kind, held), decoded(model, kind, held))
    model, served = model.bfloat16(), served.bfloat16()
    ref = decoded(model, kind, held)
    with serving() as record:
        out = decoded(served, kind, held)
    assert record["kvcache_attention"]
    assert (out - ref).abs().max() < 0.1 * ref.abs().max()
    assert (ref - decoded(model, kind)).abs().max() > 0.1 * ref.abs().max()


@pytest.mark.parametrize("kind", CACHES)
def test_a_patched_sdpa(kernel, kind, monkeypatch):
    """Decoding over a cache is a kernel of ours only where SDPA is torch's."""
    model, served = (m.bfloat16() for m in pair(kernel, "qwen3"))
    own = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: own(*a, **k) * 2)
    ref = decoded(model, kind)
    with serving() as record:
        out = decoded(served, kind)
    assert "kvcache_attention" not in record and record["qk_norm_rope_fwd"]
    assert (out - ref).abs().max() < 0.1 * ref.abs().max()


def test_a_patched_router(kernel, monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    monkeypatch.setattr(submodule("runtime.dispatch"), "has_kernels", lambda *args: True)
    config = transformers.Qwen3MoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=2)
    kind = modeling_qwen3_moe.Qwen3MoeTopKRouter
    router = kind(config).bfloat16()
    nn.init.normal_(router.weight)
    (row,) = serve_blocks(router)
    assert row.reason is None
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states: "patched")
    assert router(torch.randn(3, 16).bfloat16()) == "patched"


TABLES = {
    "sin in bf16": lambda cos, sin: (cos, sin.bfloat16()),
    "one for all tokens": lambda cos, sin: (cos[:, :1], sin[:, :1]),
}


@pytest.mark.parametrize("which", TABLES)
def test_tables_that_no_kernel_takes(kernel, which):
    model, served = pair(kernel, "qwen3")
    x, *tables = torch.randn(2, 6, 32), *torch.rand(2, 1, 6, 16)
    given = {"position_embeddings": TABLES[which](*tables), "attention_mask": None}
    with torch.no_grad(), serving():
        out, ref = (m.model.layers[0].self_attn(x, **given)[0] for m in (served, model))
    assert_same(out, ref)


def outcome(function, *args, **options):
    """Result of a call, or the type and message of the error that it raises."""
    try:
        return function(*args, **options)
    except Exception as error:
        return type(error), str(error)


X = torch.arange(24.0).view(3, 8) - 9
INPUTS = {
    "integers": X.int(), "bytes": X.byte(), "flags": X > 0, "complex": X + 1j * X.flip(0),
    "a number": torch.tensor(3.0), "no rows": X[:0], "no columns": X[:, :0], "half": X.half(),
    "twice as wide": torch.cat([X, X], -1), "a list": X.tolist(), "float8": X.to(torch.float8_e5m2),
}  # fmt: skip
OF_NORMS = {
    "none": {}, "a negative eps": {"eps": -0.25}, "eps is nan": {"eps": float("nan")},
    "an int for eps": {"eps": 1}, "a tensor for eps": {"eps": torch.tensor(0.5)},
    "integers as weight": {"weight": torch.arange(8)}, "one number": {"weight": torch.tensor(2.0)},
    "complex weight": {"weight": torch.ones(8) * 1j}, "flags as weight": {"weight": X[0] > 0},
}  # fmt: skip


@pytest.mark.parametrize("changes", OF_NORMS.values(), ids=OF_NORMS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_norms_take_what_their_class_takes(kernel, name, changes):
    kind = type(random_model(name).model.norm)
    own, served = kind(8), kind(8)
    assert kernel.kernelize(served).served
    for norm in (own, served):
        for attribute in ("variance_epsilon", "eps"):
            if "eps" in changes and attribute in norm.__dict__:
                setattr(norm, attribute, changes["eps"])
        if "weight" in changes:
            norm.weight = nn.Parameter(changes["weight"].clone(), requires_grad=False)
    with torch.no_grad(), serving():
        for what, x in {**INPUTS, "floats": X}.items():
            found, expected = outcome(served, x), outcome(own, x)
            assert type(found) is type(expected), what
            if isinstance(found, tuple):
                assert found == expected, what
            else:
                assert found.dtype is expected.dtype, what
                wide = torch.complex128 if found.is_complex() else torch.float64
                both = found.to(wide), expected.to(wide)
                assert torch.allclose(*both, 1e-5, 1e-6, equal_nan=True), what
