"""Positions and masks that a graph makes for the next token are those that transformers makes."""

import contextlib

import decoding
import pytest
import torch
from conftest import submodule
from decoding import FAMILIES, NEW, generate, lively, on_every_device, padded, served, tiny

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
device, graph = decoding.device, decoding.graph  # fixtures
graphs = submodule("decoding.graphs")
generating = submodule("decoding.generate")


@pytest.fixture
def inputs(monkeypatch):
    """What each replay reads: clones of its positions and masks."""
    found, replay = [], graphs.Step._replay

    def noted(step, cache, tensors, choice):
        kept = [(name, x.clone()) for name, x in tensors]
        found.append(sorted(kept, key=lambda each: str(each[0])))
        return replay(step, cache, tensors, choice)

    monkeypatch.setattr(graphs.Step, "_replay", noted)
    return found


@pytest.fixture
def made(monkeypatch):
    """One entry for each time that transformers makes masks."""
    calls, own = [], masking_utils.create_masks_for_generate

    def noted(*args, **options):
        calls.append(None)
        return own(*args, **options)

    for module in (masking_utils, transformers.generation.utils):
        monkeypatch.setattr(module, "create_masks_for_generate", noted)
    return calls


@contextlib.contextmanager
def without(monkeypatch):
    """Within it, transformers makes all positions and masks."""
    with monkeypatch.context() as patched:
        patched.setattr(generating, "step_of", lambda *_: None)
        yield


@pytest.mark.parametrize(
    "name, batch",
    [("llama", 1), ("qwen3_5_text", 1), *((name, 3) for name in FAMILIES if name != "phi3")],
)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_inputs_are_those_of_transformers(graph, inputs, made, monkeypatch, name, device, batch):
    model = served(name, device)
    ids, mask = padded(batch, 9, device)
    words = {"attention_mask": mask, "eos_token_id": 1000, "pad_token_id": 0}
    with without(monkeypatch):
        expected = generate(model, ids, **words)
    theirs = inputs.copy()
    inputs.clear(), made.clear()
    assert torch.equal(generate(model, ids, **words), expected)
    assert len(made) == 3  # for the prompt, the token that is eager and the one that is captured
    assert graph.replays == 2 * (NEW - 2) == len(inputs) + len(theirs)
    for mine, other in zip(inputs, theirs):
        assert [each for each, _ in mine] == [each for each, _ in other]
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(mine, other))
    positions = [dict(each)["position_ids", None] for each in inputs]
    assert positions[-1][-1].item() == 9 + NEW - 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@on_every_device
def test_tokens(graph, made, device, implementation):
    """Masks of booleans and of floats."""
    model = lively("gemma3_text", device)
    model.set_attn_implementation(implementation)
    ids, mask = padded(3, 9, device)
    expected = generate(model, ids, graphed=False, attention_mask=mask)
    made.clear()
    assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    assert len(made) == 3 and graph.replays == NEW - 2


class Changes(transformers.LogitsProcessor):
    """Something happens at one token; then scores are as they were."""

    def __init__(self, happens):
        self.happens, self.calls = happens, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 6:
            self.happens()
        return scores


def another_weight(model):
    weight = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(-weight.detach(), requires_grad=False)


def gradients_on(model):
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("happens", [another_weight, gradients_on])
@on_every_device
def test_a_token_that_is_no_replay_gets_them_too(graph, device, happens):
    found = []
    ids, mask = padded(2, 9, device)
    for graphed in (False, True):
        model = lively("llama", device)
        processor = Changes(lambda model=model: happens(model))
        words = {"attention_mask": mask, "logits_processor": [processor]}
        with torch.no_grad():
            found.append(generate(model, ids, graphed=graphed, **words))
    assert torch.equal(*found)
    # one token is eager at the start; behind the change one as well, or all
    assert graph.replays == (NEW - 3 if happens is another_weight else 6 - 2)


def interrupts():
    raise KeyboardInterrupt


