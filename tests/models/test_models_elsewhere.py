"""kernelize where no kernel runs: what is left alone, and models that are moved afterwards."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, submodule
from tiny_models import LOGITS, logits, random_model, tokens

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trusts_all")]
dispatch, device = submodule("runtime.dispatch"), submodule("runtime.device")
WAITS = submodule("models.report").WAITS
OURS = {"SwiGLUMLP", "RMSNorm", "Attention", "DecoderLayer"}


@pytest.fixture
def no_gpu(kernel, monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)


def kinds_of(model):
    return [type(module) for module in model.modules()]


def layers_of(rows):
    return {row.layer for row in rows}


@pytest.mark.parametrize("name, served", [("llama", set()), ("qwen3_5_text", {"linear_attn"})])
def test_a_cpu_alone(kernel, no_gpu, name, served):
    """Classes stay as they are, but for GDN layers, which are the faster ones in plain torch."""
    model, ids = random_model(name), tokens(2, 9)
    before, ref = kinds_of(model), logits(model, ids)
    report = kernel.kernelize(model)
    assert {row.module.split(".")[-1] for row in report.served} == served
    assert layers_of(report.left) == OURS
    assert {row.reason for row in report.left} == {"there are no kernels for cpu"}
    changed = [a for a, b in zip(before, kinds_of(model)) if a is not b]
    assert len(changed) == len(report.served)
    out = logits(model, ids)
    assert torch.equal(out, ref) if not served else (out - ref).abs().max() <= LOGITS["cpu"]
    with dispatch.force("reference"):  # somebody is to serve
        assert not kernel.kernelize(model).left
    assert kernel.kernelize(model).served == report.served
    assert [a for a, b in zip(before, kinds_of(model)) if a is not b] == changed


REFERENCES = {
    "llama": ("rms_norm_fwd", "qk_norm_rope_fwd", "swiglu_fwd"),
    "qwen3_5_text": ("rms_norm_fwd", "qk_norm_rope_fwd", "swiglu_fwd", "gdn_chunk_fwd"),
    "qwen3_5_moe_text": ("experts_fwd", "topk_fwd", "shared_fwd"),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_serves_on_a_cpu(kernel, no_gpu, name):
    """use_reference(): the report of a GPU, equal results by plain torch, and nothing after it."""
    moe = "moe" in name  # of which kernels serve bf16 and fp16 alone
    model, ids = random_model(name).to(torch.bfloat16 if moe else torch.float32), tokens(2, 9)
    ref = logits(model, ids)
    limit = 0.05 * ref.abs().max() if moe else LOGITS["cpu"]
    with kernel.use_reference(), dispatch.served() as record:
        report = kernel.kernelize(model)
        assert not report.left and layers_of(report.served) > OURS - {"SwiGLUMLP"}
        assert str(report).splitlines()[-1].startswith("inside use_reference(): plain torch")
        assert (logits(model, ids) - ref).abs().max() <= limit
    assert set(record) >= set(REFERENCES[name])
    assert {which for names in record.values() for which in names} == {"reference"}
    with dispatch.served() as record:
        assert (logits(model, ids) - ref).abs().max() <= limit
    assert not (set(REFERENCES[name]) - {"gdn_chunk_fwd"}) & set(record)
    with pytest.raises(KeyError), kernel.use_reference():
        raise KeyError
    assert dispatch.forced is None


def test_a_cpu_beside_a_gpu(kernel):
    """The model may be moved to the GPU. Until then its own forwards run."""
    model, ids = random_model("llama"), tokens(2, 9)
    ref = logits(model, ids)
    report = kernel.kernelize(model)
    assert layers_of(report.served) == {*OURS, "loss"} and not report.left
    assert {row.note for row in report.served} == {WAITS}
    assert str(report).startswith("12 modules served, 0 left alone; 12 of the served wait for")
    with dispatch.served() as record:
        assert torch.equal(logits(model, ids), ref)
    assert not record


def test_a_model_without_memory(kernel):
    """Left alone on the meta device, served by kernelize once it has weights."""
    model = random_model("llama")
    state, ids = model.state_dict(), tokens(2, 9)
    ref, empty = logits(model, ids), random_model("llama", "meta")
    before = kinds_of(empty)
    report = kernel.kernelize(empty)
    assert layers_of(report.left) == OURS and not report.served
    assert all("meta" in row.reason for row in report.left) and kinds_of(empty) == before
    empty.load_state_dict(state, assign=True)
    empty.model.rotary_emb = model.model.rotary_emb
    assert layers_of(kernel.kernelize(empty).served) == {*OURS, "loss"}
    assert torch.equal(logits(empty, ids), ref)


STARTS_CUDA = (
    (torch.cuda, "_lazy_init"), (torch.cuda, "is_available"), (torch.cuda, "current_device"),
    (torch.cuda, "get_device_capability"), (torch.cuda, "get_device_properties"),
    (torch._C, "_cuda_getDeviceCount"), (torch._C, "_cuda_init"), (torch.autograd, "grad"),
)  # fmt: skip


@pytest.fixture
def no_cuda(monkeypatch):
    """Raises if CUDA is initialized, after which a process cannot fork and use it."""

    def refuse(*args, **kwargs):
        raise AssertionError("CUDA is started")

    for where, name in STARTS_CUDA:
        monkeypatch.setattr(where, name, refuse, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe_text", "olmo_hybrid"])
def test_cuda_is_not_started(kernel, no_cuda, name):
    """Neither by kernelize and its options, nor by a served model, as long as it is on the CPU."""
    model = random_model(name)
    for options in ({}, {"cuda_graphs": True, "replay": 16}):
        assert kernel.kernelize(model, **options).served
    logits(model, tokens(2, 9))
    kernel.restore(model)


@pytest.mark.parametrize(
    "count, driver, expected",
    [(2, True, True), (0, True, False), (-1, True, True), (-1, False, False)],
)
@pytest.mark.parametrize("hip", [None, "6.4"])
def test_a_gpu_is_found_without_cuda(no_cuda, monkeypatch, count, driver, expected, hip):
    """-1: the driver's library does not know, as for the slices of a GPU."""
    library = "amdsmi" if hip else "nvml"
    spec = importlib.util.spec_from_file_location("device_of_this_test", device.__file__)
    fresh = importlib.util.module_from_spec(spec)  # the tests' own has a GPU, always
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, f"_device_count_{library}", lambda: count, raising=False)
    monkeypatch.setattr(fresh.os.path, "exists", lambda path: driver)
    assert fresh.has_gpu() is expected


