"""Parts and methods that are put in the place of others after kernelize, or before it."""

import copy
import types

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
WHEN = pytest.mark.parametrize("when", ["before", "after"])


def of_layers(part, name, make):
    """A change of a part of every layer, by its name ("" is the layer): another attribute."""

    def change(model):
        for layer in model.model.layers:
            setattr(layer.get_submodule(part), name, make())

    return change


class Tripled(nn.Module):
    def forward(self, x):
        return x * 3


class BareRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def another_method(model):
    norm = model.model.layers[1].input_layernorm
    norm._norm = types.MethodType(lambda self, x: x * 2, norm)


def bare_norms(model):
    for name in ("q_norm", "k_norm"):
        of_layers("self_attn", name, BareRMSNorm)(model)


def weights_of(norms, weight):
    """In place of a norm's weight a number or a row of one, which torch broadcasts."""

    def change(model):
        for path, module in model.named_modules():
            if path.split(".")[-1] == norms:
                module.weight = nn.Parameter(weight.clone())

    return change


CHANGES = {  # the model, and what is done to it
    "a method of one norm": ("gemma2", another_method),
    "a part for a dropout": ("phi3", of_layers("", "resid_mlp_dropout", Tripled)),
    "norms without weights": ("qwen3", bare_norms),
    **{f"{norms} of {name} by {tuple(weight.shape)}": (name, weights_of(norms, weight))
       for name, norms in (("qwen3", "q_norm"), ("olmo2", "k_norm"), ("qwen3_5_text", "norm"))
       for weight in (torch.tensor(1.5), torch.tensor([1.5]))},
}  # fmt: skip


@WHEN
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_put_in_place(kernel, what, when):
    name, change = CHANGES[what]
    model, served = random_model(name), random_model(name)
    kernel.kernelize(random_model(name))  # its classes are known
    assert kernel.kernelize(BareRMSNorm()).served
    if when == "after":
        kernel.kernelize(served)
    change(model), change(served)
    if when == "before":
        kernel.kernelize(served)
    ids = tokens(2, 5)
    with serving():
        assert_same(logits(served, ids), logits(model, ids))
    assert (logits(model, ids) - logits(random_model(name), ids)).abs().max() > 1e-4


def test_a_forward_given_to_a_subclass(kernel):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    kind = type("SubRMSNorm", (LlamaRMSNorm,), {})
    norm, x = kind(8), torch.randn(3, 8)
    assert kernel.kernelize(norm).served
    kind.forward = lambda self, hidden_states: hidden_states * 2
    with serving():
        assert torch.equal(norm(x), x * 2)


@pytest.mark.parametrize("name, norms", [("llama", "layernorm"), ("qwen3", "k_norm")])
@WHEN
def test_a_call_given_to_a_class_of_norms(kernel, name, norms, when):
    """A layer and an attention module read the weights of their norms in place of calling them."""

    def change(model):
        found = [m for path, m in model.named_modules() if path.endswith(norms)]
        kind = next(base for base in type(found[0]).__mro__ if base.__name__ == "SubRMSNorm")
        kind.__call__ = lambda self, x: nn.Module.__call__(self, x) * 1.5

    model, served = random_model(name), random_model(name)
    for one in (model, served):
        sub = None
        for path, module in one.named_modules():
            if path.endswith(norms):
                sub = sub or type("SubRMSNorm", (type(module),), {})
                module.__class__ = sub
    ids = tokens(2, 5)
    if when == "after":
        report = kernel.kernelize(served)
        assert not report.left
    change(model), change(served)
    if when == "before":
        report = kernel.kernelize(served)
        assert any("a __call__ of its own" in row.reason for row in report.left)
    with serving():
        assert_same(logits(served, ids), logits(model, ids))
    assert (logits(model, ids) - logits(random_model(name), ids)).abs().max() > 1e-3


@WHEN
def test_what_takes_the_place_of_an_identity(kernel, when):
    """A norm of keys that is nn.Identity in some models, as Qwen3-Omni's."""
    model = random_model("qwen3")
    for name in ("q_norm", "k_norm"):
        of_layers("self_attn", name, nn.Identity)(model)
    form = attention_trial.attention_form(model.model.layers[1].self_attn)
    assert form.identities == ("q_norm", "k_norm")
    served, ids = copy.deepcopy(model), tokens(2, 5)
    if when == "after":
        kernel.kernelize(served)
    for each in (model, served):
        each.model.layers[1].self_attn.k_norm = Tripled()
    if when == "before":
        kernel.kernelize(served)
    with serving():
        assert_same(logits(served, ids), logits(model, ids))


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


def decoded(model, patch):
    """Logits of a token on a static cache that was patched after the prompt."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    ids = tokens(2, 6)
    logits(model, ids, past_key_values=cache)
    patch(cache)
    return logits(model, ids[:, :1], past_key_values=cache)


def scaled(update):
    def scale(*args, **kwargs):
        k, v = update(*args, **kwargs)
        return k, v * 2

    return scale


CACHES = {
    "the cache": lambda cache: setattr(cache, "update", scaled(cache.update)),
    "a layer of it": lambda cache: setattr(
        cache.layers[1], "update", scaled(cache.layers[1].update)
    ),
}


@pytest.mark.parametrize("where", CACHES)
def test_a_patched_cache(kernel, where):
    model, served = pair(kernel, "qwen3")
    ref = decoded(model, CACHES[where])
    with serving():
        assert_same(decoded(served, CACHES[where]), ref)
    assert (ref - decoded(model, lambda cache: None)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["Cache", "StaticLayer"])
def test_a_patched_class_of_caches(kernel, name, monkeypatch):
    kind = getattr(transformers.cache_utils, name)
    model, served = pair(kernel, "qwen3")
    monkeypatch.setattr(kind, "update", scaled(kind.update))
    ref = decoded(model, lambda cache: None)
    with serving():
        assert_same(decoded(served, lambda cache: None), ref)


def test_a_patched_sdpa(kernel, monkeypatch):
    """Decoding over a static cache is a kernel of ours only where SDPA is torch's."""
    model, served = (m.bfloat16() for m in pair(kernel, "qwen3"))
    own = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: own(*a, **k) * 2)
    ref = decoded(model, lambda cache: None)
    with serving() as record:
        out = decoded(served, lambda cache: None)
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
