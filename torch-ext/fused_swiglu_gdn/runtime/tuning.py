"""Looks up launch configurations: tuned numbers for a device and shape, else a default.

A table is {"default": config, "tuned": [entry, ...]} with entries {"sizes": {"M": 1, ...},
"config": config}. The first of these files that exists is used:

    configs/<operation>,device_name=<name>.json     one GPU's own
    configs/<operation>,capability=<x.y>.json       of all GPUs of a CUDA compute capability
    configs/<operation>.json                        conservative: runs on every supported device
"""

import functools
import glob
import json
import math
from pathlib import Path
from typing import Optional, Tuple

import torch

from . import device as devices

_CONFIGS = Path(__file__).parents[1] / "configs"


def chip(device: torch.device) -> Tuple[str, ...]:
    """The suffixes of a device's tables, most specific first."""
    if not devices.is_gpu(device):
        return ()
    own, capability = f"device_name={devices.name(device.index)}", devices.capability(device.index)
    return (own, "capability={}.{}".format(*capability)) if capability else (own,)


def path_of(operation: str, chip: Tuple[str, ...]) -> Path:
    """The path of the table for an operation."""
    names = (*(f"{operation},{part}.json" for part in chip), f"{operation}.json")
    return next(path for name in names if (path := _CONFIGS / name).exists())


def tuned_for(device: torch.device) -> Optional[str]:
    """The most specific of a GPU's suffixes for which an operation has a table, in words; None if
    all operations have their defaults."""
    found = [part for part in chip(device) if any(_CONFIGS.glob(f"*,{glob.escape(part)}.json"))]
    if not found:
        return None
    key, _, value = found[0].partition("=")
    return "this GPU" if key == "device_name" else f"compute capability {value}"


@functools.cache
def _table(operation: str, chip: Tuple[str, ...]) -> dict:
    return json.loads(path_of(operation, chip).read_text())


@functools.lru_cache(maxsize=4096)
def _nearest(operation: str, chip: Tuple[str, ...], sizes: tuple) -> dict:
    table = _table(operation, chip)
    wanted = dict(sizes)

    def distance(entry: dict) -> float:
        """Distance of an entry in log space, where a factor of two counts the same at any size."""
        tuned = entry["sizes"]
        return sum(abs(math.log2(max(wanted[k], 1) / max(tuned[k], 1))) for k in tuned)

    entries = table.get("tuned", [])
    return min(entries, key=distance)["config"] if sizes and entries else table["default"]


def lookup(operation: str, device: torch.device, **sizes: int) -> dict:
    """Launch configuration of an operation at these sizes; the caller must not change it."""
    return _nearest(operation, chip(device), tuple(sizes.items()))
