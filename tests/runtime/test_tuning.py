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
    device = submodule("runtime.device")
    monkeypatch.setattr(tuning, "_CONFIGS", tmp_path)
    monkeypatch.setattr(device, "name", lambda index: "NVIDIA_X")
    monkeypatch.setattr(device, "capability", lambda index: (9, 0))
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


def test_the_most_particular_table_serves(tables, monkeypatch):
    names = ("op.json", "op,capability=9.0.json", "op,device_name=NVIDIA_X.json")
    for block, name in enumerate(names):
        (tables / name).write_text(json.dumps({"default": {"BLOCK": block}}))
        tuning._table.cache_clear(), tuning._nearest.cache_clear()
        assert tuning.lookup("op", CUDA)["BLOCK"] == block
    device = submodule("runtime.device")
    for capability in ((8, 0), (10, 0), None):  # the last is AMD's
        monkeypatch.setattr(device, "name", lambda index: "another")
        monkeypatch.setattr(device, "capability", lambda index, found=capability: found)
        assert tuning.lookup("op", CUDA)["BLOCK"] == 0


@pytest.mark.parametrize("name", ["NVIDIA_H100_80GB_HBM3", "NVIDIA_H200", "NVIDIA_GH200_480GB"])
def test_every_hopper_is_served_by_its_tables(name):
    """One chip with other memory: the routed experts' Hopper kernels need tiles of 128 rows."""
    chip = submodule("runtime.device").Chip(name, (9, 0), 132)
    with submodule("runtime.recording").recorded(chip):
        assert tuning.lookup("portable_experts", torch.device("cpu"), rows=500)["BLOCK_M"] == 128


@pytest.mark.parametrize("path", sorted((PACKAGE / "configs").glob("*.json")), ids=lambda p: p.stem)
def test_every_table_has_a_default_for_other_devices(path):
    table = json.loads(path.read_text())
    assert isinstance(table["default"], dict)
    assert all(set(entry) == {"sizes", "config"} for entry in table.get("tuned", []))
    assert (path.parent / f"{path.name.split(',')[0].removesuffix('.json')}.json").exists()
