"""Decoding by CUDA graphs: the tokens of eager decoding, whatever happens between two of them.

On a CPU a graph is emulated: tests/emulated_graph.py.
"""

import copy
import gc
import logging
import operator
import re
import sys
import threading
from pathlib import Path

import decoding
import pytest
import torch
from conftest import submodule
from decoding import FAMILIES, NEW, WIDER, generate, kernelized, on_every_device, padded, tiny
from tiny_models import LOGITS, tokens
from torch import nn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
device, graph = decoding.device, decoding.graph  # fixtures


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_greedy_tokens(kernel, graph, name, device, batch):
    model = tiny(name, device)
    ids, mask = padded(batch, 9, device)
    assert kernel.kernelize(model, cuda_graphs=True).rows[-1].note == "CUDA graph"
    expected = generate(model, ids, graphed=False, attention_mask=mask)
    assert graph.replays == 0
    found = generate(model, ids, attention_mask=mask)
    assert torch.equal(found, expected)
    assert (graph.captures, graph.replays) == (1, NEW - 2)  # of NEW - 1 steps one is eager


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_greedy_tokens_in_bf16(kernel, graph, name, device, batch):
    """The kernels of decoding are those of 16 bits; graphs repeat them to the bit."""
    known = transformers.AutoConfig.for_model(name)
    sizes = {n: x for n, x in WIDER.items() if hasattr(known, n)}
    if "kv_lora_rank" in FAMILIES[name]:  # latent attention has keys for every head
        sizes["num_key_value_heads"] = WIDER["num_attention_heads"]
    model = kernelized(kernel, name, device, **sizes).bfloat16()
    ids, mask = padded(batch, 9, device)
    kept = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    expected = generate(model, ids, graphed=False, **kept)
    found = generate(model, ids, **kept)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits):
        assert torch.equal(a, b)
    assert graph.replays == NEW - 2


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_a_model_without_kernels(graph, name, device):
    model = tiny(name, device)
    ids, mask = padded(2, 9, device)
    expected = generate(model, ids, graphed=False, attention_mask=mask)
    assert submodule("decoding.generate").serve_graphs(model).reason is None
    assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    assert graph.replays == NEW - 2


@pytest.mark.parametrize("window", [5, 16])  # it is full after the prompt, or later
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text"])
@on_every_device
def test_a_window_that_fills(kernel, graph, name, window, device, caplog):
    """It then moves its slots at each token, which is another graph; padding leaves it."""
    model = kernelized(kernel, name, device, sliding_window=window)
    ids, mask = padded(2, 9, device)
    expected = generate(model, ids, graphed=False, attention_mask=mask)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    assert graph.replays == NEW - 2 - (window > 9), "a step of each graph is eager"
    assert not caplog.messages


@on_every_device
def test_a_full_window_of_another_cache(kernel, graph, device, caplog, monkeypatch):
    """One that does something else once its window is full decodes without graphs from then on."""
    model = tiny("mistral", device, sliding_window=16)
    layers = sys.modules["transformers.cache_utils"].StaticSlidingWindowLayer
    own = layers.update

    def update(layer, keys, values, *args, **options):
        full = layer.cumulative_length_int >= layer.max_cache_len
        return own(layer, keys * (1 + full), values, *args, **options)

    monkeypatch.setattr(layers, "update", update)
    kernel.kernelize(model, cuda_graphs=True)
    ids, mask = padded(2, 9, device)
    expected = generate(model, ids, graphed=False, attention_mask=mask)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    assert 0 < graph.replays < NEW - 3
    said = [m for m in caplog.messages if "without a CUDA graph" in m]
    assert len(said) == 1 and "the sliding window of 16 tokens is full" in said[0]


# loops by hand


