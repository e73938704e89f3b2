"""examples/generate_fast.py: a few tokens on the CPU, where all ways give the same."""

import importlib.util

import pytest
import torch
from conftest import ROOT

pytest.importorskip("transformers")
pytest.importorskip("kernels")


@pytest.mark.filterwarnings("ignore")
def test_a_few_tokens(kernel, capsys):
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/generate_fast.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.run(kernel, "cpu", 8, example.WAYS)
    assert torch.equal(found["eager"][0], found["compiled"][0])
    assert torch.equal(found["eager"][0], found["graphed"][0])
    assert all(len(times) == 8 and times == sorted(times) for _, times in found.values())
    said = capsys.readouterr().out
    assert "tokens/s" in said and "left alone: no CUDA graph: the model is on cpu" in said
