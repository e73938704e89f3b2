"""Adapters of the peft package: kernelized models with them give what they gave."""

import copy

import pytest
import torch
from conftest import load_example
from test_model_layers import SOME, assert_same, kinds_of, logits, serving
from tiny_models import random_model, tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
PLACES = {
    "mlp": ["gate_proj", "up_proj", "gate_up_proj", "down_proj"],
    "attention": ["q_proj", "v_proj", "qkv_proj", "o_proj"],
    "all": "all-linear",
}


def adapted(name: str, places: str):
    """A model with adapters that change something, as freshly made ones do not."""
    config = peft.LoraConfig(r=4, target_modules=PLACES[places], task_type="CAUSAL_LM")
    model = peft.get_peft_model(random_model(name), config)
    for n, p in model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(p, std=0.05)
    return model


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", [*SOME, "phi3"])
def test_values_and_gradients(kernel, name, places):
    model = adapted(name, places)
    served = copy.deepcopy(model)
    mlp = "SwiGLUGateUp" if name == "phi3" else "SwiGLUMLP"
    report = kernel.kernelize(served)
    assert {"RMSNorm", "Attention", "DecoderLayer", mlp} <= kinds_of(report) and not report.left
    ids = tokens(2, 19)
    with serving() as record:
        out = logits(served, ids)
        assert ("silu_mul_fwd" in record) == (places != "attention")
        served.train()(ids, labels=ids).loss.backward()
    assert_same(out, logits(model, ids))
    model.train()(ids, labels=ids).loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert gradients and all("lora" in n for n in gradients)
    for n, p in served.named_parameters():
        assert (p.grad is None) == (n not in gradients)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[n], rtol=1e-3, atol=1e-6)


def test_adapters_that_are_switched(kernel):
    """Off, merged, unmerged and taken out after kernelize, each has its own logits."""
    model = adapted("llama", "all")
    served, ids = copy.deepcopy(model), tokens(2, 9)
    kernel.kernelize(served)
    with model.disable_adapter(), served.disable_adapter(), serving():
        assert_same(logits(served, ids), logits(model, ids))
    plain = logits(model, ids)
    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(served, change)()
        with serving():
            assert_same(logits(served, ids), plain)
    with serving():
        assert_same(logits(served.merge_and_unload(), ids), plain)


def test_the_example(kernel, capsys):
    before, after = load_example("finetune_lora").run(kernel, "cpu", steps=3)
    assert before == pytest.approx(after, rel=1e-4) and before[-1] < before[0]
    assert "seconds a step" in capsys.readouterr().out