def start(model, length=7, batch=2, slots=48):
    """A cache with a prompt in it, and the token after that."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=slots)
    ids = tokens(batch, length, device=model.device)
    with torch.no_grad():
        return cache, model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)


class Loops:
    """Graphed steps of a model and eager ones of its copy; the same changes are made to both."""

    def __init__(self, kernel, model):
        self.models = model, copy.deepcopy(model)
        (self.cache, self.token), (self.other, _) = map(start, self.models)
        self.graphed = kernel.graphed_step(model, self.cache, batch_size=2)

    def steps(self, count=5):
        """Runs both; the last logits."""
        for _ in range(count):
            logits = self.graphed(self.token).logits
            with torch.no_grad():
                expected = self.models[1](self.token, past_key_values=self.other).logits
            difference = (logits - expected).abs().max().item()
            assert difference <= LOGITS[logits.device.type], f"logits differ by {difference:.1e}"
            self.token = expected.argmax(-1)
        return expected.clone()

    def change(self, function):
        for model, cache in zip(self.models, (self.cache, self.other)):
            with torch.no_grad():
                function(model, cache)


def first(model):
    return model.model.layers[0]


def up_of(model):
    return first(model).mlp.up_proj


def another_parameter(model, cache):
    up_of(model).weight = nn.Parameter(up_of(model).weight * 1.5)


def larger(model, factor=1.1):
    return {name: x * factor for name, x in model.state_dict().items()}


def moved_away_and_back(model, cache):
    kept = [p.data for p in model.parameters()]  # so that the addresses are others
    model.double().float()
    for p in model.parameters():
        p.mul_(1.1)
    for x in kept:
        x.fill_(float("nan"))


def another_module(model, cache):
    first(model).mlp = copy.deepcopy(first(model).mlp)
    another_parameter(model, cache)


def of_another_class(model, cache):
    kind = type(first(model).mlp)
    first(model).mlp.__class__ = type("Half", (kind,), {"forward": lambda self, x: x * 0.5})


def a_reset(model, cache):
    cache.reset()
    model(tokens(2, 9, seed=1, device=model.device), past_key_values=cache)


def other_memory(model, cache):
    for layer in cache.layers:
        before, layer.keys = layer.keys, layer.keys.clone()
        before.fill_(float("nan"))


def back_by_three(model, cache):
    """Goes back by three tokens as crop does: the tensors stay."""
    for layer in cache.layers:
        layer.cumulative_length.sub_(3)


def set_data(x, value):
    x.data = value


CHANGES = {  # of a model and its cache, and whether the graph stays
    "a weight in place": (lambda model, cache: up_of(model).weight.mul_(1.5), True),
    "a weight's data": (
        lambda model, cache: set_data(up_of(model).weight, up_of(model).weight.data * 1.5), False),
    "another parameter": (another_parameter, False),
    "weights assigned": (
        lambda model, cache: model.load_state_dict(larger(model), assign=True), False),
    "weights loaded": (lambda model, cache: model.load_state_dict(larger(model)), True),
    "moved away and back": (moved_away_and_back, False),
    "another module": (another_module, False),
    "another activation": (
        lambda model, cache: setattr(first(model).mlp, "act_fn", nn.ReLU()), False),
    "another scale": (
        lambda model, cache: setattr(first(model).self_attn, "scaling", 0.01), False),
    "another attention": (lambda model, cache: model.set_attn_implementation("eager"), False),
    "a forward of its own": (
        lambda model, cache: setattr(first(model).mlp, "forward", lambda x: x * 0.5), False),
    "another class": (of_another_class, False),
    "a hook": (  # which no graph would call
        lambda model, cache: first(model).mlp.register_forward_hook(lambda m, a, out: out * 0.5),
        None),
    "a reset": (a_reset, True),
    "other beams": (
        lambda model, cache: cache.reorder_cache(torch.tensor([1, 0], device=model.device)), False),
    "other memory": (other_memory, False),
    "back by three": (back_by_three, True),
    "a longer prompt": (
        lambda model, cache: model(
            tokens(2, 4, seed=2, device=model.device), past_key_values=cache), True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@on_every_device
def test_nothing_is_stale(kernel, graph, device, name):
    change, stays = CHANGES[name]
    loops = Loops(kernel, tiny("llama", device, attn_implementation="sdpa"))
    loops.steps()
    assert (graph.captures, graph.replays) == (1, 4)
    loops.change(change)
    loops.steps()
    assert (graph.captures, graph.replays) == {True: (1, 9), False: (2, 8), None: (1, 4)}[stays]


def halved(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 0.5


def patch_a_forward(model, patch):
    patch.setattr(type(first(model).mlp), "forward", lambda self, x: x * 0.5)


def patch_a_call(model, patch):
    kind = type(first(model).mlp)
    patch.setattr(kind, "__call__", halved(kind.__call__))


def patch_a_function(model, patch):
    file = sys.modules[type(first(model).self_attn).__module__]
    rotate = file.apply_rotary_pos_emb
    patch.setattr(file, "apply_rotary_pos_emb", lambda q, k, *tables: rotate(q * 0.5, k, *tables))


def patch_the_attention(model, patch):
    table = transformers.AttentionInterface._global_mapping
    attend = table["sdpa"]

    def half(*args, **kwargs):
        out, weights = attend(*args, **kwargs)
        return out * 0.5, weights

    patch.setitem(table, "sdpa", half)


PATCHES = [patch_a_forward, patch_a_call, patch_a_function, patch_the_attention]


@pytest.mark.parametrize("change", PATCHES, ids=lambda change: change.__name__)
@on_every_device
def test_code_that_is_patched_in_place(kernel, graph, device, monkeypatch, change):
    """Of a class, of the file that defines it, and in transformers' table of attentions."""
    loops = Loops(kernel, tiny("llama", device, attn_implementation="sdpa"))
    loops.steps()
    change(loops.models[1], monkeypatch)
    loops.steps()
    assert (graph.captures, graph.replays) == (2, 8)


