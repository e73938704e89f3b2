"""Attention with sinks and tables of half a head's width (gpt-oss), with a dropout behind it
(Seed-OSS) and with queries scaled by position (Ministral 3)."""

import copy

import pytest
import torch
from tiny_models import BASE, assert_same_padded_step, assert_same_tokens, randomise, tokens
from written import found_of_changed

transformers = pytest.importorskip("transformers")
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4,
}  # fmt: skip
MODELS = {
    "gpt_oss": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "seed_oss": {"head_dim": 16, "residual_dropout": 0.1, "attention_dropout": 0.1},
    "ministral3": {"head_dim": 16, "rope_parameters": YARN},
}  # fmt: skip


@pytest.fixture(autouse=True)
def by_reference(kernel):
    with kernel.use_reference():
        yield


def model_of(name: str, **changes):
    config = transformers.AutoConfig.for_model(name, **{**BASE, **MODELS[name], **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomise(model).eval()


@pytest.fixture
def models(kernel, request):
    model = model_of(request.param)
    served = copy.deepcopy(model)
    report = kernel.kernelize(served, skip=["experts"])
    assert sum(row.layer == "Attention" for row in report.served) == 2, report
    return model, served


every = pytest.mark.parametrize("models", MODELS, indirect=True)


@every
def test_logits_and_gradients(models):
    model, served = models
    assert_same_padded_step(served, model)


@every
@pytest.mark.parametrize("cache", [None, "static"])
def test_tokens(models, cache):
    model, served = models
    assert_same_tokens(served, model, cache)


CHANGES = {  # of the forward: type, text, text in its place, whether it is served
    "nothing": ("seed_oss", "", "", True),
    "a dropout in evaluation": ("seed_oss", "training=self.training)", "training=True)", False),
    "another value in evaluation": (
        "seed_oss", "training=self.training)", "training=True) * 2", False,
    ),
    "another value in training": (
        "seed_oss", "self.training)\n", "self.training) * (1 + self.training)\n", True,
    ),
    "nothing else": ("ministral3", "", "", True),
    "keys scaled, too": (
        "ministral3", ".to(query_states.dtype)",
        ".to(query_states.dtype)\n    key_states = key_states * 2", False,
    ),
    "a factor without its part": ("ministral3", ".to(query_states.dtype)", " / 2", False),
    "no change": ("gpt_oss", "", "", True),
    "sinks that are scaled": ("gpt_oss", "s_aux=self.sinks", "s_aux=2 * self.sinks", False),
    "without sinks": ("gpt_oss", "s_aux=self.sinks, ", "", True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_another_formula_is_left_alone(name, monkeypatch):
    of, old, new, served = CHANGES[name]
    module = model_of(of).model.layers[0].self_attn
    finding = found_of_changed(monkeypatch, module, old, new)
    assert (finding.reason is None) == served, finding.reason
    if name == "without sinks":
        assert "s_aux" not in [word.name for word in finding.form.words]


def test_training_runs_the_own_forward(kernel, monkeypatch):
    """Of a module whose dropout ours does not compute."""
    model = model_of("seed_oss")
    kernel.kernelize(model)
    module = model.model.layers[0].self_attn
    own, calls = type(module).__mro__[1], []
    kind = own if "forward" in vars(own) else type(module)
    forward = kind.forward
    monkeypatch.setattr(
        kind, "forward", lambda self, *a, **k: calls.append(1) or forward(self, *a, **k)
    )
    with torch.no_grad():
        model(tokens(1, 4))
        evaluated = len(calls)
        model.train()(tokens(1, 4))
    assert (evaluated, len(calls) > 0) == (evaluated, True)


def test_positions_that_are_not_given(kernel):
    """The class's own forward says what is wrong."""
    model, calls = model_of("ministral3"), []
    module = model.model.layers[0].self_attn
    hook = module.register_forward_pre_hook(
        lambda m, args, words: calls.append(words), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens(1, 4), use_cache=False)
    hook.remove()
    kernel.kernelize(model)
    with pytest.raises(TypeError):
        module(**{**calls[0], "position_ids": None})
