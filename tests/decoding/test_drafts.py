"""Drafts for models with recurrent states: tokens, logits and states are those without drafts.

Equal tokens alone prove nothing: with states that are never taken back they were still equal.
"""

import contextlib
import copy
import pickle

import decoding
import pytest
import torch
from conftest import submodule
from decoding import on_every_device
from tiny_models import random_model, tokens

transformers = pytest.importorskip("transformers")
from transformers.generation import candidate_generator  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
device = decoding.device  # a fixture
drafts, dispatch = submodule("decoding.drafts"), submodule("runtime.dispatch")
NEW = 14
MIXIN = transformers.generation.GenerationMixin


class Oracle(candidate_generator.CandidateGenerator):
    """Drafts the tokens that will come, but for one at a place of each round."""

    def __init__(self, truth, count, wrong):
        self.truth, self.count, self.wrong, self.rounds = truth, count, wrong, []

    def get_candidates(self, input_ids, *args, **given):
        n = input_ids.shape[1]
        found = self.truth[:, n : n + self.count].clone()
        if self.wrong is not None and found.shape[1] > self.wrong:
            found[:, self.wrong] = (found[:, self.wrong] + 1) % 90
        self.rounds.append(found.shape[1])
        return torch.cat([input_ids, found], 1), None

    def update_candidate_strategy(self, *given):
        pass


def cache_of(out):
    return out.get("cache") if out.get("cache") is not None else out.past_key_values


def states_of(out):
    layers = [x for x in cache_of(out).layers if getattr(x, "recurrent_states", None)]
    assert layers
    return [x for layer in layers for x in (layer.recurrent_states[0], layer.conv_states[0])]


def assert_the_same(one, two, limit):
    assert torch.equal(one.sequences, two.sequences)
    pairs = [*zip(one.logits, two.logits, strict=True), *zip(states_of(one), states_of(two))]
    for a, b in pairs:
        a = a[..., -b.shape[-1] :]
        assert ((a - b).abs().max() / b.abs().max().clamp_min(1e-9)).item() <= limit


@pytest.fixture
def reference():
    with dispatch.force("reference"):
        yield


@pytest.fixture
def serving(device):
    """Kernels, or the reference on a CPU."""
    with dispatch.force("reference") if device == "cpu" else contextlib.nullcontext():
        yield


def served(kernel, name, device="cpu"):
    model = random_model(name, device)
    report = kernel.kernelize(model)
    assert report.drafts and "\ngenerate takes drafts: " in str(report)
    assert type(model.generate).__name__ == "Generate"
    return model


def run(model, ids, **options):
    words = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, return_dict_in_generate=True, output_logits=True, **words)


@pytest.mark.parametrize("count, wrong", [(3, None), (3, 0), (3, 1), (1, None), (9, 5)])
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "olmo_hybrid"])
@on_every_device
def test_drafts_of_an_oracle(kernel, serving, monkeypatch, name, count, wrong, device):
    model, ids = served(kernel, name, device), tokens(1, 11, device=device)
    before = run(model, ids)
    oracle = Oracle(before.sequences, count, wrong)
    monkeypatch.setattr(MIXIN, drafts.GENERATOR, lambda self, **given: oracle)
    after = run(model, ids, prompt_lookup_num_tokens=count)
    # fp32 sums in another order: TF32 is off, and the rules of a few tokens have no products of
    # tensor cores. 5e-7 on a CPU; cuBLAS takes another kernel for more rows
    assert_the_same(after, before, 2e-5 if device == "cpu" else 1e-4)
    assert len(oracle.rounds) == (NEW if wrong == 0 else len(oracle.rounds)) > 1
    if wrong is None:
        assert len(oracle.rounds) <= 2 + NEW // (min(count, drafts.MOST) + 1)


def test_states_that_are_not_put_back_are_seen(kernel, reference, monkeypatch):
    """That these tests can fail."""
    model, ids = served(kernel, "qwen3_5_text"), tokens(1, 11)
    before = run(model, ids)
    oracle = Oracle(before.sequences, 3, 1)
    monkeypatch.setattr(MIXIN, drafts.GENERATOR, lambda self, **given: oracle)
    own = drafts._layer_class

    def forgets(kind):
        made = own(kind)
        return type(
            made.__name__,
            (made,),
            {"keep": lambda self, states: setattr(self, "after", states[:, -1:].expand_as(states))},
        )

    monkeypatch.setattr(drafts, "_layer_class", forgets)
    with pytest.raises(AssertionError):
        assert_the_same(run(model, ids, prompt_lookup_num_tokens=3), before, 2e-5)


