"""THE lookup of launch configurations: tuned numbers for this device and shape, else a default.

configs/<operation>,device_name=<name>.json holds {"default": config, "tuned": [entry, ...]} with
entries {"sizes": {"M": 1, ...}, "config": config}. A device without a file of its own is served by
configs/<operation>.json, whose numbers are conservative: they run on every supported device.
"""

import functools
import json
import math
from pathlib import Path

import torch

from . import device as facts

_CONFIGS = Path(__file__).parents[1] / "configs"


@functools.cache
def _table(operation: str, device_name: str) -> dict:
    own = _CONFIGS / f"{operation},device_name={device_name}.json"
    path = own if own.exists() else _CONFIGS / f"{operation}.json"
    return json.loads(path.read_text())


@functools.lru_cache(maxsize=4096)
def _nearest(operation: str, device_name: str, sizes: tuple) -> dict:
    table = _table(operation, device_name)
    wanted = dict(sizes)

    def distance(entry: dict) -> float:
        """How far an entry is in log space, where a factor of two counts the same at any size."""
        tuned = entry["sizes"]
        return sum(abs(math.log2(max(wanted[k], 1) / max(tuned[k], 1))) for k in tuned)

    entries = table.get("tuned", [])
    return min(entries, key=distance)["config"] if sizes and entries else table["default"]


def lookup(operation: str, device: torch.device, **sizes: int) -> dict:
    """Launch configuration of an operation at these sizes: not to be changed by the caller."""
    name = facts.name(device.index) if facts.is_gpu(device) else device.type
    return _nearest(operation, name, tuple(sizes.items()))
