"""Latent attention of transformers' models: what is served, and that caches stay theirs."""

import copy
import functools
import inspect

import decoding
import pytest
import torch
from conftest import load_package, relative_error, submodule
from tiny_models import INDEXED, KDA, LATENT, LOGITS, random_model, tokens

transformers = pytest.importorskip("transformers")
dispatch, latent_trial = submodule("runtime.dispatch"), submodule("models.latent_trial")
kernel = load_package()
device, graph = decoding.device, decoding.graph  # fixtures
TYPES = [name for name in LATENT if name not in INDEXED] + ["kimi_linear", "bailing_hybrid"]
GROWING_ALONE = set(KDA)  # tokens of a draft change their recurrent states


@functools.cache
def models(name: str):
    """A model and the same one kernelized in plain torch. Shared: leave both as they are."""
    model = random_model(name)
    served = copy.deepcopy(model)
    with dispatch.force("reference"):
        report = kernel.kernelize(served)
    rows = [row for row in report.rows if row.layer == "LatentAttention"]
    assert rows and all(row.reason is None for row in rows), report
    return model, served


def layers_of(model) -> int:
    return sum(map(latent_trial.is_latent, model.modules()))


def cache_of(model, static: bool):
    config = model.config
    if not static:
        return transformers.DynamicCache(config=config)
    return transformers.StaticCache(config=config, max_cache_len=40)


def poison(cache, filled: int) -> None:
    """NaN in the slots past the filled ones."""
    for layer in cache.layers:
        if type(layer) is transformers.cache_utils.StaticLayer and layer.is_initialized:
            layer.keys[:, :, filled:] = layer.values[:, :, filled:] = float("nan")


@torch.no_grad()
def logits(model, chunks, cache, padding=None, poisoned=False):
    """Logits of the tokens ids [B, T], in chunks; padding [B, T], 0 for slots to the left."""
    found, at = [], 0
    for ids in chunks:
        past, at = at, at + ids.shape[1]
        given = {}
        if padding is not None:
            given["attention_mask"] = padding[:, :at]
            given["position_ids"] = (padding[:, :at].cumsum(-1) - 1).clamp(min=0)[:, past:]
        if poisoned:
            poison(cache, past)
        found.append(model(ids, past_key_values=cache, **given).logits)
    return torch.cat(found, 1)


def chunks_of(name: str, batch: int = 2, drafts: bool = True) -> list:
    sizes = (11, 1, 1, 5, 1, 8) if drafts and name not in GROWING_ALONE else (11, 1, 1, 1)
    return list(tokens(batch, sum(sizes)).split(sizes, 1))


def served_calls(record: dict) -> int:
    steps = [by for by in record.get("latent_step", ()) if by != "reference"]
    return len(record.get("latent_attention", ())) + len(steps)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_logits(name, static, padded):
    """Tokens and drafts after a prompt; left padding; NaN past the length of a static cache."""
    model, served = models(name)
    chunks, padding = chunks_of(name), None
    if padded:
        padding = torch.ones(2, sum(x.shape[1] for x in chunks), dtype=torch.long)
        padding[1, :4] = 0
    wanted = logits(model, chunks, cache_of(model, static), padding)
    with dispatch.force("reference"), dispatch.served() as record:
        found = logits(served, chunks, cache_of(served, static), padding, poisoned=static)
    assert served_calls(record) == (len(chunks) - 1) * layers_of(model)
    kept = slice(None) if padding is None else padding.bool()
    assert (found[kept] - wanted[kept]).abs().max() < LOGITS["cpu"]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_writers_take_turns(name, static):
    """A cache that ours has written is read and written by theirs, and the reverse."""
    model, served = models(name)
    chunks = chunks_of(name)
    wanted = logits(model, chunks, cache_of(model, static))
    cache, found = cache_of(model, static), []
    with dispatch.force("reference"):
        for i, ids in enumerate(chunks):
            with torch.no_grad():
                found.append((model, served)[i % 2](ids, past_key_values=cache).logits)
    assert (torch.cat(found, 1) - wanted).abs().max() < LOGITS["cpu"]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TYPES)