@on_every_device
def test_an_embedding_that_shortens_its_rows(kernel, graph, device):
    loops = Loops(kernel, tiny("llama", device))
    loops.steps()
    loops.change(lambda model, cache: setattr(model.model.embed_tokens, "max_norm", 0.5))
    loops.steps()
    assert (graph.captures, graph.replays) == (2, 8)


@pytest.mark.parametrize("part", ["mlp.up_proj", "embed_tokens"])
@on_every_device
def test_another_forward_in_place_of_one_on_the_module(kernel, graph, device, part):
    """Of a linear layer and of an embedding, whose attributes are else not looked at."""
    loops = Loops(kernel, tiny("llama", device, attn_implementation="sdpa"))
    for factor in (1.5, 0.5):

        def patch(model, cache, factor=factor):
            owner = model.model if part == "embed_tokens" else first(model)
            module = owner.get_submodule(part)
            module.forward = lambda x: type(module).forward(module, x) * factor

        loops.change(patch)
        loops.steps()
    assert (graph.captures, graph.replays) == (2, 8)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "qwen3_5_moe_text"])
@on_every_device
def test_kernelize_and_restore_between_steps(kernel, graph, device, name):
    model = tiny(name, device)
    model.set_experts_implementation("batched_mm")  # grouped_mm of fp32 cannot be captured
    loops = Loops(kernel, model)
    loops.steps()
    loops.change(lambda model, cache: kernel.kernelize(model))
    loops.steps()
    loops.change(lambda model, cache: kernel.restore(model))
    loops.steps()
    assert graph.captures == 3


@on_every_device
def test_generating_meanwhile_leaves_a_graph_alone(kernel, graph, device):
    """Hooks that wait for prompts, of this model and of another, do not count as foreign hooks."""
    loops = Loops(kernel, tiny("llama", device))
    others = [loops.models[0], tiny("qwen3", device)]
    for model in others:
        kernel.kernelize(model, cuda_graphs=True)
        generate(model, tokens(2, 9, device=device))
    loops.steps()
    before = graph.captures
    for model in others:
        model.get_compiled_call()
    loops.steps()
    assert graph.captures == before


