"""The MTP layer of a checkpoint as a drafter: loading by the published names, and what it drafts.

That a checkpoint's layer is right as often as its makers say is not shown here: it needs one.
"""

import inspect
import json

import pytest
import torch
from conftest import submodule
from tiny_models import random_model, tokens

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
mtp, dispatch = submodule("decoding.mtp"), submodule("runtime.dispatch")
NAMES = {
    "fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight",
    "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight",
    *[f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"],
    *[f"layers.0.self_attn.{x}_norm.weight" for x in "qk"],
}  # fmt: skip
DENSE = {f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
EXPERTS = {
    "layers.0.mlp.gate.weight", "layers.0.mlp.experts.gate_up_proj",
    "layers.0.mlp.experts.down_proj", "layers.0.mlp.shared_expert_gate.weight",
    *[f"layers.0.mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")],
}  # fmt: skip
MODELS = {"qwen3_5_text": DENSE, "qwen3_5_moe_text": EXPERTS, "qwen3_next": None}


@pytest.fixture(autouse=True)
def reference():
    with dispatch.force("reference"):
        yield


def weights_of(model) -> dict:
    """Random ones, by the names of checkpoints."""
    shapes = mtp.Mtp(model, 1).state_dict()
    torch.manual_seed(2)
    return {f"mtp.{name}": torch.randn(x.shape) * 0.1 for name, x in shapes.items()}


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_checkpoints(kernel, name):
    model = random_model(name)
    weights = weights_of(model)
    names = {each.removeprefix("mtp.") for each in weights}
    assert names == NAMES | (MODELS[name] or names - NAMES)
    layer = kernel.load_mtp(model, {**weights, "model.norm.weight": torch.ones(1)})
    for each, x in layer.state_dict().items():
        assert torch.equal(x, weights[f"mtp.{each}"])
    assert not layer.training and not any(x.requires_grad for x in layer.parameters())


def test_the_cache_goes_by_the_name_that_the_release_has(kernel):
    """By another one transformers warns, and a served layer runs its class's own forward."""
    layer = mtp.Mtp(random_model("qwen3_5_text"), 1)
    kernel.kernelize(layer)
    assert layer.cache_name in inspect.signature(layer.layers[0].forward).parameters


def test_files(kernel, tmp_path):
    """One file, a folder, a folder with an index."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = random_model("qwen3_5_text")
    weights = weights_of(model)
    one, two = dict(list(weights.items())[:5]), dict(list(weights.items())[5:])
    safetensors.save_file({**one, "lm_head.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    safetensors.save_file(two, tmp_path / "b.safetensors")
    safetensors.save_file(weights, tmp_path / "all.bin")
    found = [kernel.load_mtp(model, tmp_path), kernel.load_mtp(model, str(tmp_path / "all.bin"))]
    index = {name: "a.safetensors" for name in one} | {name: "b.safetensors" for name in two}
    text = json.dumps({"weight_map": index})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    found.append(kernel.load_mtp(model, tmp_path))
    for layer in found:
        for name, x in layer.state_dict().items():
            assert torch.equal(x, weights[f"mtp.{name}"])


def test_experts_one_by_one(kernel):
    model = random_model("qwen3_5_moe_text")
    weights = weights_of(model)
    place = "mtp.layers.0.mlp.experts"
    both, down = weights[f"{place}.gate_up_proj"], weights[f"{place}.down_proj"]
    apart = {n: x for n, x in weights.items() if ".experts." not in n}
    for e in range(len(both)):
        gate, up = both[e].chunk(2)
        for kind, x in (("gate", gate), ("up", up), ("down", down[e])):
            apart[f"{place}.{e}.{kind}_proj.weight"] = x
    layer = kernel.load_mtp(model, apart)
    assert torch.equal(layer.layers[0].mlp.experts.gate_up_proj, both)
    assert torch.equal(layer.layers[0].mlp.experts.down_proj, down)
    del apart[f"{place}.1.up_proj.weight"]
    with pytest.raises(ValueError, match=r"mtp.layers.0.mlp.experts.1.up_proj.weight.*missing"):
        kernel.load_mtp(model, apart)


def test_what_does_not_fit_is_refused(kernel):
    model = random_model("qwen3_5_text")
    weights = weights_of(model)
    for name in weights:
        rest = {n: x for n, x in weights.items() if n != name}
        with pytest.raises(ValueError, match=f"{name}, but it is missing"):
            kernel.load_mtp(model, rest)
    with pytest.raises(ValueError, match=r"mtp.fc.weight of shape \[.*\], got \[2\]"):
        kernel.load_mtp(model, {**weights, "mtp.fc.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="must be those of one MTP layer, got mtp.layers.1.x"):
        kernel.load_mtp(model, {**weights, "mtp.layers.1.x": torch.ones(2)})
    with pytest.raises(ValueError, match="count must be at most 7 drafts, got 8"):
        kernel.load_mtp(model, weights, 8)
    with pytest.raises(ValueError, match="model must be a causal language model"):
        kernel.load_mtp(torch.nn.Linear(2, 2), weights)
    with pytest.raises(TypeError, match="model"):
        kernel.load_mtp(None, weights)
    with pytest.raises(TypeError, match="weights must be a path or a dict of tensors, got 3"):
        kernel.load_mtp(model, 3)
    with pytest.raises(ValueError, match="weights must have mtp.fc.weight of shape"):
        kernel.load_mtp(model, {**weights, "mtp.fc.weight": None})


def run(model, ids, **options):
    words = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, return_dict_in_generate=True, output_logits=True, **words)


def states_of(out):
    cache = out.get("cache") if out.get("cache") is not None else out.past_key_values
    layers = [x for x in cache.layers if getattr(x, "recurrent_states", None)]
    return [x for layer in layers for x in (layer.recurrent_states[0], layer.conv_states[0])]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_do_not_depend_on_the_weights(kernel, name, count):
    model, ids = random_model(name), tokens(1, 11)
    kernel.kernelize(model)
    layer = kernel.load_mtp(model, weights_of(model), count)
    before, after = run(model, ids), run(model, ids, assistant_model=layer)
    assert torch.equal(before.sequences, after.sequences)
    pairs = [*zip(before.logits, after.logits, strict=True)]
    for a, b in [*pairs, *zip(states_of(before), states_of(after), strict=True)]:
        b = b[..., -a.shape[-1] :]
        assert ((a - b).abs().max() / a.abs().max().clamp_min(1e-9)).item() <= 2e-5


def test_drafts_are_those_of_the_whole_text(kernel, monkeypatch):
    """What a round drafts with a cache, of accepted tokens, is what the layer drafts without one of
    all tokens and hidden states anew."""
    model, ids = random_model("qwen3_5_text"), tokens(1, 11)
    kernel.kernelize(model)
    layer = kernel.load_mtp(model, weights_of(model), 2)
    seen, own = [], mtp.MtpDrafts.get_candidates

    def get_candidates(self, input_ids, **given):
        found = own(self, input_ids, **given)
        seen.append((input_ids, found[0][:, input_ids.shape[1] :]))
        return found

    monkeypatch.setattr(mtp.MtpDrafts, "get_candidates", get_candidates)
    run(model, ids, assistant_model=layer)
    assert len(seen) > 4 and all(drafts.shape[1] == 2 for _, drafts in seen[1:])
    for text, drafts in seen[1:]:
        with torch.no_grad():
            hidden = model.model(text[:, :-1]).last_hidden_state
            places = torch.arange(1, text.shape[1])[None]
            first = layer(model, text[:, 1:], hidden, places, None)
            assert torch.equal(model.lm_head(first[:, -1:]).argmax(-1), drafts[:, :1])


def test_positions_of_three_axes():
    """Qwen3.5's rotary embedding takes one for each; before release 5.19 it expands none itself."""
    inner = random_model("qwen3_5_text").model
    x, positions, seen = torch.zeros(1, 1, 1), torch.arange(5)[None], []
    inner.rotary_emb.register_forward_pre_hook(lambda module, args: seen.append(args[1].shape))
    cos, sin = mtp.tables_of(inner, x, positions)
    assert seen == [(3, 1, 5)] and cos.shape == sin.shape == (1, 5, cos.shape[-1])
    assert torch.equal(cos[:, 0], torch.ones_like(cos[:, 0])) and sin[0, 1:].abs().max() > 0.1
    other = random_model("qwen3_next").model
    assert mtp.tables_of(other, x, positions)[0].shape[:2] == (1, 5)
