"""Tiny models that decode by CUDA graphs, for the tests of tests/models that are about decoding,
and their fixtures `device` and `graph`.

On a CPU a graph is emulated: emulated_graph.py.
"""

import types
import weakref

import pytest
import torch
from conftest import DEVICES, submodule
from emulated_graph import EmulatedGraph
from tiny_models import BASE, CONFIGS, KDA, LATENT, tokens

transformers = pytest.importorskip("transformers")
WHERE = [pytest.param(d, marks=pytest.mark.gpu) if d == "cuda" else d for d in DEVICES]
on_every_device = pytest.mark.parametrize("device", WHERE, indirect=True)

NEW = 14  # tokens that a test generates
WIDE = {"head_dim": 16, "sliding_window": 64}
FAMILIES = {
    **{name: CONFIGS[name] for name in ("llama", "qwen2", "qwen3", "qwen3_5_text", "qwen3_next")},
    "qwen3_5_moe_text": CONFIGS["qwen3_5_moe_text"],
    "olmo_hybrid": CONFIGS["olmo_hybrid"],
    "mistral": {"sliding_window": 64},
    "gemma2": WIDE,
    "gemma3_text": WIDE,
    "gpt_oss": {"num_local_experts": 4, **WIDE},
    "phi3": {},
    "granite": {},
    "kimi_linear": KDA["kimi_linear"],
    "glm4_moe_lite": LATENT["glm4_moe_lite"],
    "deepseek_v2": LATENT["deepseek_v2"],
}


class Counted:
    """Counts captures and replays, and knows which graphs live."""

    def __init__(self, *args):
        super().__init__(*args)
        self.alive.add(self)

    def capture(self, call):
        type(self).captures += 1
        return super().capture(call)

    def replay(self):
        type(self).replays += 1
        return super().replay()


@pytest.fixture
def device(request):
    return request.param


@pytest.fixture
def graph(device, monkeypatch):
    """The class of graphs, with .captures, .replays and .alive."""
    real = submodule("decoding.capture").Graph if device == "cuda" else EmulatedGraph
    facts = {"captures": 0, "replays": 0, "alive": weakref.WeakSet()}
    counted = type("Graph", (Counted, real), facts)
    for module in ("graphs", "graph_rules", "late", "static_cache"):
        monkeypatch.setattr(submodule(f"decoding.{module}"), "Graph", counted)
    return counted


def tiny(name, device, **changes):
    try:
        config = transformers.AutoConfig.for_model(
            name, **{**BASE, **FAMILIES[name], "tie_word_embeddings": False, **changes}
        )
    except ValueError:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(device).eval()


def served(name, device, **changes):
    """A model that decodes by graphs."""
    model = tiny(name, device, **changes)
    row = submodule("decoding.generate").serve_graphs(model)
    assert (row.reason, row.note) == (None, "CUDA graph")
    return model


def kernelized(kernel, name, device, **changes):
    """A model that kernelize serves, and that decodes by graphs."""
    model = tiny(name, device, **changes)
    kernel.kernelize(model, cuda_graphs=True)
    return model


def lively(name, device, **changes):
    """One whose tokens differ."""
    return served(name, device, initializer_range=0.4, **changes)


def own(model):
    """Something whose generate is transformers', with its own loop."""
    return types.SimpleNamespace(
        generate=lambda *args, **options: type(model).generate(model, *args, **options)
    )


def random_state(ids):
    return torch.cuda.get_rng_state() if ids.is_cuda else torch.get_rng_state()


def generate(model, ids, graphed=True, **options):
    """Greedy tokens on a static cache; on a CPU, too, by the way that a GPU takes."""
    words = {
        "max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static",
        "disable_compile": not graphed, **options,
    }  # fmt: skip
    if graphed and ids.device.type == "cpu":
        words["compile_config"] = config = transformers.CompileConfig()
        config._compile_all_devices = True
    return model.generate(ids, **words)


def padded(batch, length, device):
    """Ids, and a mask with padding on the left of all rows but the last."""
    ids = tokens(batch, length, device=device)
    mask = torch.ones_like(ids)
    for row in range(batch - 1):
        mask[row, : row + 1] = 0
    return ids, mask


WIDER = {  # than the least that kernels serve
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
