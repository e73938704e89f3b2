"""Ways to use a model, before and after kernelize, beside those of tests/crossings: a quantized
cache, torch.compile and torch.fx. As in test_model_layers.py."""

import copy

import pytest
import torch
from conftest import assert_close, submodule
from test_model_layers import OPERATIONS, SOME, gradients, on_every_device, pair
from tiny_models import assert_same, assert_same_gradients, logits, random_model, serving, tokens

transformers = pytest.importorskip("transformers")
caches = pytest.importorskip("transformers.cache_utils")
pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 10


class EightBits(caches.QuantizedLayer):
    """Keys and values by 8 bits and a scale of each channel's row, as the backends of transformers
    hold them, none of which is installed."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized):
        values, scale = quantized
        return values * scale


def quantized(model):
    """After the fourth of the latest tokens they join the others, in 8 bits."""
    cache = transformers.DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is caches.DynamicLayer:
            cache.layers[i] = EightBits(residual_length=4)
    assert any(type(layer) is EightBits for layer in cache.layers)
    return {"past_key_values": cache}


@pytest.mark.parametrize("name", SOME)
@on_every_device
def test_a_quantized_cache(kernel, name, device):
    model, served = pair(kernel, name, device)
    ids, found = tokens(2, 9, device=device), []
    mask = torch.ones_like(ids)
    mask[1:, :4] = 0
    words = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    for each in (model, served):
        with serving(device) as record:
            found.append(each.generate(ids, disable_compile=True, **words, **quantized(each)))
        assert (set(OPERATIONS) <= record.keys()) == (each is served)
    assert found[0].shape == (2, 9 + NEW) and torch.equal(*found)


def test_compiles_in_one_graph(kernel):
    """A served model is traced as a plain one, whose graph has no break either."""
    model, served = pair(kernel, "qwen3_5_text")
    served, ids = copy.deepcopy(served), tokens(1, 9)
    compiled = torch.compile(served, fullgraph=True, backend="aot_eager", dynamic=False)
    assert_same(logits(compiled, ids), logits(model, ids))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["llama", "kimi_linear"])
def test_compiles_with_labels(kernel, name):
    """A training step is one graph, too, and gives the plain model's loss and gradients. Of a Llama
    torch traces the gradient as well; transformers' own delta rules and experts cannot be."""
    model, served = pair(kernel, name, "cpu")
    served, ids = copy.deepcopy(served).train(), tokens(2, 11)
    ref, loss = gradients(model.train(), ids), model(input_ids=ids, labels=ids).loss
    backend = "aot_eager" if name == "llama" else "eager"
    compiled = torch.compile(served, fullgraph=True, backend=backend, dynamic=False)
    found = compiled(input_ids=ids, labels=ids).loss
    found.backward()
    torch.compiler.reset()
    assert_close(found, loss)
    out = {name: p.grad for name, p in served.named_parameters() if p.grad is not None}
    assert_same_gradients(out, ref, "cpu")


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "qwen3_5_moe_text"])
def test_symbolic_traces(kernel, name):
    """Every module that torch.fx traces by itself is traced as well where it is served: its own
    forward."""
    model, served = pair(kernel, name, "cpu")
    traced = set()
    for (path, own), ours in zip(model.named_modules(), served.modules()):
        try:
            graph = torch.fx.symbolic_trace(own)
        except Exception:  # loops and branches on values
            continue
        found = torch.fx.symbolic_trace(ours)
        assert found.code == graph.code, path
        if type(ours) is not type(own):
            x = torch.randn(2, 3, next(own.parameters()).shape[-1])
            assert torch.equal(found(x), own(x)), path
            traced.add(ours.served_as)
    assert {"RMSNorm", "SwiGLUGateUp" if name == "phi3" else "SwiGLUMLP"} <= traced


def test_recognition_runs_on_one_thread(kernel, monkeypatch):
    """Trials of small matrices wake no pool of threads; the caller's number of them comes back,
    also where something raises."""
    apply, seen = submodule("models.apply"), []
    recognise = apply.recognise

    def watched(module):
        seen.append(torch.get_num_threads())
        if len(seen) == 5:
            raise RuntimeError("in the middle")
        return recognise(module)

    threads = torch.get_num_threads()
    monkeypatch.setattr(apply, "recognise", watched)
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError, match="in the middle"):
            kernel.kernelize(random_model("llama"))
        assert torch.get_num_threads() == 3
        kernel.kernelize(random_model("llama"))
        assert torch.get_num_threads() == 3 and set(seen) == {1}
    finally:
        torch.set_num_threads(threads)