SWITCHES = {  # of a layer of PEFT with two adapters
    "another": lambda layer: layer.set_adapter("two"),
    "in place": lambda layer: operator.setitem(layer._active_adapter, 0, "two"),
    "disabled": lambda layer: layer.enable_adapters(False),
    "scaled": lambda layer: operator.setitem(layer.scaling, "one", 5.0),
    "merged": lambda layer: layer.merge(),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
@on_every_device
def test_adapters(kernel, graph, device, switch):
    peft = pytest.importorskip("peft")
    model = tiny("llama", device)
    torch.manual_seed(1)
    for name, alpha in (("one", 8), ("two", 4)):
        config = peft.LoraConfig(
            r=4, lora_alpha=alpha, target_modules=r".*layers\.0\.mlp\.up_proj",
            init_lora_weights=False,
        )  # fmt: skip
        peft.inject_adapter_in_model(config, model, name)
    up_of(model).set_adapter(["one"])
    loops = Loops(kernel, model)
    loops.steps()
    loops.change(lambda model, cache: switch(up_of(model)))
    loops.steps()
    assert (graph.captures, graph.replays) == (2, 8)


@on_every_device
def test_other_inputs(kernel, graph, device):
    """Arguments that come and go, and change their values."""
    model = tiny("llama", device)
    loops = Loops(kernel, model)
    loops.steps()
    plain = loops.graphed
    for shift in (0, 3):
        place = loops.cache.layers[0].cumulative_length.clone().expand(2, 1) + shift
        for _ in range(2):
            found = plain(loops.token, position_ids=place).logits.clone()
            with torch.no_grad():
                expected = model(loops.token, past_key_values=loops.other, position_ids=place)
            assert (found - expected.logits).abs().max() <= LOGITS[device]
    assert graph.captures == 2
    with pytest.raises(
        ValueError, match=r"input_ids must be a tensor of shape \[2, 1\], got \[2, 2\]"
    ):
        plain(torch.cat([loops.token] * 2, 1))


@on_every_device
def test_changes_that_never_end(kernel, graph, device):
    """A cache for which captures do not pay is eager from then on, and right."""
    loops = Loops(kernel, tiny("llama", device))
    for _ in range(5):
        loops.steps(3)
        loops.change(another_parameter)
    loops.steps(3)
    assert graph.captures == 3 and not graph.alive
    assert loops.graphed.reason == "what a graph has baked in changed again and again"


@on_every_device
def test_changed_between_the_eager_step_and_the_capture(kernel, graph, device):
    loops = Loops(kernel, tiny("llama", device))
    loops.steps(1)
    loops.change(another_parameter)
    loops.steps(4)
    assert graph.captures == 1


# generate


@on_every_device
def test_another_batch_and_length_and_what_is_freed(kernel, graph, device):
    model = kernelized(kernel, "qwen3_5_text", device)
    for batch, length in ((1, 5), (3, 17), (2, 8), (3, 30)):
        ids = tokens(batch, length, device=device)
        expected = generate(model, ids, graphed=False)
        assert torch.equal(generate(model, ids), expected)
        gc.collect()
        assert not graph.alive, "a graph outlives its cache"
    assert graph.captures == 4


@pytest.mark.gpu
def test_memory_is_given_back(kernel):
    model = kernelized(kernel, "qwen3_5_text", "cuda")
    ids = tokens(4, 9, device="cuda")
    generate(model, ids)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        generate(model, ids)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_a_prompt_in_chunks(kernel, graph, device, name):
    model = kernelized(kernel, name, device)
    ids = tokens(2, 13, device=device)  # the last chunk is one token
    expected = generate(model, ids, graphed=False, prefill_chunk_size=4)
    assert torch.equal(generate(model, ids, prefill_chunk_size=4), expected)
    assert graph.replays > 0


@on_every_device
def test_a_prompt_of_one_token(kernel, graph, device):
    model = kernelized(kernel, "qwen3_5_text", device)
    ids = tokens(2, 1, device=device)
    assert torch.equal(generate(model, ids), generate(model, ids, graphed=False))
    assert graph.replays == NEW - 2


@on_every_device
def test_two_threads(kernel, graph, device):
    model = kernelized(kernel, "qwen3_5_text", device)
    prompts = [tokens(batch, 9, seed=batch, device=device) for batch in (1, 2, 3)]
    expected = [generate(model, ids) for ids in prompts]  # all code is loaded after it
    wrong, errors, together = [], [], threading.Barrier(len(prompts))

    def work(which):
        try:
            (prompts[which].float() @ prompts[which].float().T).sum().item()  # libraries are ready
            together.wait(60)
            for _ in range(3):
                if not torch.equal(generate(model, prompts[which]), expected[which]):
                    wrong.append(which)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not errors
    assert graph.captures == 12


@pytest.mark.gpu
def test_another_stream(kernel):
    model = kernelized(kernel, "qwen3_5_text", "cuda")
    ids = tokens(2, 9, device="cuda")
    expected = generate(model, ids, graphed=False)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = generate(model, ids)
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


# what is refused


REFUSED = {
    "model.layers.1.mlp.down_proj has a hook": lambda model: (
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, out: None)),
    "model.layers.0 has an accelerate hook": lambda model: (
        setattr(first(model), "_hf_hook", object())),
    "tensor parallel": lambda model: setattr(model, "_tp_size", 2),
    "it has an encoder and a decoder": lambda model: (
        setattr(model.config, "is_encoder_decoder", True)),
    "it is on several devices": lambda model: model.model.embed_tokens.to("meta"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
@on_every_device
def test_models_that_are_left_alone(kernel, graph, device, reason):
    model = tiny("llama", device)
    REFUSED[reason](model)
    row = kernel.kernelize(model, cuda_graphs=True).rows[-1]
    assert row.layer == "decode" and row.reason.startswith(f"no CUDA graph: {reason}")
    assert "get_compiled_call" not in model.__dict__


@on_every_device
def test_dynamic_rope(kernel, graph, device):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny("llama", device, rope_parameters=rope)
    assert "rope_type is dynamic" in kernel.kernelize(model, cuda_graphs=True).rows[-1].reason


def test_on_a_cpu(kernel):
    model = tiny("llama", "cpu")
    report = kernel.kernelize(model, cuda_graphs=True)
    assert report.rows[-1].reason == "no CUDA graph: the model is on cpu"
    assert "decode" in str(report) or "no CUDA graph" in str(report)
    report = kernel.kernelize(nn.Linear(2, 2), cuda_graphs=True)
    assert report.rows[-1].reason == "no CUDA graph: it cannot generate"


class OwnCache(transformers.StaticCache):
    pass


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda config: OwnCache(config=config, max_cache_len=48), "its cache is a OwnCache"),
        (lambda config: transformers.DynamicCache(config=config), "its cache is a DynamicCache"),
    ],
)
@on_every_device
def test_caches_that_are_left_alone(kernel, graph, device, make, reason):
    model = tiny("llama", device)
    step = kernel.graphed_step(model, make(model.config), 2)
    assert step.reason.startswith(reason)


