"""What the compare_*.py scripts share: the package in the tree, kernel time, and the record."""

import datetime
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load_package(name: str = "fused_swiglu_gdn_benchmarked"):
    """The package in torch-ext/, imported under a name of its own as the Hub's loader does."""
    if name in sys.modules:
        return sys.modules[name]
    package = ROOT / "torch-ext" / "fused_swiglu_gdn"
    if not (package / "_ops.py").exists():
        subprocess.run([sys.executable, ROOT / "tools" / "build.py", "--in-place"], check=True)
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def microseconds(calls: Dict[str, Callable], rounds: int = 3, rep_ms: int = 20) -> Dict[str, float]:
    """Kernel time of each call by CUDA-graph replay: median over rounds, which take the calls in
    turn so that a clock that drifts drifts for all of them."""
    from triton.testing import do_bench_cudagraph

    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(do_bench_cudagraph(call, rep=rep_ms, return_mode="median") * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


PEERS = ("fla-core", "flashinfer-python", "liger-kernel", "transformers", "aiter")


def installed() -> dict:
    """Versions of the peers that are there."""
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "versions": installed(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def save(path: Path, rows: list, **more) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine(), **more, "rows": rows}, indent=1) + "\n")
