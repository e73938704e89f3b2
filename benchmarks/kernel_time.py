"""What the compare_*.py scripts share: the package in the tree, kernel time, the peers' tuning, and
the record."""

import datetime
import functools
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict

import torch
from records import RESULTS

sys.path.insert(0, str(RESULTS.parent.parent / "tools"))
from in_tree import ROOT, load_package, need_gpu, parse_on_gpu  # noqa: E402, F401


def microseconds(calls: Dict[str, Callable], rounds: int = 3, rep_ms: int = 20) -> Dict[str, float]:
    """Kernel time of each call by CUDA-graph replay: median over rounds, which take the calls in
    turn so that a clock that drifts drifts for all of them."""
    from triton.testing import do_bench_cudagraph

    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(do_bench_cudagraph(call, rep=rep_ms, return_mode="median") * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def seconds(call: Callable, synchronize: Callable = torch.cuda.synchronize) -> float:
    """Seconds by the host's clock, from an idle GPU to an idle GPU."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def keep_fla_to_triton() -> None:
    """FLA hands calls to FlashQLA and TileLang where they are installed; not after this."""
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    os.environ.setdefault("FLA_TILELANG", "0")


def share_autotuning(part: int, parts: int) -> None:
    """This process tries every parts-th configuration alone, of all that are tuned at run time."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self, fn, arg_names, configs, *args, **kwargs):
        configs = list(configs or [])
        original(self, fn, arg_names, configs[part::parts] or configs[:1], *args, **kwargs)

    Autotuner.__init__ = init


def shorten_autotuning(warmup_ms: int = 3, rep_ms: int = 15) -> None:
    """From here on every trial of what is tuned at run time takes so long, not 25 and 100 ms."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    trial = functools.partial(do_bench, warmup=warmup_ms, rep=rep_ms)
    Autotuner.do_bench = property(lambda tuner: trial)


def warm_up(*script, parts: int = 12) -> None:
    """Compiles what a peer's autotuner will try, minutes one after another, by many processes.

    They leave it in the caches on disk; the tuning itself is then this process's, and whole.
    """
    command = [sys.executable, *script, "--warm"]
    workers = [
        subprocess.Popen([*command, f"{part}/{parts}"], stdout=subprocess.DEVNULL)
        for part in range(parts)
    ]
    for worker in workers:
        worker.wait()


PEERS = (
    *("fla-core", "flashinfer-python", "flash-qla", "tilelang", "aiter"),
    *("liger-kernel", "sonic-moe", "transformers"),
)


def installed(names=PEERS) -> dict:
    """Versions of those packages that are there."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def record_of(operation: str, peers) -> Path:
    """Where a comparison with these peers is kept if nobody says otherwise."""
    return RESULTS / ("_".join([operation, *sorted(peers)]) + ".json")


def command() -> str:
    """What runs, as one would type it in the repository's root."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    options = sys.argv[1:]
    for name_of_file in ("--json", "--wait-for", "--gguf"):  # where a file lies is no part of it
        if name_of_file in options:
            at = options.index(name_of_file)
            del options[at : at + 2]
    return shlex.join(["python", str(name), *options])


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def machine() -> dict:
    import triton

    return {
        "command": command(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "versions": installed(),
        "date": today(),
    }


def save(path: Path, rows: list, **more) -> None:
    write(path, {**machine(), **more, "rows": rows})


def write(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def merged(path: Path, rows: list) -> list:
    """The record's rows, with these in place of those of the same name."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {row["what"] for row in rows}
    return [row for row in old if row["what"] not in new] + rows


def wait_for(path: Path) -> None:
    print("waits for", path, flush=True)
    while not path.exists():
        time.sleep(0.1)