def test_an_offloaded_cache(kernel):
    rules = submodule("decoding.caches")
    config = tiny("llama", "cpu").config
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    assert rules.why_not_cache(cache) is None
    cache.offloading = True
    assert rules.why_not_cache(cache) == "its cache is offloaded"


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"output_hidden_states": True}, "output_hidden_states is asked for"),
        ({"return_dict": False}, "return_dict is False"),
        ({"attention_mask": torch.ones(2, 8)}, "attention_mask has 2 dimensions, not 4"),
        ({"logits_to_keep": [0]}, "logits_to_keep is a list"),
    ],
)
@on_every_device
def test_calls_that_are_left_alone(kernel, graph, device, caplog, options, reason):
    model = tiny("llama", device)
    cache, token = start(model)
    step = kernel.graphed_step(model, cache, 2)
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    with caplog.at_level(logging.WARNING):
        try:
            step(token, **options)
        except Exception:  # transformers' own, of what it does not take
            pass
    assert any(reason in message for message in caplog.messages)
    assert step.reason is None and graph.captures == 0


@on_every_device
def test_training_and_gradients(kernel, graph, device):
    model = kernelized(kernel, "llama", device)
    decode = model.get_compiled_call(None)
    cache, token = start(model)
    for _ in range(4):
        decode(input_ids=token, past_key_values=cache)
    assert graph.captures == 0
    model.train()
    with torch.no_grad():
        for _ in range(4):
            decode(input_ids=token, past_key_values=cache)
    assert graph.captures == 0