@on_every_device
def test_two_prompts_on_one_cache(graph, device):
    """The first is interrupted right behind a replay."""
    model = lively("llama", device)
    ids, found = padded(1, 9, device)[0], []
    for graphed in (False, True):
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        words = {"past_key_values": cache, "cache_implementation": None, "graphed": graphed}
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, logits_processor=[Changes(interrupts)], **words)
        filled = int(cache.get_seq_length())
        assert filled == 9 + 5
        longer = torch.cat([ids, ids, ids], 1)[:, : filled + 4]
        found.append(generate(model, longer, **words))
    assert torch.equal(*found)


def every_second(*args, own=masking_utils.create_masks_for_generate, **options):
    """Masks in which each token hides what those before it see."""
    mask = own(*args, **options)
    slots = torch.arange(mask.shape[-1], device=mask.device)
    return mask & (slots % 2 == options["position_ids"][0, -1] % 2)


@on_every_device
def test_masks_that_do_not_follow(graph, device, monkeypatch):
    for module in (masking_utils, transformers.generation.utils):
        monkeypatch.setattr(module, "create_masks_for_generate", every_second)
    model = lively("llama", device)
    ids, mask = padded(2, 9, device)
    expected = generate(model, ids, graphed=False, attention_mask=mask)
    assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    assert graph.replays == NEW - 2


class Cache:
    """Two slots of four are filled."""

    def __init__(self, length=2):
        self.layers = [object(), type("Layer", (), {"cumulative_length": torch.tensor(length)})()]


def step_inputs(position, filled, **more):
    mask = torch.arange(4).view(1, 1, 1, 4) < filled
    made = {"input_ids": torch.ones(1, 1), "position_ids": torch.full((1, 1), position), **more}
    return [((name, None), x) for name, x in made.items()] + [(("attention_mask", "full"), mask)]


def test_what_follows_from_the_token_before():
    before, now = step_inputs(4, 2), step_inputs(5, 3)
    found = graphs.ahead_of(before, now, Cache())
    assert found.positions is now[1][1] and found.masks[0] is now[2][1]
    assert before[1][1].item() == 4 and before[2][1].sum() == 2  # as they were
    found.length.add_(1)  # as the step does
    found.advance()
    assert found.positions.item() == 6 and found.masks[0].flatten().tolist() == [True] * 4
    found.length.add_(1)
    found.advance()  # without a slot that is free
    assert found.positions.item() == 7 and found.masks[0].all()


@pytest.mark.parametrize(
    "before, now, cache",
    [
        (step_inputs(3, 2), step_inputs(5, 3), Cache()),
        (step_inputs(4, 1), step_inputs(5, 3), Cache()),
        (step_inputs(4, 2), step_inputs(5, 3), Cache(3)),
        (step_inputs(4, 2), step_inputs(5, 3), type("Cache", (), {"layers": [object()]})()),
        (step_inputs(4, 2, kinds=torch.ones(1)), step_inputs(5, 3, kinds=torch.ones(1)), Cache()),
        (step_inputs(4, 2)[:1], step_inputs(5, 3)[:1], Cache()),
    ],
    ids=["position", "mask", "slot", "no length", "another input", "no positions"],
)
def test_what_does_not_follow(before, now, cache):
    assert graphs.ahead_of(before, now, cache) is None


def own_masks(self, **options):
    return masking_utils.create_masks_for_generate(**options)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_classes_that_prepare_by_themselves(graph, device):
    """phi3 has a prepare_inputs_for_generation; others have masks of their own."""
    views = generating._view_class
    assert views(transformers.LlamaForCausalLM)._update_model_kwargs_for_generation
    own = {"create_masks_for_generate": own_masks}
    model = tiny("llama", device)
    model.__class__ = type("Own", (type(model),), own)
    generating.serve_graphs(model)
    for kind in (transformers.Phi3ForCausalLM, type(model)):
        assert views(kind)._update_model_kwargs_for_generation is (
            kind._update_model_kwargs_for_generation
        )
    ids, mask = padded(2, 9, device)
    expected = generate(model, ids, graphed=False, attention_mask=mask)
    assert torch.equal(generate(model, ids, attention_mask=mask), expected)