OPTIONS = {
    "lookup": {"prompt_lookup_num_tokens": 3},
    "many": {"prompt_lookup_num_tokens": 20},
    "padding": {"prompt_lookup_num_tokens": 3},
    "an end": {"prompt_lookup_num_tokens": 3, "eos_token_id": list(range(40, 60))},
    "scores": {
        "prompt_lookup_num_tokens": 3, "repetition_penalty": 1.1, "min_new_tokens": 6,
        "eos_token_id": [7, 9],
    },
}  # fmt: skip


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear"])
def test_prompt_lookup(kernel, reference, name, what):
    model = served(kernel, name)
    ids = tokens(1, 4).repeat(1, 4)
    options = dict(OPTIONS[what])
    if what == "padding":
        mask = torch.ones_like(ids)
        mask[:, :3] = 0
        options["attention_mask"] = mask
    after = run(model, ids, **options)
    del options["prompt_lookup_num_tokens"]
    assert_the_same(after, run(model, ids, **options), 2e-5)


@pytest.mark.parametrize("helper", ["qwen3", "qwen3_5_text"])
def test_an_assistant(kernel, reference, helper):
    """A dense one and a hybrid one, whose own states transformers never takes back."""
    model, ids = served(kernel, "qwen3_5_text"), tokens(1, 11)
    assistant = random_model(helper)
    if helper == "qwen3_5_text":
        assistant.load_state_dict(model.state_dict())
    before = run(model, ids)
    assert_the_same(run(model, ids, assistant_model=assistant), before, 2e-5)


CALLS = {
    "a config by position": {},
    "a cache with tokens": {},
    "a static cache": {"cache_implementation": "static"},
    "embeddings": {},
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear"])
def test_calls_that_transformers_would_get_wrong(kernel, reference, monkeypatch, name, what):
    """Its assisted decoding reads a whole prompt again that is in the cache, needs its ids, and
    puts no state of a static cache back: these calls have no drafts."""
    model, ids = served(kernel, name), tokens(1, 4).repeat(1, 4)
    plain, asked = random_model(name), []
    own = drafts.Few.get_candidates

    def get_candidates(self, *args, **given):
        asked.append(args)
        return own(self, *args, **given)

    monkeypatch.setattr(drafts.Few, "get_candidates", get_candidates)
    before = run(plain, ids)
    words = dict(CALLS[what], prompt_lookup_num_tokens=3)
    if what == "a config by position":
        config = copy.deepcopy(model.generation_config)
        config.update(max_new_tokens=NEW, do_sample=False, pad_token_id=0, output_logits=True,
                      return_dict_in_generate=True, prompt_lookup_num_tokens=3)  # fmt: skip
        after = model.generate(ids, config)
    elif what == "a cache with tokens":
        after, more = run(model, ids, **words), tokens(1, 5, seed=7)
        asked.clear()
        before, after = (
            run(each, torch.cat([out.sequences, more], 1), past_key_values=cache_of(out), **given)
            for each, out, given in ((plain, before, {}), (model, after, words))
        )
    elif what == "embeddings":
        x = plain.get_input_embeddings()(ids).detach()
        before, after = (
            each.generate(inputs_embeds=x, max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                          return_dict_in_generate=True, output_logits=True, **given)
            for each, given in ((plain, {}), (model, words))
        )  # fmt: skip
    else:
        after = run(model, ids, disable_compile=True, **words)
    assert bool(asked) == (what == "a config by position")
    assert_the_same(after, before, 2e-5)


def test_what_stays_refused(kernel, reference):
    """As transformers does, where a layer with states is not served, and for batches."""
    ids = tokens(2, 9)
    model = served(kernel, "qwen3_5_text")
    for more in ({}, {"cache_implementation": "static"}):
        with pytest.raises(ValueError, match="batch_size|Static"):
            run(model, ids, prompt_lookup_num_tokens=3, **more)
    other = random_model("qwen3_5_text")
    report = kernel.kernelize(other, skip=["gdn"])
    assert not report.drafts and "drafts" not in str(report)
    assert "generate" not in other.__dict__
    with pytest.raises(ValueError, match="stateful"):
        run(other, ids[:1], prompt_lookup_num_tokens=3)
    assert not drafts.is_stateful(random_model("llama"))
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation  # as PEFT does
    with pytest.raises(ValueError, match="stateful"):
        run(model, ids[:1], prompt_lookup_num_tokens=3)
    kernel.restore(model)
    assert "generate" not in model.__dict__


def test_cache_layers():
    layer = transformers.cache_utils.LinearAttentionLayer()
    own = type(layer)
    cache = transformers.DynamicCache()
    cache.layers.append(layer)
    drafts.go_back(cache)
    assert layer.is_croppable and type(layer) is not own
    layer.keep(torch.zeros(1, 2, 3))
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is own and "after" not in again.__dict__
    layer.activate_past_recording()
    with pytest.raises(RuntimeError, match="the states before the latest 2 tokens are not kept"):
        layer.crop(-2)
    with contextlib.suppress(KeyError):
        assert copy.deepcopy(cache).layers[0].__class__.__name__ == own.__name__
