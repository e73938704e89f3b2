"""Tokens that a graph chooses: transformers' for a seed, with the same random state, logits and
cache afterwards; on a CPU by its own operations, and by the rules of our kernels."""

import contextlib

import decoding
import pytest
import torch
from conftest import submodule
from decoding import generate, lively, on_every_device, own, padded, random_state

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
device, graph = decoding.device, decoding.graph  # fixtures
choosing, dispatch = submodule("decoding.choosing"), submodule("runtime.dispatch")

DRAWN = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
KNOWN = {  # to kernels
    "greedy": {"do_sample": False},
    "drawn": DRAWN,
    "penalty": {"do_sample": False, "repetition_penalty": 1.4},
    "least": {"do_sample": False, "min_new_tokens": 8},
    "all": {**DRAWN, "top_k": 20, "repetition_penalty": 1.2, "min_new_tokens": 8, "min_p": 0.02},
}
CAPTURED = {  # of transformers, as they are
    "temperature alone": {"do_sample": True, "top_k": 0, "temperature": 1.4},
    "typical": {**DRAWN, "typical_p": 0.8},
    "epsilon": {**DRAWN, "epsilon_cutoff": 1e-3},
    "suppressed": {**DRAWN, "suppress_tokens": [3, 4, 5], "renormalize_logits": True},
}
LEFT = {  # to the loop
    "n-grams": {**DRAWN, "no_repeat_ngram_size": 2},
    "eta": {**DRAWN, "eta_cutoff": 1e-3},
    "scores": {**DRAWN, "return_dict_in_generate": True, "output_scores": True},
    "logits": {**DRAWN, "return_dict_in_generate": True, "output_logits": True},
}


@pytest.fixture
def chosen(monkeypatch):
    """What was chosen by a Chooser while it was captured, or loaded before."""
    found, own = [], choosing.Chooser.choose

    def noted(self, logits, ids):
        found.append(self)
        return own(self, logits, ids)

    monkeypatch.setattr(choosing.Chooser, "choose", noted)
    return found


def both(model, ids, seed, **options):
    """transformers' own generate and ours, each with the random state after it."""
    found = []
    for each in (own(model), model):
        torch.manual_seed(seed)
        out = generate(each, ids, graphed=True, pad_token_id=0, max_new_tokens=20, **options)
        found += [out, random_state(ids)]
    return found


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("case", [*KNOWN, *CAPTURED, *LEFT])
@on_every_device
def test_tokens_of_a_seed(graph, chosen, device, case, forced):
    if forced and (device == "cuda" or case not in KNOWN):
        pytest.skip("the kernels themselves, or none")
    options = {**KNOWN, **CAPTURED, **LEFT}[case]
    model = lively("llama", device)
    ids, mask = padded(3, 9, device)
    by = dispatch.force("reference") if forced else contextlib.nullcontext()
    with by:
        for seed in range(1 if forced else 2):
            theirs, before, ours, after = both(
                model, ids, seed, attention_mask=mask, eos_token_id=[5, 6, 7], **options
            )
            if isinstance(theirs, dict):
                for name in ("scores", "logits"):
                    for x, y in zip(theirs.get(name) or (), ours.get(name) or (), strict=True):
                        assert torch.equal(x, y)
                theirs, ours = theirs.sequences, ours.sequences
            assert torch.equal(theirs, ours) and torch.equal(before, after)
    assert graph.replays > 9 and bool(chosen) is (case not in LEFT)
    if chosen:
        assert (chosen[0].known is not None) is (case in KNOWN)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_the_cache_and_the_logits_after(graph, chosen, device, name):
    """A cache of the caller's holds what transformers' does, also for a call that goes on with it
    by other processors, and for one that is reset."""
    model = lively(name, device)
    ids, mask = padded(1, 9, device)
    name = submodule("decoding.caches").cache_name(model)
    outs = []
    for way in (own(model), model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=80)
        torch.manual_seed(0)
        given, found = ids, []
        for options in (DRAWN, DRAWN, {**DRAWN, "temperature": 2.0}, {"repetition_penalty": 1.5}):
            words = {"do_sample": False, **options, "max_new_tokens": 12, "pad_token_id": 0}
            given = generate(
                way, given, cache_implementation=None, attention_mask=torch.ones_like(given),
                **{name: cache}, **words,
            )  # fmt: skip
            with torch.no_grad():
                found.append(given)
        logits = model(given[:, -1:], **{name: cache}).logits
        outs.append([*found, logits, random_state(ids)])
    for theirs, ours in zip(*outs):
        assert torch.equal(theirs, ours)
    assert len({id(each) for each in chosen}) >= 3


@on_every_device
def test_scores_that_are_no_distribution(graph, device):
    if device == "cuda":
        pytest.skip("a failed assertion ends the context")
    model = lively("llama", device)
    ids, mask = padded(1, 9, device)
    own = type(model).forward

    def poisoned(self, *args, **options):
        out = own(self, *args, **options)
        out.logits = torch.where(self.poison, float("nan"), out.logits)
        return out

    model.__class__ = type(type(model).__name__, (type(model),), {"forward": poisoned})
    model.poison = torch.tensor(False)
    assert submodule("decoding.generate").serve_graphs(model).note == "CUDA graph"
    seen = []

    class Poisons(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            seen.append(value)
            if len(seen) == 9:
                model.poison.fill_(True)

        def end(self):
            pass

    with pytest.raises(RuntimeError):
        generate(model, ids, max_new_tokens=30, pad_token_id=0, streamer=Poisons(), **DRAWN)
    assert graph.replays > 3


def test_names_that_the_loop_uses():
    mixin = transformers.generation.GenerationMixin
    assert choosing.hands_on(mixin._sample)
    assert not choosing.hands_on(mixin._beam_search)


@on_every_device
def test_multinomial_draws_as_a_graph_does(device):
    """The same tokens of the same numbers, and the same state of the generator after them."""
    p = torch.rand(3, 1000, device=device, generator=torch.Generator(device).manual_seed(1))
    p = p.softmax(-1)
    one, two = (torch.Generator(device).manual_seed(2) for _ in range(2))
    for _ in range(3):
        q = torch.empty_like(p).exponential_(generator=two)
        tokens = torch.multinomial(p, 1, generator=one)[:, 0]
        assert torch.equal(tokens, (p / q).argmax(-1))
    assert torch.equal(one.get_state(), two.get_state())
