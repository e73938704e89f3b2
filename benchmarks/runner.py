"""The runner of the comparisons: it reads a script's options, and makes its record row by row.

A script is a table of cases and a generator rows(package, options): what each case times beside
each other, as the row that its record has. A row says what it is ("what", or sizes), and has times
by name ("us", "ms", "host_us") and, as far as they are known, errors.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, Optional, Union

import torch
from peers import share_autotuning
from records import RESULTS

sys.path.insert(0, str(RESULTS.parent.parent / "tools"))
from in_tree import ROOT, load_package, need_gpu, parse_on_gpu, submodule  # noqa: E402, F401

DEVICE = "cuda"
SECONDS = {"--seconds": {"type": float, "default": math.inf, "help": "begin no row after so many"}}
VERSIONS = (
    *("fla-core", "flashinfer-python", "flash-qla", "tilelang", "aiter"),
    *("liger-kernel", "sonic-moe", "transformers", "peft", "gguf", "nvidia-cudnn-frontend"),
)
NO_OPTIONS = ("--json", "--wait-for", "--gguf")  # where a file lies is no part of a command


def run(
    doc: str,
    record: Union[str, Callable],
    rows: Callable[..., Iterator[dict]],
    arguments: Optional[Dict[str, dict]] = None,
    warm: Optional[Callable] = None,
    merge: bool = False,
    share: bool = True,
) -> None:
    """Runs a comparison by its command line, and saves its record after every row.

    record: its name in benchmarks/results/, or a function of the options that gives it. arguments:
    the script's own options, as argparse takes them. warm(options): compiles a part of what peers
    tune for minutes, in a process that warm_up() of peers.py has started; share: each of them tries
    some of the configurations alone. merge: rows take the places of the record's of the same name.
    What rows() puts into options.facts is saved, too.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, how in (arguments or {}).items():
        parser.add_argument(name, **how)
    parser.add_argument("--json", type=Path, help="default: in benchmarks/results/")
    if warm:
        parser.add_argument("--compiled", action="store_true", help="warm nothing up before")
        parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parse_on_gpu(parser)
    name = record(options) if callable(record) else record
    options.json, options.facts = options.json or RESULTS / f"{name}.json", {}
    if warm and options.warm:
        if share:
            share_autotuning(*map(int, options.warm.split("/")))
        return warm(options)
    torch.manual_seed(0)
    found, began = [], time.monotonic()
    for row in rows(load_package(), options):
        print(line(row), f"[{time.monotonic() - began:.0f} s]", flush=True)
        if row not in found:  # or it is given again, with more in it
            found.append(row)
        save(options.json, merged(options.json, [row]) if merge else found, **options.facts)
        if time.monotonic() - began > getattr(options, "seconds", math.inf):
            break
    if not merge:
        save(options.json, found, **options.facts)


def kernelized(package, model, **options):
    """kernelize, with its report printed. A module that a peer's patch keeps from being served
    would be timed as ours: it ends the comparison."""
    report = package.kernelize(model, **options)
    print(report, flush=True)
    patched = [f"{row.module}: {row.reason}" for row in report.left if "patched" in row.reason]
    if patched:
        raise RuntimeError(f"not all of it would be ours: {patched[0]}")
    return report


def line(row: dict) -> str:
    """A row as it is printed: every figure, and how many times as fast ours is as each peer."""

    def shown(value) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {shown(x)}" for name, x in value.items())
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    times = row.get("us") or row.get("ms") or {}
    faster = {name: f"{t / times['ours']:.2f}" for name, t in times.items()
              if "ours" in times and name != "ours"}  # fmt: skip
    parts = [f"{name}: {shown(value)}" for name, value in row.items()]
    return " | ".join(parts + [f"ours is faster than: {shown(faster)}"] * bool(faster))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact||; absolute where the exact one is zero."""
    norm = exact.double().norm()
    return ((found.double() - exact.double()).norm() / (norm if norm > 0 else 1)).item()


def over_draws(draws: list) -> list:
    """Root mean squares over draws, each with an error at every place."""
    return [statistics.mean(e * e for e in column) ** 0.5 for column in zip(*draws)]


def installed(names=VERSIONS) -> dict:
    """Versions of those packages that are there."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """What runs, as one would type it in the repository's root."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    options = sys.argv[1:]
    for name_of_file in NO_OPTIONS:
        if name_of_file in options:
            at = options.index(name_of_file)
            del options[at : at + 2]
    return shlex.join(["python", str(name), *options])


def in_fresh_process(*words: str):
    """What this script prints last, as JSON, in a new process with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, sys.argv[0], *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1][:200])
    return json.loads(done.stdout.strip().splitlines()[-1])


def machine() -> dict:
    return {
        "command": command(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": installed(["triton"]).get("triton"),
        "versions": installed(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
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


def wait_for(path: Optional[Path]) -> None:
    """Waits until the file exists: for a GPU that others use meanwhile."""
    if path is not None:
        print("waits for", path, flush=True)
        while not path.exists():
            time.sleep(0.1)