def test_prompts(name, implementation):
    """Without a cache, by the attention function that the model has; its weights, too."""
    model, served = map(copy.deepcopy, models(name))
    for each in (model, served):
        each.set_attn_implementation(implementation)
    ids, given = tokens(2, 11), {"use_cache": False, "output_attentions": implementation == "eager"}
    wanted = model(ids, **given)
    with dispatch.force("reference"), dispatch.served() as record:
        found = served(ids, **given)
    assert len(record["latent_norm_rope"]) == layers_of(model) and not served_calls(record)
    assert (found.logits - wanted.logits).abs().max() < LOGITS["cpu"]
    for a, b in zip(found.attentions or (), wanted.attentions or ()):
        assert a is b is None or torch.allclose(a, b, atol=1e-5)


@torch.no_grad()
def test_hooks_see_queries_as_they_were_made():
    """Queries are turned in memory of their own where a hook keeps what the projection gave."""
    model, served = map(copy.deepcopy, models("glm4_moe_lite"))
    kept = []
    for each in (model, served):
        attention_of(each).q_b_proj.register_forward_hook(lambda *given: kept.append(given[2]))
        with dispatch.force("reference"):
            each(tokens(1, 5))
    assert torch.allclose(*kept, atol=1e-5)


@pytest.mark.parametrize("name", ["glm4_moe_lite", "deepseek_v2", "mistral4", "kimi_linear"])
def test_cache_is_theirs(name):
    """Latents and keys of the cache, in their own order of channels."""
    model, served = models(name)
    chunks = chunks_of(name)
    theirs, ours = cache_of(model, False), cache_of(model, False)
    logits(model, chunks, theirs)
    with dispatch.force("reference"):
        logits(served, chunks, ours)
    for a, b in zip(theirs.layers, ours.layers):
        if getattr(a, "keys", None) is not None:
            assert torch.allclose(a.keys, b.keys, atol=1e-5)
            assert torch.allclose(a.values, b.values, atol=1e-5)


@pytest.mark.parametrize("kind", [transformers.DynamicCache, transformers.StaticCache])
def test_caches_of_other_kinds(kind):
    """What a class of one's own gives in an update is attended to, as the forward has it."""
    model, served = models("glm4_moe_lite")
    chunks, logged = chunks_of("glm4_moe_lite"), []

    class Own(kind):
        def update(self, *given, **named):
            logged.append(1)
            return super().update(*given, **named)

    size = {"max_cache_len": 40} if kind is transformers.StaticCache else {}
    wanted = logits(model, chunks, Own(config=model.config, **size))
    with dispatch.force("reference"), dispatch.served() as record:
        found = logits(served, chunks, Own(config=model.config, **size))
    assert (found - wanted).abs().max() < LOGITS["cpu"]
    assert served_calls(record) == (len(chunks) - 1) * layers_of(model)
    assert len(logged) == 2 * len(chunks) * layers_of(model)


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("name", ["glm4_moe_lite", "minicpm3", "mistral4"])
def test_generate(name, implementation):
    """Greedy tokens are equal, of padded sequences, too; beams share a cache."""
    model, served = models(name)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    given = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, disable_compile=True)
    for more in ({"cache_implementation": implementation}, {"num_beams": 3}):
        wanted = model.generate(ids, **given, **more)
        with dispatch.force("reference"), dispatch.served() as record:
            found = served.generate(ids, **given, **more)
        assert torch.equal(found, wanted) and served_calls(record)


def own_forward(changed, **given):
    """How many calls of ours a token takes, after a change."""
    model = random_model("glm4_moe_lite")
    ids = tokens(1, 6)
    with dispatch.force("reference"):
        kernel.kernelize(model)
        changed(model)
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        with dispatch.served() as record, torch.set_grad_enabled(given.pop("grad", False)):
            model(ids[:, :1], past_key_values=cache, **given)
    return served_calls(record)


