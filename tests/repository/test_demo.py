"""Output of `make demo` on a machine without a GPU, with smaller models."""

import re
import sys
import types
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import load_example, relative_error, submodule

pytest.importorskip("transformers")
pytest.importorskip("kernels")


@pytest.fixture
def demo(kernel, monkeypatch):
    """The example, with the package in the tree for a build."""
    demo = load_example("kernelize_llm")
    monkeypatch.setattr(submodule("runtime.device"), "has_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernelize_llm.py"])
    monkeypatch.setattr(demo, "load_kernel", lambda: kernel)
    monkeypatch.setattr(demo, "logging", mock.MagicMock())  # of the process, which goes on
    monkeypatch.setattr(demo.transformers.logging, "set_verbosity_error", lambda: None)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    monkeypatch.setitem(demo.SIZES, "cpu", {**demo.SIZES["cpu"], **sizes})
    monkeypatch.setitem(demo.HEADS, "cpu", (4, 8, 8))
    monkeypatch.setitem(demo.PROMPT, "cpu", 80)
    for name, value in {"NEW_TOKENS": 3, "REPEATS": 2, "TOKENS": 1}.items():
        monkeypatch.setattr(demo, name, value)
    return demo


def test_the_demo_on_a_cpu(demo, capsys):
    assert demo.main() == 0
    text = capsys.readouterr().out
    head, llama, qwen = re.split(r"^(?:Llama|Qwen3\.5), random weights, on cpu$", text, flags=re.M)
    assert re.match(r"torch \S+, transformers \S+, cpu \(\d+ cores\)", head)
    for model in (llama, qwen):
        assert "3 greedy tokens x 2 prompts    identical" in model
        before, after = re.search(r"beside fp64 +(\S+) before, (\S+) after", model).groups()
        assert 0 < float(before) < 1e-3 and 0 < float(after) < 1e-3
        assert re.search(r"^\d\d modules served, 0 left alone$", model, flags=re.M)
        assert "plain torch serves what kernels would serve on a GPU" in model
    assert "nothing to time" in llama and "speed-up" not in llama
    assert re.search(r"layers\.\* +x4 +LlamaDecoderLayer +DecoderLayer", llama)
    assert re.search(r"linear_attn +x3 +Qwen3_5GatedDeltaNet +Qwen3_5GatedDeltaNet", qwen)
    for row in ("prompt of 80", "one token"):
        assert re.search(rf"{row} +\d+\.\d\d ms +\d+\.\d\d ms   (\d+\.\d\dx|too noisy)", qwen)
    assert text.endswith(demo.SHOWN["cpu"] + "\n") and "only a GPU can show" in demo.SHOWN["cpu"]


OTHERS = {"Gemma 4": "Gemma4TextMLP", "Kimi Linear": "KimiDeltaAttention"}


@pytest.mark.parametrize("family", OTHERS)
def test_other_models(demo, capsys, monkeypatch, family):
    if not hasattr(demo.transformers, demo.MODELS[family]("cpu")[0]):
        pytest.skip(f"this transformers has no {family}")
    monkeypatch.setattr(sys, "argv", ["kernelize_llm.py", "--models", family])
    assert demo.main() == 0
    text = capsys.readouterr().out
    assert f"{family}, random weights, on cpu" in text and "Llama" not in text
    assert "3 greedy tokens x 2 prompts    identical" in text
    assert OTHERS[family] in text


def test_a_demo_that_finds_another_result_fails(demo, capsys, monkeypatch, kernel):
    def another(model):
        with torch.no_grad():
            model.lm_head.weight.neg_()
        return kernel.kernelize(model)

    other = SimpleNamespace(kernelize=another, use_reference=kernel.use_reference)
    monkeypatch.setattr(demo, "load_kernel", lambda: other)
    assert demo.main() == 1
    assert "identical" not in capsys.readouterr().out


def test_the_speed_up_is_the_ratio_of_the_times(demo, capsys):
    """On a busy machine the median of each side gave 1766 ms and 2862 ms beside a ratio of 1.00."""
    pairs = [(0.2, 0.1), (0.9, 0.3), (0.1, 0.04), (0.5, 0.2), (0.4, 0.2)]
    assert demo.summary(pairs) == ((0.1, 0.04), 2.0, pytest.approx(2.75))
    demo.show_times({"faster": pairs, "busy": [(a, b * 2.5) for a, b in pairs]})
    _, faster, busy = capsys.readouterr().out.splitlines()
    assert re.search(r"100\.00 ms +40\.00 ms +2\.50x \(2\.00 to 2\.75\)", faster)
    assert "100.00 ms   100.00 ms   too noisy to tell (0.80 to 1.10)" in busy


def test_fp64_is_the_torch_code_of_transformers(demo, monkeypatch):
    """Not FLA's, which transformers takes where it is installed."""
    fla = types.ModuleType("fla")
    name = "chunk_gated_delta_rule"
    fla.ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(**{name: mock.Mock()}))
    monkeypatch.setitem(sys.modules, "fla", fla)
    model = demo.random_model("Qwen3.5", "cpu")
    exact = demo.in_fp64(model)
    ids = torch.randint(1, 4096, (1, 70))
    with torch.no_grad():
        found, expected = model(ids).logits, exact(ids).logits
    assert expected.dtype == torch.float64 and relative_error(found, expected) < 1e-4
    assert not getattr(fla.ops.gated_delta_rule, name).called
