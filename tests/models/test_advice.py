"""What the report of kernelize says that a person can do, and what was tuned for a GPU."""

import re

import pytest
import torch
from conftest import PACKAGE, submodule

advice, device, tuning = map(submodule, ("models.report", "runtime.device", "runtime.tuning"))
report = submodule("models.report")

REASONS = {  # as rows have them, and a word of what to do
    "there are no kernels for cpu": "to a CUDA or ROCm GPU",
    "there are no kernels for cuda": "from Ampere on",
    "there are no kernels for meta": "load its weights",
    "gate_proj has a weight that is on the meta device": "load its weights",
    "no CUDA graph: the model is on cpu": "to a CUDA or ROCm GPU",
    "no CUDA graph: there are no CUDA graphs on an AMD GPU": "stays eager",
    "has an accelerate hook (offloading, or several devices)": 'device_map="cuda"',
    "its weights are float32, not bfloat16 or float16": "in bfloat16",
    "MXFP4: load with dequantize=True to be served": "Mxfp4Config",
    "quantised to int4 by AWQ": "FP8 with block scales",
    "quantised to 4 bits by bitsandbytes": "FP8 with block scales",
    "gate_proj has a weight that is a Float8Tensor": "FP8 with block scales",
    "FP8 with one scale for its whole weight; one for 128 x 128 is served": "dequantize=True",
    "gate_up_proj is FP4, packed in int8; float8_e4m3fn is served": "dequantize=True",
    "its scale is of dtype float8_e8m0fnu; float32 is served": "dequantize=True",
    "gate_proj has a weight that is of dtype uint8": "FP8 with block scales",
    "is partitioned by ZeRO-3": "deepspeed.initialize",
    "gate_proj has a weight that is a DTensor": "docs/parallel.md",
    "gate_proj has forward hooks": "remove the hooks",
    "its forward is replaced already, by liger_kernel": "undo the other patch",
    "its class has a __call__ of its own": "undo the other patch",
    "its experts implementation was set to batched_mm": "grouped_mm",
    "it drops values out: it has dropout and is in training": "model.eval()",
    "its widths, 36 and 48, are not multiples of 8": "sizes",
    "its 4 output features are no multiple of 16, or less than 128": "sizes",
    "no CUDA graph: it cannot generate": "docs/decoding.md",
    "MyMLP is no class of transformers: .. kernelize(model, trust=[MyMLP])": "where it is named",
    "its forward raises RuntimeError when tried: sizes": "the trial of these failed",
    "its activation is GELUActivation, by erf": "no kernel computes this formula",
    "its forward has `past_key_values.is_updated`": "no kernel computes this formula",
    "it has no norm, no rotary embedding and no cache": "no kernel computes this formula",
}


@pytest.mark.parametrize("reason", REASONS)
def test_each_kind_of_reason(reason):
    assert REASONS[reason] in advice.advice_for(reason)


def test_every_pattern_is_for_a_reason():
    for pattern, said in advice.ADVICE:
        assert any(advice.advice_for(r) == said for r in REASONS), pattern


def test_a_module_of_another_kind(kernel):
    """Its row names what the module has, not what kernelize tries it with."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **sizes))
    (row,) = kernel.kernelize(model).left
    assert row.reason == "its forward raises AttributeError when tried: a part has no attribute 'p'"
    assert advice.advice_for(row.reason) == advice.ITS_OWN


def test_pages_that_are_named_exist():
    for _, said in advice.ADVICE:
        for page in re.findall(r"docs/\w+\.md", said):
            assert (PACKAGE.parent.parent / page).is_file(), page


def test_a_report_ends_with_what_to_do():
    row = report.Row("mlp", "MyMLP", "SwiGLUMLP", None, "there are no kernels for cpu")
    other = row._replace(reason="its activation is Tanh")
    text = str(report.Report([row, row, other], torch.device("cpu")))
    assert text.splitlines()[-2:] == [
        f"  2 left alone: {advice.TO_A_GPU}",
        f"  1 left alone: {advice.ITS_OWN}",
    ]


CHIPS = {
    ("NVIDIA_A100-SXM4-80GB", (8, 0)): "settings that were not tuned for it: tools/tune.py",
    ("AMD_Instinct_MI300X", None): "settings that were not tuned for it: tools/tune.py",
    ("NVIDIA_H200", (9, 0)): "settings tuned for compute capability 9.0",
}


@pytest.mark.parametrize("chip", CHIPS)
def test_what_was_tuned(monkeypatch, chip):
    monkeypatch.setattr(device, "pretended", device.Chip(*chip, 100))
    for ask in (device.name, device.capability):
        ask.cache_clear()
    try:
        row = report.Row("mlp", "MyMLP", "SwiGLUMLP", None, None)
        last = str(report.Report([row], torch.device("cuda", 0))).splitlines()[-1]
    finally:
        for ask in (device.name, device.capability):
            ask.cache_clear()
    assert last == f"{chip[0].replace('_', ' ')}: kernels run with {CHIPS[chip]}"


def test_a_gpu_of_its_own(monkeypatch, tmp_path):
    (tmp_path / "swiglu,device_name=My_GPU.json").write_text("{}")
    monkeypatch.setattr(tuning, "_CONFIGS", tmp_path)
    monkeypatch.setattr(tuning, "chip", lambda device: ("device_name=My_GPU", "capability=8.0"))
    assert tuning.tuned_for(torch.device("cuda", 0)) == "this GPU"