def attention_of(model):
    return model.model.layers[0].self_attn


def hook(model):
    attention_of(model).kv_b_proj.register_forward_hook(lambda *_: None)


def bias(model):
    part = attention_of(model).kv_b_proj
    part.bias = torch.nn.Parameter(torch.ones(part.out_features))


class Wrapped(torch.nn.Module):
    """A projection with something beside it, as adapters have."""

    def __init__(self, base):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features

    def forward(self, x):
        return self.base(x)


def wrap(model):
    attention_of(model).kv_b_proj = Wrapped(attention_of(model).kv_b_proj)


CHANGES = {  # how many of two layers are ours then
    "nothing": (lambda model: None, {}, 2),
    "a hook": (hook, {}, 1),
    "a bias": (bias, {}, 1),
    "an adapter": (wrap, {}, 1),
    "eager attention": (lambda model: model.set_attn_implementation("eager"), {}, 0),
    "training": (lambda model: model.train(), {}, 0),
    "a gradient": (lambda model: None, {"grad": True}, 0),
}


@torch.no_grad()
def test_a_hook_of_all_modules():
    """It sees the norm of the latents, which ours reads and does not call."""
    model, ids, seen = random_model("deepseek_v3").eval(), tokens(1, 4), []
    with dispatch.force("reference"):
        assert not kernel.kernelize(model, only=["attention"]).left
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *call: seen.append(call))
        model(ids)
        hook.remove()
    assert attention_of(model).kv_a_layernorm in [module for module, *_ in seen]


