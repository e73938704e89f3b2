"""benchmarks/real_model.py with random weights on a CPU, and what page.py and pictures.py make of
its record."""

import contextlib
import importlib
import io
import json
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT, submodule

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def made(kernel):
    """The record of all parts which a CPU can run, with the reference for the kernels."""
    pytest.importorskip("peft")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        script, path = importlib.import_module("real_model"), Path(folder, "real_model.json")
        patch.setattr(sys, "argv", words(path))
        patch.setattr(script, "QUESTIONS", script.QUESTIONS[:2])
        with submodule("runtime.dispatch").force("reference"), io.StringIO() as said:
            with contextlib.redirect_stdout(said):
                script.main()
            assert "DecoderLayer" in said.getvalue()  # served, not left alone
        return path.read_text()


def words(path) -> list:
    return ["real_model.py", "--tiny", "--device", "cpu", "--steps", "3", "--json", str(path)]


@pytest.fixture
def record(made, monkeypatch, tmp_path):
    """A copy of it, which the script would write to."""
    path = tmp_path / "real_model.json"
    path.write_text(made)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", words(path))
    script = importlib.import_module("real_model")
    monkeypatch.setattr(script, "QUESTIONS", script.QUESTIONS[:2])
    return path


def test_ours_is_transformers(record):
    found = json.loads(record.read_text())
    likelihood = found["likelihood"]
    exact = likelihood["transformers, fp32"]["nats"]
    assert likelihood["ours, fp32"]["nats"] == pytest.approx(exact, rel=1e-5)
    assert abs(likelihood["ours, fp32"]["kl"]) < 1e-6 and likelihood["ours"]["error"] < 0.05
    assert likelihood["ours, fp32"]["same"] > 0.999
    assert found["greedy"]["ours, fp32"]["same"] == 2
    assert all(way["kl"] < 1e-3 and way["error"] < 0.05 for way in found["decoding"].values())
    for name in ("AdamW", "LoRA"):
        ways = found[name]
        mine, theirs = (ways[way]["losses"] for way in ("ours", "transformers"))
        assert len(mine) == 3 and mine == pytest.approx(theirs, rel=2e-3)
        start, end = ways["ours"]["held_out"]
        assert end < start
    steps = [row["us"] for row in found["rows"]]
    assert len(steps) == 5 and all(us["ours"] > 0 and len(us) == 2 for us in steps)


def test_a_part_takes_its_place_in_the_record(record, monkeypatch):
    script, before = sys.modules["real_model"], json.loads(record.read_text())
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--parts", "finetune"])
    script.main()
    after = json.loads(record.read_text())
    assert after.keys() == before.keys() and after["AdamW"] != before["AdamW"]
    assert all(after[part] == before[part] for part in ("LoRA", "likelihood", "greedy"))
    names = [{row["what"] for row in found["rows"]} for found in (before, after)]
    assert names[0] == names[1] and len(after["rows"]) == len(names[1])


def test_the_page_and_the_picture(record, monkeypatch):
    page, pictures = (importlib.import_module(name) for name in ("page", "pictures"))
    text = "\n".join(page.section(page.load("real_model", record.parent)))
    for said in (
        "a token, static cache |",
        "| ours, CUDA graphs | 2 of 2 |",
        "AdamW, ours",
        "LoRA",
    ):
        assert said in text
    monkeypatch.setattr(pictures, "RESULTS", record.parent)
    monkeypatch.setattr(pictures, "load", lambda name: page.load(name, record.parent))
    pictures.draw("real_model")
    drawn = (record.parent / "real_model.png").read_bytes()
    assert pictures.digest(pictures.PICTURES["real_model"]).encode() in drawn


def test_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("real_model")
    monkeypatch.setattr(sys, "argv", ["real_model.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and "--gguf must be the file" in capsys.readouterr().err


def test_steps_that_wait_for_the_host(kernel, monkeypatch, tmp_path, capsys):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script, path = importlib.import_module("small_training"), tmp_path / "small_training.json"
    words = ["small_training.py", "--tiny", "--device", "cpu", "--rounds", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    assert capsys.readouterr().out.count(" modules served, 0 left") == 2 * len(script.WAYS)
    rows = json.loads(path.read_text())["rows"]
    assert [row["what"] for row in rows] == list(script.WAYS)
    assert all(set(row["us"]) == set(script.SIDES) for row in rows)
    assert all(time > 0 for row in rows for time in row["us"].values())
