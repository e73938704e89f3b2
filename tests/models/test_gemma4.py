"""Gemma 4: values that are normed, keys that are values, keys and values shared by layers, and the
scalar of a layer."""

import copy

import pytest
import torch
from tiny_models import assert_same_padded_step, assert_same_tokens, randomise, tokens
from written import found_of_changed

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.gemma4")

FORMS = {
    "values are keys": {"attention_k_eq_v": True},
    "values of their own": {"attention_bias": True},
    # output_router_logits: else transformers 5.24 slices inputs of layers, which are not there
    "shared": {
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "output_router_logits": True,
    },
    "inputs of layers": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "experts": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    },
}  # fmt: skip
WHOLE = ("values are keys", "values of their own", "shared", "inputs of layers")  # layers, too


@pytest.fixture(autouse=True)
def by_reference(kernel):
    with kernel.use_reference():
        yield


def model_of(form: str):
    config = transformers.AutoConfig.for_model(
        "gemma4_text", **{"hidden_size_per_layer_input": 0, **FORMS[form]}, vocab_size=97,
        vocab_size_per_layer_input=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=8,
        global_head_dim=16, max_position_embeddings=256, sliding_window=5, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomise(transformers.AutoModelForCausalLM.from_config(config)).eval()
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    return model


@pytest.fixture
def models(kernel, request):
    model = model_of(request.param)
    served = copy.deepcopy(model)
    report = kernel.kernelize(served)
    return model, served, report


every = pytest.mark.parametrize("models", FORMS, indirect=True)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_served(kernel, form):
    report = kernel.kernelize(model_of(form))
    served = [row.layer for row in report.served]
    assert served.count("Attention") == 4, report
    assert served.count("DecoderLayer") == 4 * (form in WHOLE), report


@every
def test_logits_and_gradients(models):
    model, served, _ = models
    assert_same_padded_step(served, model)


@every
@pytest.mark.parametrize("cache", [None, "static"])
def test_tokens(models, cache):
    model, served, _ = models
    assert_same_tokens(served, model, cache)


def attention_of(form: str, layer: int):
    """An attention module, kernelized, and the arguments of a call."""
    model = model_of(form)
    module, calls = model.model.layers[layer].self_attn, []
    hook = module.register_forward_pre_hook(
        lambda m, args, words: calls.append((args, words)), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens(1, 4), use_cache=False)
    hook.remove()
    return model, module, *calls[0]


def test_another_norm_of_values(kernel):
    """It is called as a module: whatever it has become is what a call does."""
    model, module, args, words = attention_of("shared", 1)
    kernel.kernelize(model)
    module.v_norm.register_forward_hook(lambda m, x, y: 3 * y)
    expected = type(module).forward(module, *args, **words)[0]
    assert torch.allclose(module(*args, **words)[0], expected, atol=1e-6)


@pytest.mark.parametrize("layer", [1, 3])  # one that stores, and one that takes
def test_nothing_to_share_by(kernel, layer):
    """The class's own forward says what is wrong."""
    model, module, args, words = attention_of("shared", layer)
    kernel.kernelize(model)
    words = {**words, "shared_kv_states": None}
    with pytest.raises(TypeError, match="NoneType"):
        module(*args, **words)


def test_a_scalar_of_another_value(kernel):
    model = model_of("values are keys")
    served = copy.deepcopy(model)
    kernel.kernelize(served)
    with torch.no_grad():
        before = served(tokens(1, 4)).logits
        for m in (model, served):
            m.model.layers[1].layer_scalar.fill_(-1.5)
        after, expected = served(tokens(1, 4)).logits, model(tokens(1, 4)).logits
        served.model.layers[1].layer_scalar = served.model.layers[1].layer_scalar.double()
        same = served(tokens(1, 4)).logits
    assert (after - before).abs().max() > 1e-3
    assert torch.allclose(after, expected, atol=1e-5)
    assert torch.allclose(same, expected, atol=1e-5)


CHANGES = {  # of the forward: layer, text, text in its place
    "nothing": (1, "", ""),
    "values stored as keys": (1, "= (key_states, value_states)", "= (value_states, key_states)"),
    "stored under another key": (1, "[self.layer_type] =", "[self.layer_idx, 0] ="),
    "stored twice": (1, "[self.layer_type] =", "[0] = shared_kv_states[self.layer_type] ="),
    "values with an offset": (1, "self.v_norm(", "1 + self.v_norm("),
    "keys by the norm of values": (1, "self.k_norm(key_states)", "self.v_norm(key_states)"),
    "keys that are queries": (1, "self.k_proj(hidden_states)", "self.q_proj(hidden_states)"),
    "nothing, of one that takes": (3, "", ""),
    "taken in another order": (
        3, "shared_kv_states[self.layer_type]\n", "shared_kv_states[self.layer_type][::-1]\n",
    ),
    "taken keys that are scaled": (
        3, "query_states = query_states.transpose(1, 2)",
        "query_states = query_states.transpose(1, 2) * 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_another_formula_is_left_alone(name, monkeypatch):
    layer, old, new = CHANGES[name]
    module = model_of("shared").model.layers[layer].self_attn
    finding = found_of_changed(monkeypatch, module, old, new)
    assert (finding.reason is None) == (old == new), finding.reason


LAYERS = {  # of a layer's forward: text, text in its place
    "nothing": ("", ""),
    "inputs without an activation": ("self.act_fn(hidden_states)", "hidden_states"),
    "inputs that are added": ("hidden_states * per_layer_input", "hidden_states + per_layer_input"),
    "inputs twice": ("* per_layer_input", "* per_layer_input * per_layer_input"),
    "inputs by the layer's input": (
        "self.per_layer_input_gate(hidden_states)",
        "self.per_layer_input_gate(self.input_layernorm(hidden_states))",
    ),
    "no sum behind inputs": (
        "hidden_states = self.post_per_layer_input_norm(hidden_states)\n"
        "        hidden_states = residual + hidden_states",
        "hidden_states = self.post_per_layer_input_norm(hidden_states)",
    ),
    "the scalar before inputs": (
        "if self.hidden_size_per_layer_input:",
        "hidden_states = hidden_states * self.layer_scalar\n"
        "    if self.hidden_size_per_layer_input:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_another_layer_is_left_alone(name, monkeypatch):
    old, new = LAYERS[name]
    layer = model_of("inputs of layers").model.layers[0]
    finding = found_of_changed(monkeypatch, layer, old, new)
    assert (finding.reason is None) == (old == new), finding.reason


def test_a_layer_without_its_inputs(kernel):
    """The class's own forward says what is wrong; another act or norm is called as it is."""
    model = model_of("inputs of layers")
    layer, calls = model.model.layers[0], []
    hook = layer.register_forward_pre_hook(
        lambda m, args, words: calls.append((args, words)), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens(1, 4), use_cache=False)
    hook.remove()
    (x, inputs, *args), words = calls[0]
    kernel.kernelize(model)
    layer.act_fn.register_forward_hook(lambda m, x, y: 3 * y)
    expected = type(layer).forward(layer, x, inputs, *args, **words)
    assert torch.allclose(layer(x, inputs, *args, **words), expected, atol=1e-5)
    with pytest.raises(TypeError, match="NoneType"):
        layer(x, None, *args, **words)