@pytest.mark.parametrize("change", CHANGES)
def test_own_forward(change):
    made, given, count = CHANGES[change]
    assert own_forward(made, **given) == count


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in LATENT if name not in INDEXED])
def test_error_of_bf16(name):
    """A dense model's logits of tokens are no further from fp64 than without ours."""
    dense = {"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2}
    model = random_model(name, **dense)
    exact, served = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16()
    chunks, errors = chunks_of(name, batch=8), []
    right = logits(exact, chunks, cache_of(exact, False))
    with dispatch.force("reference"):
        kernel.kernelize(served, only=["attention", "norm"])
        for each in (served, model.bfloat16()):
            found = logits(each, chunks, cache_of(each, False))
            errors.append(relative_error(found[:, 11:], right[:, 11:]))
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize("name", ["glm4_moe_lite", "deepseek_v2"])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_graphs(graph, name, device, monkeypatch):
    """Tokens of emulated CUDA graphs, in which ours compute them: on a GPU no value is read."""
    monkeypatch.setattr(submodule("runtime.checks"), "readable", lambda x: False)
    model = decoding.tiny(name, device)
    ids, mask = decoding.padded(2, 9, device)
    wanted = decoding.generate(model, ids, graphed=False, attention_mask=mask)
    with dispatch.force("reference"), dispatch.served() as record:
        kernel.kernelize(model, cuda_graphs=True)
        found = decoding.generate(model, ids, attention_mask=mask)
    assert torch.equal(found, wanted) and graph.replays == decoding.NEW - 2
    assert served_calls(record)


MUTANTS = {  # of DeepSeek-V3's forward
    "values first": ("[self.qk_nope_head_dim, self.v_head_dim], dim=-1)",
                     "[self.v_head_dim, self.qk_nope_head_dim], dim=-1)[::-1]"),
    "queries not turned": ("torch.cat((q_pass, q_rot)", "torch.cat((q_pass, q_pass[..., :8])"),
    "latents without their norm": ("self.kv_a_layernorm(kv_nope)", "kv_nope"),
    "keys turned later": ("self.expand_kv(kv_nope, k_rot)", "self.expand_kv(kv_nope, -k_rot)"),
    "a factor of the output": ("self.o_proj(attn_output)", "self.o_proj(attn_output) * 2"),
    "another mask": ("            attention_mask,\n", "            attention_mask * 2,\n"),
    "queries of the latents": ("self.q_a_proj(hidden_states)", "self.q_a_proj(-hidden_states)"),
    "a tanh": ("self.kv_b_proj(kv_nope)", "self.kv_b_proj(kv_nope).tanh()"),
}  # fmt: skip


def changed_attention(before="", after=""):
    """A module whose class has another text, which counts as transformers' own."""
    attention = attention_of(random_model("deepseek_v3", attention_bias=False))
    own, space = type(attention), dict(vars(inspect.getmodule(type(attention))))
    text = inspect.getsource(own)
    assert before in text
    exec(text.replace(before, after) if before else text, space)
    object.__setattr__(attention, "__class__", space[own.__name__])
    return attention


def form_of(attention):
    """What the trial finds for a class that the user has named."""
    with submodule("models.trust").trusting((type(attention),)):
        return latent_trial.latent_form(attention)


@pytest.mark.parametrize("change", MUTANTS)
def test_mutants(change):
    """A forward that computes something else is not taken for latent attention."""
    attention = changed_attention(*MUTANTS[change])
    with pytest.raises(submodule("models.code").Refused):
        form_of(attention)


def test_values_that_are_made():
    """A scale and a layer that a forward makes of attributes are those of these attributes."""
    attention = changed_attention()
    form = form_of(attention)
    assert form.rotary == "pairs_to_halves" and form.index.what == "layer_idx"
    attention = changed_attention("scaling=self.scaling", "scaling=self.scaling * 2")
    (scaling,) = [w for w in form_of(attention).words if w.name == "scaling"]
    assert (scaling.how, scaling.what) == ("constant", 2 * attention.scaling)
    attention = changed_attention("k_rot, self.layer_idx", "k_rot, self.layer_idx + 1")
    form = form_of(attention)
    assert form.index.what == 1 and ("layer_idx", 0) in form.guards


@pytest.mark.parametrize("name", INDEXED)
def test_indexers_are_refused(name):
    model = random_model(name)
    with dispatch.force("reference"):
        report = kernel.kernelize(model)
    reasons = {row.reason for row in report.rows if row.layer == "LatentAttention"}
    assert reasons == {"its part indexer chooses the slots that it attends to"}


WIDER = {  # what kernels serve
    "hidden_size": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2,
}  # fmt: skip


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["glm4_moe_lite", "deepseek_v2", "minicpm3", "mistral4"])
def test_kernels(name, static):
    """On a GPU: tokens and drafts are no further from fp64 than without ours."""
    model = random_model(name, device="cuda", **WIDER)
    exact, served = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16()
    kernel.kernelize(served)
    chunks, errors = [x.cuda() for x in chunks_of(name, batch=8)], []
    right = logits(exact, chunks, cache_of(exact, static))
    for each in (served, model.bfloat16()):
        with dispatch.served() as record:
            found = logits(each, chunks, cache_of(each, static), poisoned=each is served and static)
        errors.append(relative_error(found[:, 11:], right[:, 11:]))
        assert served_calls(record) == (len(chunks) - 1) * 2 * (each is served)
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["glm4_moe_lite", "deepseek_v2"])
def test_graphs_of_kernels(name):
    """generate by CUDA graphs gives the tokens that it gives without."""
    model = random_model(name, device="cuda", **WIDER).bfloat16()
    ids, mask = decoding.padded(3, 9, "cuda")
    kernel.kernelize(model)
    given = dict(attention_mask=mask, max_new_tokens=24, do_sample=False, disable_compile=True)
    wanted = model.generate(ids, cache_implementation="static", **given)
    report = kernel.kernelize(model, cuda_graphs=True)
    del given["disable_compile"]
    assert report.rows[-1].note == "CUDA graph"
    with dispatch.served() as record:
        found = model.generate(ids, cache_implementation="static", **given)
    assert torch.equal(found, wanted) and served_calls(record) < 2 * 24
