"""Ways to use a model, before and after kernelize: caches and decoders of generate, and training
under autocast and with frozen parts. As in test_model_layers.py."""

import copy

import pytest
import torch
from conftest import assert_close, relative_error, submodule
from test_model_layers import (
    OPERATIONS,
    SOME,
    assert_same,
    gradients,
    logits,
    on_every_device,
    pair,
    serving,
)
from tiny_models import assert_same_gradients, random_model, tokens

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


def generated(model, ids, device, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True, **options}
    torch.manual_seed(0)
    mask = torch.ones_like(ids)
    mask[1:, :4] = 0
    with serving(device) as record:
        found = model.generate(ids, attention_mask=mask, **options)
    assert (set(OPERATIONS) <= record.keys()) == hasattr(model, "served_here")
    return found


def same_tokens(kernel, name, device, options, batch=2):
    model, served = pair(kernel, name, device)
    served.served_here = True
    ids = tokens(batch, 9, device=device)
    out, ref = (generated(m, ids, device, **options(m)) for m in (served, model))
    assert out.shape == (batch, 9 + NEW) and torch.equal(out, ref)


@pytest.mark.parametrize("name", SOME)
@on_every_device
def test_a_quantized_cache(kernel, name, device):
    same_tokens(kernel, name, device, quantized)


@pytest.mark.parametrize("name", SOME)
@on_every_device
def test_trains_under_autocast(kernel, name, device):
    """Gradients are as close to those without autocast as the plain model's."""
    model = random_model(name, device)
    ids = tokens(2, 11, device=device)
    exact = gradients(model, ids)

    def errors():
        with torch.autocast(device, torch.bfloat16):
            found = gradients(model, ids)
        assert found.keys() == exact.keys()
        return {key: relative_error(found[key], exact[key]) for key in exact}

    theirs = errors()
    kernel.kernelize(model, mode="training")
    with serving(device) as record:
        ours = errors()
    assert record["qk_norm_rope_fwd"]
    worst = max(theirs.values())
    assert 1e-4 < worst and max(ours.values()) <= 1.2 * worst


FROZEN = {
    "norms": lambda name: "norm" in name,
    "all but norms": lambda name: "norm" not in name,
    "the first layer": lambda name: "layers.0." in name or "embed" in name,
    "half of the projections": lambda name: "k_proj" in name or "up_proj" in name,
}


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("frozen", FROZEN)
@on_every_device
def test_frozen_parts(kernel, name, frozen, device):
    model = random_model(name, device)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](key))
    ids = tokens(2, 11, device=device)
    ref = gradients(model, ids)
    kernel.kernelize(model, mode="training")
    with serving(device) as record:
        out = gradients(model, ids)
    assert record["rms_norm_fwd"]
    assert 0 < len(ref) < len(list(model.parameters()))
    assert_same_gradients(out, ref, device)


@pytest.mark.parametrize("name", ["qwen3_5_text"])
def test_compiles_in_one_graph(kernel, name):
    """A served model is traced as a plain one, whose graph has no break either."""
    model, served = pair(kernel, name)
    served, ids = copy.deepcopy(served), tokens(1, 9)
    compiled = torch.compile(served, fullgraph=True, backend="aot_eager", dynamic=False)
    for use_cache in (False, True):
        ref = logits(model, ids, use_cache=use_cache)
        assert_same(logits(compiled, ids, use_cache=use_cache), ref)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5_moe_text", "kimi_linear"])
def test_compiles_with_labels(kernel, name):
    """A training step is one graph, too, and gives the plain model's loss and gradients. Of a Llama
    torch traces the gradient as well; transformers' own Gated DeltaNet and experts cannot be."""
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
