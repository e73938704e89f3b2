"""examples/generate_fast.py: a few tokens on the CPU, where all ways give the same."""

import pytest
import torch
from conftest import load_example

pytest.importorskip("transformers")
pytest.importorskip("kernels")


@pytest.mark.filterwarnings("ignore")
def test_a_few_tokens(kernel, capsys):
    example = load_example("generate_fast")
    found = example.run(kernel, "cpu", 8, example.WAYS)
    for choice in ("greedy", "drawn"):
        for way in ("compiled", "graphed"):
            assert torch.equal(found["eager", choice][0], found[way, choice][0])
    for choice in example.DRAFTED:
        assert torch.equal(found["graphed", choice][0], found["eager", "greedy"][0])
    assert all(len(times) == 8 and times == sorted(times) for _, times in found.values())
    said = capsys.readouterr().out
    assert "tokens/s" in said and "left alone: no CUDA graph: the model is on cpu" in said
