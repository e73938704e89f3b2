"""Tests of models whose weights are of a foreign tensor class, as quantization makes them."""

import pytest
import torch
import torch.nn.functional as F
from conftest import submodule
from packed import pack, products
from tiny_models import random_model, tokens

pytest.importorskip("transformers")
dispatch = submodule("runtime.dispatch")


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True, "replay": 16, "loss": True}])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5_text", "qwen3_5_moe_text"])
def test_packed_products(kernel, name, options):
    """The projections are called, and all around them is served."""
    model, ids = random_model(name), tokens(2, 9)
    for module in products(model):
        pack(module)
    with torch.no_grad():
        expected = model(ids).logits
        with dispatch.force("reference"), dispatch.served() as record:
            report = kernel.kernelize(model, **options)
            found = model(ids).logits
    assert torch.allclose(found, expected, atol=1e-5)
    layers = {row.layer for row in report.served}
    assert {"DecoderLayer", "Attention", "SwiGLUMLP", "RMSNorm"} <= layers
    assert {"silu_mul_fwd", "rms_norm_fwd", "qk_norm_rope_fwd"} <= set(record)


@pytest.mark.parametrize("machine", ["beside a GPU", "alone"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_next", "qwen3_5_moe_text"])
def test_nothing_but_packed_weights(kernel, monkeypatch, name, machine):
    """No operation runs on such weights: kernelize, its report and restore do not raise."""
    monkeypatch.setattr(submodule("runtime.device"), "has_gpu", lambda: machine != "alone")
    for made in ("cpu", "meta"):
        model = random_model(name, made)
        for module in model.modules():
            pack(module)
        report = kernel.kernelize(model, cuda_graphs=True)
        assert report.left[-1].reason == "no CUDA graph: its weights are Packeds"
        assert kernel.restore(model) == len(report.served)
        if machine == "alone":
            assert not report.served


def test_a_module_that_raises_when_it_is_looked_at(kernel, monkeypatch):
    """The module is left alone, with the reason, and does not stop the others."""

    class Strange(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = self.up_proj = self.down_proj = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    recognise = submodule("models.recognise")
    look = recognise.why_partitioned

    def why_partitioned(module):
        if isinstance(module, Strange):
            raise NotImplementedError("parameters")
        return look(module)

    monkeypatch.setattr(recognise, "why_partitioned", why_partitioned)
    model = torch.nn.Sequential(Strange(), random_model("llama").model.layers[0].mlp)
    strange, mlp = kernel.kernelize(model).rows
    assert strange.reason == "looking at it raises NotImplementedError" and mlp.reason is None