FORKS = """
import os, sys
sys.path[:0] = sys.argv[1:]
import torch
from conftest import load_package
from tiny_models import random_model
load_package().kernelize(random_model("qwen3_5_moe_text"), cuda_graphs=True)
if os.fork() == 0:
    os._exit(int(torch.ones(3, device="cuda").sum().item()))
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.gpu
def test_a_fork_after_kernelize_has_its_gpu():
    paths = [str(ROOT / name) for name in ("tests", "tools")]
    # torch.cuda.is_available, which conftest asks, then makes no CUDA context either
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run([sys.executable, "-c", FORKS, *paths], env=environment)
    assert done.returncode == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_moved_to_a_gpu(kernel, name):
    """kernelize, then cuda(): the same kernels as the other way round, and the same bits."""
    first, second = random_model(name).bfloat16(), random_model(name).bfloat16()
    kernel.kernelize(first)
    first.cuda()
    rows = kernel.kernelize(second.cuda()).rows
    assert kinds_of(first) == kinds_of(second)
    ids, found = tokens(2, 9, device="cuda"), []
    for model in (first, second):
        with dispatch.served() as record:
            found.append((logits(model, ids), record))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert found[0][1]["rms_norm_fwd"] and "reference" not in found[0][1]["rms_norm_fwd"]
    assert kernel.kernelize(first).rows == rows


@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_a_model_without_a_gate(kernel, name):
    """The report says which MLPs are meant, and why its attention is left alone."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32},
        "Bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "intermediate_size": 32, "vocab_size": 32},
    }[name]  # fmt: skip
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    before = kinds_of(model)
    head, gate, *table, todo = str(kernel.kernelize(model)).splitlines()
    assert head == "0 modules served, 1 left alone" and kinds_of(model) == before
    assert gate == "no MLP with a gate (down(act(gate(x)) * up(x))) was found"
    assert name in table[-1] and "left alone: its forward " in table[-1]
    assert todo.startswith("  1 left alone: nothing to do, no kernel computes this formula")
    nothing = str(kernel.kernelize(torch.nn.LayerNorm(4)))
    assert nothing.startswith(f"nothing to serve: {gate[: -len(' was found')]}, RMS norm")
    assert "MLP with a gate" not in str(kernel.kernelize(random_model("llama")))
    assert "MLP with a gate" not in str(kernel.kernelize(random_model("qwen3_5_moe_text")))
