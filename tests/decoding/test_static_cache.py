"""generate with cuda_graphs, called without a word about caches: it decodes by graphs on a static
cache where nobody sees the cache, and where that pays."""

import decoding
import pytest
import torch
from conftest import submodule
from decoding import WIDER, lively, on_every_device, padded, tiny

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
device, graph = decoding.device, decoding.graph  # fixtures
NEW = 20
SIZES = {name: size for name, size in WIDER.items() if not name.startswith("linear")}


def plain(model, ids, **options):
    """model.generate as people write it; on a CPU by the way that a GPU takes."""
    words = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    if ids.device.type == "cpu":
        words["compile_config"] = config = transformers.CompileConfig()
        config._compile_all_devices = True
    return model.generate(**words) if "input_ids" in words else model.generate(ids, **words)


def own(model, ids, **options):
    """transformers' own generate, without graphs."""
    return plain(as_made(model), ids, disable_compile=True, **options)


def as_made(model):
    class Own:
        @staticmethod
        def generate(*args, **options):
            return type(model).generate(model, *args, **options)

    return Own


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "phi3"])
@pytest.mark.parametrize("batch", [1, 4])
@on_every_device
def test_tokens_are_replays(kernel, graph, name, device, batch):
    model = lively(name, device)
    ids, mask = padded(batch, 9, device)
    found = plain(model, ids, attention_mask=mask)
    assert graph.captures == 1 and graph.replays >= NEW - 3
    assert torch.equal(found, own(model, ids, attention_mask=mask, cache_implementation="static"))
    if device == "cpu":  # fp32: the other cache gives the same tokens
        assert torch.equal(found, own(model, ids, attention_mask=mask))


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 2, "do_sample": True},
        {"eos_token_id": list(range(30, 97)), "min_new_tokens": 6},
        {"repetition_penalty": 1.5, "max_time": 60.0},
        {"max_new_tokens": None, "max_length": 9 + NEW},
    ],
)
@on_every_device
def test_ways_to_decode(kernel, graph, device, options):
    model = lively("llama", device)
    ids, _ = padded(1, 9, device)
    torch.manual_seed(1)
    found = plain(model, ids, **options)
    assert graph.captures == 1
    torch.manual_seed(1)
    assert torch.equal(found, own(model, ids, cache_implementation="static", **options))


def dynamic(model):
    return {"past_key_values": transformers.DynamicCache(config=model.config)}


LEFT = {
    "few tokens": lambda model: {"max_new_tokens": 8},
    "a cache that is returned": lambda model: {"return_dict_in_generate": True},
    "a cache of one's own": dynamic,
    "a kind of cache": lambda model: {"cache_implementation": "dynamic"},
    "no cache": lambda model: {"use_cache": False},
    "beams": lambda model: {"num_beams": 2},
    "no graph": lambda model: {"disable_compile": True},
}


@pytest.mark.parametrize("why", LEFT)
@on_every_device
def test_other_calls_have_the_cache_that_they_had(kernel, graph, device, monkeypatch, why):
    model = lively("llama", device)
    ids, _ = padded(2, 9, device)
    out = plain(model, ids, **LEFT[why](model))
    assert graph.captures == 0
    if why == "a cache that is returned":
        assert type(out.past_key_values) is transformers.DynamicCache


@pytest.mark.parametrize("limit, value", [("PAIRS", 1), ("PART", 2**40)])
@on_every_device
def test_what_does_not_pay_or_fit(kernel, graph, device, monkeypatch, limit, value):
    """A long prompt for few tokens, and a cache that takes much of the device's memory."""
    monkeypatch.setattr(submodule("decoding.static_cache"), limit, value)
    model = lively("llama", device)
    ids, _ = padded(2, 9, device)
    found = plain(model, ids)
    assert graph.captures == 0
    assert torch.equal(found, own(model, ids))


@pytest.mark.parametrize("window, captures", [(8, 1), (16, 2), (64, 1)])
@on_every_device
def test_windows_that_fill(kernel, graph, device, window, captures):
    """After the prompt, later, and never."""
    model = lively("gemma2", device, sliding_window=window)
    ids, _ = padded(1, 9, device)
    found = plain(model, ids)
    assert graph.captures == captures
    assert torch.equal(found, own(model, ids, cache_implementation="static"))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("window, captures", [(8, 1), (16, 2)])
