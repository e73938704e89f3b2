"""examples/train_bytes.py: a few steps on the CPU, where ours must follow transformers' losses."""

import json
from types import SimpleNamespace

import pytest
from conftest import load_example

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def example():
    return load_example("train_bytes")


def test_a_few_steps(example, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = {"steps": 4, "seeds": 1, "first_seed": 0, "only": None, "out": None, "cp": None}
    report = example.run(SimpleNamespace(**options))
    ours, torch_only = (report["ways"][name]["losses"][0] for name in ("ours", "torch"))
    assert len(ours) == 4 and all(loss == loss for loss in ours)
    assert ours == pytest.approx(torch_only, rel=1e-4)
    json.dumps(report)


def test_the_picture(example, tmp_path):
    pytest.importorskip("matplotlib")
    losses = [[3.0 - 0.1 * step for step in range(20)]] * 2
    way = {"losses": losses, "tokens_per_second": 1000.0}
    example.draw({"device": "CPU", "ways": {"ours": way}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
