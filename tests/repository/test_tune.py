"""tools/tune.py: what it varies, what it takes for right, and what it writes."""

import json

import pytest
import torch
from conftest import load_package, submodule
from interpreter import compiled

pytest.importorskip("triton")
tune = pytest.importorskip("tune")
launched = pytest.importorskip("launched")


def test_neighbours_differ_in_one_number_however_deep_it_lies():
    config = {"BLOCK_V": 32, "num_warps": 1, "STAGES": 2, "RELOAD": False, "key": {"BLOCK_K": 16}}
    found = list(tune.neighbours(config))
    changed = [(key, new[key]) for new in found for key in config if new[key] != config[key]]
    assert changed == [
        ("BLOCK_V", 16), ("BLOCK_V", 64), ("num_warps", 2), ("STAGES", 1), ("STAGES", 3),
        ("RELOAD", True), ("key", {"BLOCK_K": 8}), ("key", {"BLOCK_K": 32}),
    ]  # fmt: skip


def test_other_roundings_are_the_same_and_other_values_are_not():
    right = torch.randn(50, 60)
    assert tune.same((right + 1e-4, None), (right, None))
    assert not tune.same((right * 1.05, None), (right, None))
    assert not tune.same(right.new_full((50, 60), float("nan")), right)


def test_listed_tiles_are_left_alone():
    assert tune.lists_tiles({"least_rows": 65, "tiles": [{"BLOCK_M": 128}]})
    assert not tune.lists_tiles({"BLOCK_M": 128, "key": {"BLOCK_K": 16}})


@compiled
def test_the_fastest_right_configuration_is_written_and_looked_up(tmp_path, monkeypatch):
    """A clock that likes BLOCK_M 32, BLOCK_N 64, and results that are wrong at BLOCK_K 128."""
    name = "portable_swiglu_fwd"
    table = json.loads((tune.CONFIGS / f"{name}.json").read_text())
    (tmp_path / f"{name}.json").write_text(json.dumps(table))
    monkeypatch.setattr(tune, "CONFIGS", tmp_path)
    tuning, recording = (submodule(f"runtime.{name}") for name in ("tuning", "recording"))
    chip = submodule("runtime.device").Chip("A_CHIP", (8, 0), 108)
    with recording.recorded(chip) as records:
        launch = launched.CALLS["swiglu forward, M 64"](load_package())

        def tile_of_a_call() -> dict:
            launch()
            names, values = records[-1].kernel.arg_names, records[-1].constexprs
            return {names[at[0]]: value for at, value in values.items()}

        def call():
            return torch.full((3,), 2.0 if tile_of_a_call()["BLOCK_K"] == 128 else 1.0)

        def clock(call):
            tile = tile_of_a_call()
            return 1 + abs(tile["BLOCK_M"] - 32) + abs(tile["BLOCK_N"] - 64) - tile["BLOCK_K"] / 999

        ((operation, sizes),) = tune.lookups(call)
        assert operation == name and dict(sizes) == {"M": 64, "N": 14336, "K": 4096}
        config = tune.best(operation, sizes, call, clock)
    assert (config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]) == (32, 64, 64)
    path = tune.write(operation, ("device_name=A_CHIP",), sizes, config)
    assert len(json.loads(path.read_text())["tuned"]) == len(table["tuned"])  # that of M 64 anew
    assert path.name == f"{name},device_name=A_CHIP.json"
    monkeypatch.setattr(tuning, "_CONFIGS", tmp_path)
    with recording.recorded(chip):
        found = tuning.lookup(name, torch.device("cpu"), M=70, N=14336, K=4096)
        other = tuning.lookup(name, torch.device("cpu"), M=1, N=14336, K=4096)
    assert found == config and other != config
