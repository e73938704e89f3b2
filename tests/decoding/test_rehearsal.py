"""Kernels of a prompt and a token are compiled ahead, by several threads."""

import pickle
import threading

import pytest
import torch
from conftest import submodule
from decoding import WIDER, generate, tiny
from emulated_graph import EmulatedGraph
from interpreter import compiled
from torch import nn

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")
pytestmark = [compiled, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def hopper(kernel, monkeypatch):
    """CPU tensors are taken to be on a Hopper GPU, and nothing is launched or compiled.

    .ahead and .launched: (key, name) of what was to be compiled, and of what was launched.
    """
    ahead, launch = submodule("runtime.ahead"), submodule("runtime.launch")
    device = submodule("runtime.device")
    for name in ("graphs", "graph_rules", "rehearsal"):
        monkeypatch.setattr(submodule(f"decoding.{name}"), "Graph", Eager)
    kernel.ahead, kernel.launched = [], []

    def compile_one(one, places):
        kernel.ahead.append((one.key(tuple(places)), one.kernel.__name__))

    def take(one, tensors):
        if not any(w.__module__ == ahead.__name__ for w in launch.watches_here()):
            kernel.launched.append((one.key(tensors), one.kernel.__name__))
        return True

    monkeypatch.setattr(ahead, "_compile", compile_one)
    chip = device.Chip("NVIDIA_H200", (9, 0), 132)
    with launch.watched(take), device.pretending(chip):
        yield kernel


class Eager(EmulatedGraph):
    """Steps are neither captured nor replayed."""

    def capture(self, call):
        raise RuntimeError("not here")


def bf16(name, **changes):
    model = tiny(name, "cpu", **{**WIDER, **changes}).bfloat16()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5_text", "gemma2"])
def test_all_that_layers_launch(hopper, name, batch):
    model = bf16(name)
    report = hopper.kernelize(model, cuda_graphs=True)
    assert report.rows[-1].note == "CUDA graph"
    generate(model, torch.ones(batch, 100, dtype=torch.int64))
    keys = [key for key, _ in hopper.ahead]
    assert keys and len(set(keys)) == len(keys)
    missed = {name for key, name in hopper.launched if key not in keys}
    assert not missed
    assert {key for key, _ in hopper.launched} >= set(keys), "compiled in vain"


def test_once_and_only_for_an_empty_static_cache(hopper):
    model = bf16("llama")
    hopper.kernelize(model, cuda_graphs=True)
    layer, ids = model.model.layers[0], torch.ones(1, 100, dtype=torch.int64)
    for _ in range(2):
        generate(model, ids)
        assert not layer._forward_pre_hooks
    count = len(hopper.ahead)
    assert count and len({key for key, _ in hopper.ahead}) == count
    model.get_compiled_call()
    model(ids, past_key_values=transformers.DynamicCache(config=model.config))
    assert not layer._forward_pre_hooks and len(hopper.ahead) == count


def test_other_batches_and_lengths(hopper):
    """Each once; a length of the same order, and another cache length, launch nothing else."""
    model = bf16("qwen3_5_text")
    hopper.kernelize(model, cuda_graphs=True)
    shapes = [(1, 100), (3, 100), (3, 40), (1, 100), (3, 40)]
    counts = []
    for batch, length in shapes:
        hopper.ahead.clear()
        hopper.launched.clear()
        generate(model, torch.ones(batch, length, dtype=torch.int64))
        counts.append(len(hopper.ahead))
        missed = {key for key, _ in hopper.launched} - {key for key, _ in hopper.ahead}
        assert not missed or not counts[-1]
    assert all(counts[:3]) and not any(counts[3:])


def test_a_hook_that_graphs_do_not_see(hopper):
    from torch.utils.hooks import RemovableHandle

    model = bf16("llama")
    hopper.kernelize(model, cuda_graphs=True)
    before, layer = RemovableHandle.next_id, model.model.layers[0]
    model.get_compiled_call()
    assert layer._forward_pre_hooks and RemovableHandle.next_id == before
    model.get_compiled_call()
    with torch.no_grad():
        model(torch.ones(1, 1, dtype=torch.int64))
    assert not layer._forward_pre_hooks and not layer._forward_pre_hooks_with_kwargs
    assert not hopper.ahead


def test_a_prompt_that_fails_before_its_first_layer(hopper):
    """What waits for one is in no pickle, which other machines read, and restore ends it."""
    model = bf16("llama")
    hopper.kernelize(model, cuda_graphs=True)
    layer = model.model.layers[0]
    with pytest.raises(IndexError):  # the embedding has no such token
        generate(model, torch.full((1, 9), model.config.vocab_size))
    assert layer._forward_pre_hooks
    layer.self_attn = nn.Identity()  # transformers' own holds functions that cannot be pickled
    layer.mlp.act_fn = nn.SiLU()
    again = pickle.loads(pickle.dumps(layer))
    assert not again._forward_pre_hooks and not again._forward_pre_hooks_with_kwargs
    assert layer._forward_pre_hooks and layer._forward_pre_hooks_with_kwargs
    hopper.restore(model)
    assert not layer._forward_pre_hooks and not layer._forward_pre_hooks_with_kwargs
    pickle.dumps(layer)


@pytest.mark.parametrize("skip", [[], ["attention"]])
def test_a_cache_without_room_for_a_token(hopper, caplog, skip):
    """transformers' own write would be out of bounds, which ends the process on a GPU."""
    model = bf16("llama")
    hopper.kernelize(model, cuda_graphs=True, skip=skip)
    with caplog.at_level("DEBUG"):
        generate(model, torch.ones(1, 100, dtype=torch.int64), max_new_tokens=1)
    assert hopper.ahead and "one after another" not in caplog.text


def test_mixtures_are_left_out(kernel):
    model = bf16("qwen3_5_moe_text")
    kernel.kernelize(model)
    submodule("decoding.rehearsal").expect_prompt(model, set())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_layers_record_is_not_of_the_rehearsal(hopper):
    model = bf16("llama")
    hopper.kernelize(model, cuda_graphs=True)
    model.get_compiled_call()
    cache = transformers.StaticCache(config=model.config, max_cache_len=120)
    ids = torch.ones(1, 100, dtype=torch.int64)
    with torch.no_grad():
        out = model(ids, past_key_values=cache, output_hidden_states=True)
    assert hopper.ahead and len(out.hidden_states) == len(model.model.layers) + 1
    assert cache.get_seq_length() == 100


def test_other_threads_launch_meanwhile(hopper):
    ahead, x = submodule("runtime.ahead"), torch.zeros(2, 64, dtype=torch.bfloat16)
    with torch.no_grad(), ahead.compiled_ahead():
        hopper.silu_mul(x, x)
        hopper.silu_mul(x, x)
        started = []
        with submodule("runtime.launch").watched(lambda one, _: started.append(one), True):
            thread = threading.Thread(target=lambda: hopper.silu_mul(x, x))
            thread.start()
            thread.join()
    assert len(hopper.ahead) == 1 and len(started) == 1
