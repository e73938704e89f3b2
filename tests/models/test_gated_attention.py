"""Attention whose output is gated by a projection of its own (AFMoE, Laguna, LFM3), whose values
are scaled and narrower than its keys (MiMo-V2), and with rotary tables in fp32 (LFM3)."""

import contextlib
import copy

import pytest
import torch
from conftest import submodule
from tiny_models import BASE, assert_same_padded_step, assert_same_tokens, randomise, tokens
from written import found_of_changed

transformers = pytest.importorskip("transformers")
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5}
KINDS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAGUNA = {"num_experts": 4, "shared_expert_intermediate_size": 16, "mlp_layer_types": ["dense"] * 2}
MODELS = {
    "afmoe": {"num_experts": 4, "num_dense_layers": 1},
    "laguna": {**LAGUNA, "num_attention_heads_per_layer": [4, 8]},
    "laguna, a gate for each channel": {**LAGUNA, "gating": "per-element"},
    "mimo_v2_flash": {
        "n_routed_experts": 4, "v_head_dim": 8, "attention_value_scale": 0.6,
        "n_group": 1, "topk_group": 1,
    },
    "lfm3": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def by_reference(kernel, request):
    on_gpu = request.node.get_closest_marker("gpu") is not None
    with contextlib.nullcontext() if on_gpu else kernel.use_reference():
        yield


def model_of(name: str, **changes):
    kind = name.split(",")[0]
    words = {**BASE, **SHAPE, **EXPERTS, "layer_types": KINDS, **MODELS[name], **changes}
    try:
        config = transformers.AutoConfig.for_model(kind, **words)
    except ValueError:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomise(model).eval()


def both(kernel, name: str, **changes):
    model = model_of(name, **changes)
    served = copy.deepcopy(model)
    report = kernel.kernelize(served, skip=["experts"])
    assert sum(row.layer == "Attention" for row in report.served) == 2, report
    return model, served


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(kernel, name):
    model, served = both(kernel, name)
    assert_same_padded_step(served, model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [None, "static"])
def test_tokens(kernel, name, cache):
    model, served = both(kernel, name)
    assert_same_tokens(served, model, cache)


@pytest.mark.parametrize("name", MODELS)
def test_modules_in_fp64(name, monkeypatch):
    """The served forward beside the class's: fp64 is the trial's, so it is called by its form."""
    module = model_of(name).double().model.layers[0].self_attn
    x = torch.randn(2, 5, BASE["hidden_size"], dtype=torch.float64)
    tables = tuple(torch.randn(2, 5, SHAPE["head_dim"], dtype=torch.float64) for _ in range(2))
    words = {"position_embeddings": tables, "attention_mask": None}
    form = submodule("models.attention_trial").attention_form(module)
    ours = submodule("layers.attention").Attention(form)
    with torch.no_grad():
        found, _ = ours.served(module, x, words, {})
        expected, _ = module(x, **words)
    assert found.dtype is torch.float64
    limit = 1e-12 if "mimo" in name else 1e-6  # norms and gates that compute in fp32
    assert (found - expected).abs().max() <= limit * expected.abs().max()


CHANGES = {  # of the forward: type, text, text in its place, whether it is served
    "nothing": ("afmoe", "", "", True),
    "another gate": ("afmoe", "torch.sigmoid(gate_states)", "torch.tanh(gate_states)", False),
    "a gate in another place": (
        "afmoe", "self.o_proj(output)", "self.o_proj(output) * torch.sigmoid(gate_states).mean()",
        False,
    ),
    "a gate of another input": (
        "afmoe", "gate_proj(hidden_states)", "gate_proj(-hidden_states)", False,
    ),
    "a softplus": ("laguna", "", "", True),
    "a softplus of another slope": ("laguna", ".float())", ".float(), beta=2)", False),
    "values scaled": ("mimo_v2_flash", "", "", True),
    "values scaled twice": ("mimo_v2_flash", "self.v_scale", "self.v_scale * 2", False),
    "keys scaled": (
        "mimo_v2_flash", "if past_key_values is not None:",
        "key_states = key_states * self.v_scale\n    if past_key_values is not None:", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_another_formula_is_left_alone(name, monkeypatch):
    of, old, new, served = CHANGES[name]
    module = model_of(of).model.layers[0].self_attn
    finding = found_of_changed(monkeypatch, module, old, new)
    assert (finding.reason is None) == served, finding.reason


def test_a_scale_that_changes(kernel):
    """The class's own forward runs, until the value is again what was tried."""
    model, served = both(kernel, "mimo_v2_flash")
    for m in (model, served):
        m.model.layers[0].self_attn.v_scale = 3.0
    with torch.no_grad():
        found, expected = (m(tokens(2, 9)).logits for m in (served, model))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_tables_in_fp32(kernel, monkeypatch):
    """Of a model in bf16: served where the class's forward takes them, too."""
    model, served = both(kernel, "lfm3")
    model, served = model.bfloat16(), served.bfloat16()
    calls, kind = [], submodule("layers.attention").Attention
    own = kind.normed_and_turned
    counted = staticmethod(lambda *a, **k: calls.append(a[2].dtype) or own(*a, **k))
    monkeypatch.setattr(kind, "normed_and_turned", counted)
    with torch.no_grad():
        found, expected = (m(tokens(2, 9)).logits.float() for m in (served, model))
    assert calls == [torch.float32] * 2
    assert (found - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_kernels(kernel, name):
    """bf16 on a GPU: a prompt, and tokens on both caches. Where the attention function is SDPA the
    tokens are attended by a kernel; values that are narrower than keys leave that to SDPA."""
    sizes = {"hidden_size": 128, "head_dim": 64, "num_dense_layers": 2}
    sizes.update({"v_head_dim": 32, "mlp_layer_types": ["dense"] * 2} if "mimo" in name else {})
    model = model_of(name, **sizes).to("cuda")
    if "mimo" not in name:  # which has no other than eager
        model.set_attn_implementation("sdpa")
    exact, model = copy.deepcopy(model), model.bfloat16()
    served = copy.deepcopy(model)
    report = kernel.kernelize(served)
    assert sum(row.layer == "Attention" for row in report.served) == 2, report
    ids = tokens(2, 40, device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    errors = {}
    with torch.no_grad():
        for what, m in {"exact": exact.float(), "ours": served, "theirs": model}.items():
            for kind in (transformers.DynamicCache, transformers.StaticCache):
                words = {} if kind is transformers.DynamicCache else {"max_cache_len": 48}
                cache, steps = kind(config=m.config, **words), []
                steps.append(m(ids[:, :36], attention_mask=mask[:, :36], past_key_values=cache))
                for t in range(36, 40):
                    given = {"attention_mask": mask[:, : t + 1], "past_key_values": cache}
                    steps.append(m(ids[:, t : t + 1], **given))
                logits = torch.cat([step.logits[:, -1:] for step in steps], 1).double()
                errors[what, kind] = logits
    for kind in (transformers.DynamicCache, transformers.StaticCache):
        exact = errors["exact", kind]
        mine, theirs = ((errors[n, kind] - exact).norm() for n in ("ours", "theirs"))
        assert mine <= 1.5 * theirs + 5e-3 * exact.norm(), (kind, mine, theirs)