@on_every_device
def test_windows_want_positions_and_masks_from_outside(kernel, graph, device):
    """A sliding layer's length is a number in Python, which a graph would bake in."""
    model = tiny("mistral", device)
    loops = Loops(kernel, model)
    loops.steps()
    assert graph.captures == 0


@on_every_device
def test_a_capture_that_fails(kernel, graph, device, caplog):
    """Reads of the host cannot be captured: right tokens, one warning, and torch goes on."""
    model = tiny("mistral", device)

    class Reads(nn.Module):
        def forward(self, x):
            return x * (1.0 if x.abs().max().item() < 1e9 else 0.0)

    first(model).mlp.act_fn = nn.Sequential(first(model).mlp.act_fn, Reads())
    kernel.kernelize(model, cuda_graphs=True)
    ids = tokens(2, 9, device=device)
    expected = generate(model, ids, graphed=False)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate(model, ids), expected)
    said = [m for m in caplog.messages if "cannot be captured" in m]
    assert len(said) == 1 and graph.captures == 1 and graph.replays == 0
    torch.rand(3, device=device).sum().item()  # torch is as it was
    first(model).mlp.act_fn = nn.SiLU()
    ids = tokens(2, 9, device=device)
    expected = generate(model, ids, graphed=False)
    assert torch.equal(generate(model, ids), expected)
    assert graph.replays == NEW - 2
    found = []
    for graphed in (False, True):
        torch.manual_seed(5)
        found.append(generate(model, ids, graphed, do_sample=True))
    assert torch.equal(*found)


@on_every_device
def test_modules_that_count(kernel, graph, device):
    """A number that a module changes in each step is not what a graph knows."""
    model = tiny("llama", device)

    class Counts(nn.Module):
        steps = 0

        def __init__(self):
            super().__init__()
            self.steps = 0

        def forward(self, x):
            self.steps += 1
            return x * (1 + self.steps / 8)

    first(model).mlp.act_fn = Counts()
    loops = Loops(kernel, model)
    loops.models[1].model.layers[0].mlp.act_fn.steps = first(model).mlp.act_fn.steps
    loops.graphed(loops.token)
    loops.graphed(loops.token)
    assert "its modules count their steps" in loops.graphed.reason
    assert graph.replays == 0


# restore


@on_every_device
def test_restore_and_kernelize_without(kernel, graph, device):
    model = tiny("llama", device)
    report = kernel.kernelize(model, cuda_graphs=True)
    assert kernel.restore(model) == len(report.served)
    assert "get_compiled_call" not in model.__dict__
    kernel.kernelize(model, cuda_graphs=True)
    kernel.kernelize(model)
    assert "get_compiled_call" not in model.__dict__


def test_wrong_arguments(kernel):
    model = tiny("llama", "cpu")
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(TypeError, match="graphed_step: model must be .*torch.nn.Module, got str"):
        kernel.graphed_step("llama", cache, 1)
    for wrong, kind in ((None, "NoneType"), ("static", "str"), (type(cache), "the class Static")):
        with pytest.raises(TypeError, match=f"cache must be a cache of transformers.*got {kind}"):
            kernel.graphed_step(model, wrong, 1)
    with pytest.raises(TypeError, match="batch_size must be an int, got str"):
        kernel.graphed_step(model, cache, "1")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        kernel.graphed_step(model, cache, 0)


def test_what_is_called_of_torch_is_there():
    """Nothing of it runs on a CPU."""
    text = Path(submodule("decoding.capture").__file__).read_text()
    names = set(re.findall(r"torch\.cuda\.(\w+)", text))
    assert {"CUDAGraph", "is_current_stream_capturing"} <= names
    assert not [name for name in names if not hasattr(torch.cuda, name)]