@on_every_device
def test_kernels_of_full_windows(kernel, graph, device, name, window, captures):
    """Kernels of 16 bits in graphs, of two sequences of which one is padded: graphs repeat steps to
    the bit, so that their tokens are those of steps without graphs on the same cache."""
    sizes = {**SIZES, "sliding_window": window}
    model = tiny(name, device, initializer_range=0.1, **sizes).bfloat16()
    assert kernel.kernelize(model, cuda_graphs=True).rows[-1].note == "CUDA graph"
    ids, mask = padded(2, 9, device)
    found = plain(model, ids, attention_mask=mask)
    assert (graph.captures, graph.replays) == (captures, NEW - 1 - captures)
    words = {"attention_mask": mask, "cache_implementation": "static"}
    assert torch.equal(found, own(model, ids, **words))


@on_every_device
def test_the_model_and_its_configuration_stay(kernel, graph, device):
    model = lively("llama", device)
    before = model.generation_config.to_dict()
    ids, _ = padded(1, 9, device)
    plain(model, ids)
    assert model.generation_config.to_dict() == before
    assert model.generation_config.cache_implementation is None


def test_ids_of_other_ranks_are_left_alone(kernel):
    """Several codebooks of a token, say."""
    model = tiny("llama", "cpu")
    given = dynamic(model)
    config = transformers.GenerationConfig(max_length=64)
    found = submodule("decoding.static_cache").with_static_cache(
        model, torch.zeros(1, 4, 2, dtype=torch.long), config, given
    )
    assert found is given


def soft(model, count, device):
    """The model, whose prompts begin with `count` embeddings that are no tokens."""
    own = type(model).prepare_inputs_for_generation

    def prepare(self, input_ids, next_sequence_length=None, **given):
        found = own(self, input_ids, next_sequence_length=next_sequence_length, **given)
        if next_sequence_length is None or next_sequence_length > 1:
            x = self.get_input_embeddings()(found.pop("input_ids"))
            more = torch.ones(len(x), count, x.shape[-1], device=device, dtype=x.dtype) / 8
            found["inputs_embeds"] = torch.cat([more, x], 1)
            for name in ("position_ids", "attention_mask"):
                found.pop(name, None)
        else:
            found.pop("position_ids", None)
            found.pop("attention_mask", None)
        return found

    members = {"prepare_inputs_for_generation": prepare}
    model.__class__ = type(type(model).__name__, (type(model),), members)
    return model


@on_every_device
def test_a_prompt_that_is_longer_than_its_ids(kernel, graph, device):
    """The cache that transformers makes grows; a static one would lack slots for the last ones."""
    ids, _ = padded(1, 9, device)
    model = soft(tiny("llama", device, initializer_range=0.4), 5, device)
    assert submodule("decoding.generate").serve_graphs(model).reason is None
    found = plain(model, ids)
    assert graph.captures == 0
    assert torch.equal(found, own(model, ids, cache_implementation="dynamic"))


@pytest.mark.parametrize(
    "kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"]
)
@on_every_device
def test_trained_prompts(kernel, graph, device, kind):
    peft = pytest.importorskip("peft")
    ids, mask = padded(2, 9, device)
    model = tiny("llama", device, initializer_range=0.4)
    tuned = peft.get_peft_model(
        model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ).to(device).eval()  # fmt: skip
    before = plain(tuned, ids, input_ids=ids, attention_mask=mask)
    kernel.kernelize(model, cuda_graphs=True)
    assert torch.equal(plain(tuned, ids, input_ids=ids, attention_mask=mask), before)
    assert graph.captures == 0


@pytest.mark.parametrize("name", ["llama", "kimi_linear"])
def test_the_bytes_of_a_cache(name):
    """Those that it allocates; latent attention needs room for one layer's keys and values, too."""
    model, slots, B = tiny(name, "cpu"), 64, 3
    cache = transformers.StaticCache(config=model.config, max_cache_len=slots)
    counted = submodule("decoding.static_cache")._bytes(model, cache, B * slots)
    with torch.no_grad():
        ids, _ = padded(B, 9, "cpu")
        model(ids, **{submodule("decoding.caches").cache_name(model): cache})
    layers = [layer for layer in cache.layers if hasattr(layer, "keys")]
    held = [x for layer in layers for x in (layer.keys, layer.values)]
    bytes_ = sum(x.numel() * x.itemsize for x in held)
    config = model.config
    if name == "kimi_linear":
        N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        bytes_ += config.num_attention_heads * (2 * N + V + R) * B * slots * 4
    assert counted == bytes_
