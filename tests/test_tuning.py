"""The lookup of launch configurations."""

import json

import pytest
import torch
from conftest import PACKAGE, submodule

tuning = submodule("runtime.tuning")
CUDA = torch.device("cuda", 0)
TABLE = {
    "default": {"BLOCK": 1},
    "tuned": [
        {"sizes": {"M": 1, "N": 1024}, "config": {"BLOCK": 2}},
        {"sizes": {"M": 64, "N": 1024}, "config": {"BLOCK": 3}},
        {"sizes": {"M": 64, "N": 8192}, "config": {"BLOCK": 4}},
    ],
}


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder of configurations of its own, and a GPU called NVIDIA_X."""
    monkeypatch.setattr(tuning, "_CONFIGS", tmp_path)
    monkeypatch.setattr(submodule("runtime.device"), "name", lambda index: "NVIDIA_X")
    for cache in (tuning._table, tuning._nearest):
        cache.cache_clear()
    yield tmp_path
    for cache in (tuning._table, tuning._nearest):
        cache.cache_clear()


def test_nearest_in_log_space(tables):
    (tables / "op,device_name=NVIDIA_X.json").write_text(json.dumps(TABLE))
    for sizes, block in (((1, 1000), 2), ((9, 1024), 3), ((7, 1024), 2), ((4096, 9999), 4)):
        assert tuning.lookup("op", CUDA, M=sizes[0], N=sizes[1])["BLOCK"] == block
    assert tuning.lookup("op", CUDA, M=0, N=1024)["BLOCK"] == 2
    assert tuning.lookup("op", CUDA)["BLOCK"] == 1


def test_a_device_without_a_table_gets_the_default(tables):
    (tables / "op.json").write_text(json.dumps({"default": {"BLOCK": 7}}))
    assert tuning.lookup("op", CUDA, M=5)["BLOCK"] == 7
    assert tuning.lookup("op", torch.device("cpu"), M=5)["BLOCK"] == 7


@pytest.mark.parametrize("path", sorted((PACKAGE / "configs").glob("*.json")), ids=lambda p: p.stem)
def test_every_table_has_a_default_for_other_devices(path):
    table = json.loads(path.read_text())
    assert isinstance(table["default"], dict)
    assert all(set(entry) == {"sizes", "config"} for entry in table.get("tuned", []))
    assert (path.parent / f"{path.name.split(',')[0].removesuffix('.json')}.json").exists()
