"""Attention of other forms, and layers around it: gated by a projection of its own (AFMoE, Laguna,
LFM3), with values that are scaled and narrower than keys (MiMo-V2) or normed, keys that are values
or are shared by layers (Gemma 4), rotary tables in fp32 (LFM3) or of half a head's width, sinks
(gpt-oss), a dropout behind it (Seed-OSS), queries scaled by position (Ministral 3)."""

import contextlib
import copy

import pytest
import torch
from conftest import submodule
from tiny_models import BASE, assert_same_padded_step, assert_same_tokens, randomise, tokens
from written import found_of_changed

transformers = pytest.importorskip("transformers")
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
SHAPE = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, **KINDS,
}  # fmt: skip
LAGUNA = {**SHAPE, "num_experts": 4, "shared_expert_intermediate_size": 16,
          "mlp_layer_types": ["dense"] * 2}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4,
}  # fmt: skip
GEMMA = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
    "head_dim": 8, "global_head_dim": 16, "initializer_range": 0.2, "sliding_window": 5,
    "layer_types": KINDS["layer_types"] * 2,
}  # fmt: skip
GATED = {
    "afmoe": {**SHAPE, "num_experts": 4, "num_dense_layers": 1},
    "laguna": {**LAGUNA, "num_attention_heads_per_layer": [4, 8]},
    "laguna, a gate for each channel": {**LAGUNA, "gating": "per-element"},
    "mimo_v2_flash": {
        **SHAPE, "n_routed_experts": 4, "v_head_dim": 8, "attention_value_scale": 0.6,
        "n_group": 1, "topk_group": 1,
    },
    "lfm3": SHAPE,
}  # fmt: skip
SCALED = {
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **KINDS},
    "seed_oss": {"head_dim": 16, "residual_dropout": 0.1, "attention_dropout": 0.1},
    "ministral3": {"head_dim": 16, "rope_parameters": YARN},
}  # fmt: skip
SHARED, INPUTS = "gemma4_text, keys and values are shared", "gemma4_text, inputs of layers"
MIXTURE = "gemma4_text, experts"
GEMMA4 = {
    "gemma4_text, values are keys": {**GEMMA, "attention_k_eq_v": True},
    "gemma4_text, values of their own": {**GEMMA, "attention_bias": True},
    # output_router_logits: else transformers 5.24 slices inputs of layers, which are not there
    SHARED: {
        **GEMMA, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "output_router_logits": True,
    },
    INPUTS: {**GEMMA, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    MIXTURE: {
        **GEMMA, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}  # fmt: skip
MODELS = {**GATED, **SCALED, **GEMMA4}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def by_reference(kernel, request):
    on_gpu = request.node.get_closest_marker("gpu") is not None
    with contextlib.nullcontext() if on_gpu else kernel.use_reference():
        yield


def model_of(name: str, **changes):
    kind, gemma = name.split(",")[0], name in GEMMA4
    try:
        config = transformers.AutoConfig.for_model(kind, **{**BASE, **MODELS[name], **changes})
    except ValueError:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    how = {} if gemma else {"attn_implementation": "eager"}
    model = randomise(transformers.AutoModelForCausalLM.from_config(config, **how)).eval()
    for layer in model.model.layers if gemma else ():
        layer.layer_scalar.fill_(0.7)
    return model


def both(kernel, name: str, **changes):
    model = model_of(name, **changes)
    served = copy.deepcopy(model)
    report = kernel.kernelize(served, skip=[] if name in GEMMA4 else ["experts"])
    found = [row.layer for row in report.served]
    layers = model.config.num_hidden_layers
    assert found.count("Attention") == layers, report
    assert name not in GEMMA4 or found.count("DecoderLayer") == layers, report
    return model, served


@every_model
def test_logits_and_gradients(kernel, name):
    model, served = both(kernel, name)
    assert_same_padded_step(served, model)


@every_model
@pytest.mark.parametrize("cache", [None, "static"])
def test_tokens(kernel, name, cache):
    model, served = both(kernel, name)
    assert_same_tokens(served, model, cache)


@pytest.mark.parametrize("name", GATED)
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


CHANGES = {  # of the forward: model, layer, text, text in its place, whether it is served
    "a gate": ("afmoe", 0, "", "", True),
    "another gate": ("afmoe", 0, "torch.sigmoid(gate_states)", "torch.tanh(gate_states)", False),
    "a gate in another place": (
        "afmoe", 0, "self.o_proj(output)",
        "self.o_proj(output) * torch.sigmoid(gate_states).mean()", False,
    ),
    "a gate of another input": (
        "afmoe", 0, "gate_proj(hidden_states)", "gate_proj(-hidden_states)", False,
    ),
    "a softplus": ("laguna", 0, "", "", True),
    "a softplus of another slope": ("laguna", 0, ".float())", ".float(), beta=2)", False),
    "values scaled": ("mimo_v2_flash", 0, "", "", True),
    "values scaled twice": ("mimo_v2_flash", 0, "self.v_scale", "self.v_scale * 2", False),
    "keys scaled": (
        "mimo_v2_flash", 0, "if past_key_values is not None:",
        "key_states = key_states * self.v_scale\n    if past_key_values is not None:", False,
    ),
    "a dropout": ("seed_oss", 0, "", "", True),
    "a dropout in evaluation": ("seed_oss", 0, "training=self.training)", "training=True)", False),
    "another value in evaluation": (
        "seed_oss", 0, "training=self.training)", "training=True) * 2", False,
    ),
    "another value in training": (
        "seed_oss", 0, "self.training)\n", "self.training) * (1 + self.training)\n", True,
    ),
    "queries scaled": ("ministral3", 0, "", "", True),
    "keys scaled, too": (
        "ministral3", 0, ".to(query_states.dtype)",
        ".to(query_states.dtype)\n    key_states = key_states * 2", False,
    ),
    "a factor without its part": ("ministral3", 0, ".to(query_states.dtype)", " / 2", False),
    "sinks": ("gpt_oss", 0, "", "", True),
    "sinks that are scaled": ("gpt_oss", 0, "s_aux=self.sinks", "s_aux=2 * self.sinks", False),
    "without sinks": ("gpt_oss", 0, "s_aux=self.sinks, ", "", True),
    "values stored": (SHARED, 1, "", "", True),
    "values stored as keys": (
        SHARED, 1, "= (key_states, value_states)", "= (value_states, key_states)", False,
    ),
    "stored under another key": (
        SHARED, 1, "[self.layer_type] =", "[self.layer_idx, 0] =", False,
    ),
    "stored twice": (
        SHARED, 1, "[self.layer_type] =", "[0] = shared_kv_states[self.layer_type] =", False,
    ),
    "values with an offset": (SHARED, 1, "self.v_norm(", "1 + self.v_norm(", False),
    "keys by the norm of values": (
        SHARED, 1, "self.k_norm(key_states)", "self.v_norm(key_states)", False,
    ),
    "keys that are queries": (
        SHARED, 1, "self.k_proj(hidden_states)", "self.q_proj(hidden_states)", False,
    ),
    "values taken": (SHARED, 3, "", "", True),
    "taken in another order": (
        SHARED, 3, "shared_kv_states[self.layer_type]\n",
        "shared_kv_states[self.layer_type][::-1]\n", False,
    ),
    "taken keys that are scaled": (
        SHARED, 3, "query_states = query_states.transpose(1, 2)",
        "query_states = query_states.transpose(1, 2) * 2", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_another_formula_is_left_alone(what, monkeypatch):
    of, layer, old, new, served = CHANGES[what]
    module = model_of(of).model.layers[layer].self_attn
    finding = found_of_changed(monkeypatch, module, old, new)
    assert (finding.reason is None) == served, finding.reason
    if what == "without sinks":
        assert "s_aux" not in [word.name for word in finding.form.words]


LAYERS = {  # of a layer's forward: text, text in its place
    "nothing": ("", ""),
    "attention's second output": ("self.mlp(hidden_states)", "self.mlp(hidden_states, _)"),
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


EXPERTS = {  # the same, of a layer with experts beside its MLP
    "nothing": ("", ""),
    "experts of the MLP's output": ("flat = residual.reshape", "flat = hidden_states.reshape"),
    "weights for experts": (
        "(hidden_states_2, top_k_index, top_k_weights)",
        "(hidden_states_2, top_k_weights, top_k_index)",
    ),
    "logits for weights": ("_, top_k_weights, top_k_index", "top_k_weights, _, top_k_index"),
    "experts of rows that are not normed": (
        "self.experts(hidden_states_2,", "self.experts(hidden_states_flat,",
    ),
    "a difference": ("hidden_states_1 + hidden_states_2", "hidden_states_1 - hidden_states_2"),
    "half of the experts": (
        "hidden_states_1 + hidden_states_2", "hidden_states_1 + 0.5 * hidden_states_2",
    ),
    "without a norm": ("self.post_feedforward_layernorm_2(hidden_states_2)", "hidden_states_2"),
    "the router after the norm": (
        "self.router(hidden_states_flat)",
        "self.router(self.pre_feedforward_layernorm_2(hidden_states_flat))",
    ),
}  # fmt: skip
CHANGED = [(INPUTS, name) for name in LAYERS] + [(MIXTURE, name) for name in EXPERTS]


@pytest.mark.parametrize("of, name", CHANGED)
def test_another_layer_is_left_alone(of, name, monkeypatch):
    old, new = (EXPERTS if of == MIXTURE else LAYERS)[name]
    layer = model_of(of).model.layers[0]
    finding = found_of_changed(monkeypatch, layer, old, new)
    assert (finding.reason is None) == (old == new), finding.reason


def called(model, module, count: int = 4):
    """The arguments of the module's call for a prompt: by position, and by name."""
    calls = []
    hook = module.register_forward_pre_hook(
        lambda m, args, words: calls.append((args, words)), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens(1, count), use_cache=False)
    hook.remove()
    return calls[0]


# (the model, its layer, what is not given: positions, where keys are stored, where they are taken)
MISSING = [("ministral3", 0, "position_ids"), (SHARED, 1, "shared_kv_states"),
           (SHARED, 3, "shared_kv_states")]  # fmt: skip


@pytest.mark.parametrize("name, layer, argument", MISSING)
def test_arguments_that_are_not_given(kernel, name, layer, argument):
    """The class's own forward says what is wrong."""
    model = model_of(name)
    module = model.model.layers[layer].self_attn
    args, words = called(model, module)
    kernel.kernelize(model)
    with pytest.raises(TypeError, match="NoneType|None"):
        module(*args, **{**words, argument: None})


def test_another_norm_of_values(kernel):
    """It is called as a module: whatever it has become is what a call does."""
    model = model_of(SHARED)
    module = model.model.layers[1].self_attn
    args, words = called(model, module)
    kernel.kernelize(model)
    module.v_norm.register_forward_hook(lambda m, x, y: 3 * y)
    expected = type(module).forward(module, *args, **words)[0]
    assert torch.allclose(module(*args, **words)[0], expected, atol=1e-6)


def test_a_scalar_of_another_value(kernel):
    model = model_of("gemma4_text, values are keys")
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


def test_a_layer_without_its_inputs(kernel):
    """The class's own forward says what is wrong; another act or norm is called as it is."""
    model = model_of(INPUTS)
    layer = model.model.layers[0]
    (x, inputs, *args), words = called(model, layer)
    kernel.kernelize(model)
    layer.act_fn.register_forward_hook(lambda m, x, y: 3 * y)
    expected = type(layer).forward(layer, x, inputs, *args, **words)
    assert torch.allclose(layer(x, inputs, *args, **words), expected, atol=1e-5)
    with pytest.raises(TypeError, match="NoneType"):
        layer(x, None, *args, **words)


def test_experts_beside_an_mlp_that_change(kernel):
    """Another router is called as it is; without the flag the class's own forward has none."""
    model = model_of(MIXTURE)
    served = copy.deepcopy(model)
    kernel.kernelize(served)

    class Halves(torch.nn.Module):
        def forward(self, x):
            return x, torch.full((len(x), 2), 0.5), torch.tensor([[0, 3]]).expand(len(x), 2)

    with torch.no_grad():
        before = model(tokens(1, 4)).logits
        for m in (model, served):
            m.model.layers[0].router = Halves()
            m.model.layers[1].enable_moe_block = False
        found, expected = (m(tokens(1, 4)).logits for m in (served, model))
    assert (before - expected).abs().max() > 1e-3
    assert torch.allclose(found, expected, atol=1e-5)


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
@pytest.mark.parametrize("name", GATED)
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
