"""All pairs of the crossings' table, and how one is run."""

import contextlib
import functools
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import List, NamedTuple
from unittest import mock

import fresh
import pytest
import torch
import uses_around  # noqa: F401
import uses_forward  # noqa: F401
import uses_generate  # noqa: F401
import uses_peft  # noqa: F401
import uses_train  # noqa: F401
from conftest import load_package, submodule
from problems import PROBLEMS
from sides import USES, crossing
from subjects import MODELS, stand_ins
from two_processes import found_by
from uses_functions import FUNCTION_USES, outcome_of


def in_process(pair, folder: str, rank: int, device) -> str:
    return outcome(pair, device.type, Path(folder, str(rank)))


def elsewhere(pair, without: str) -> str:
    """The outcome of a use in a process that cannot import a package."""
    code = (
        f"import sys; sys.modules[{without!r}] = None; sys.path[:0] = {sys.path!r}; "
        f"import pairs, pathlib; pair = pairs.Pair('a prompt', {pair.subject!r}); "
        f"print(pairs.outcome(pair, 'cpu', pathlib.Path('.')))"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = fresh.python("-c", code, cwd=folder, imported="torch")
    said = done.stdout.strip() or done.stderr.strip()
    return said.splitlines()[-1] if done.returncode == 0 else f"WRONG: {' '.join(said.split())}"


class Pair(NamedTuple):
    use: str
    subject: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.use}"

    @property
    def slow(self) -> bool:
        return (FUNCTION_USES if self.subject in PROBLEMS else USES)[self.use].slow


def function_pairs() -> List[Pair]:
    return [
        Pair(name, function)
        for name, use in FUNCTION_USES.items()
        for function, problem in PROBLEMS.items()
        if use.only(problem)
    ]


def pairs() -> List[Pair]:
    """Of models."""
    return [
        Pair(name, subject)
        for name, use in USES.items()
        for subject in MODELS
        if not use.only or subject in use.only
    ]


def reason(pair: Pair) -> str:
    """What a pair needs that not every machine with these tests has, and its note, or ""."""
    if pair.subject in PROBLEMS:
        return ""
    use = USES[pair.use]
    gpus = ["", "a GPU", "two GPUs"][use.gpus]
    needed = [x for x in (gpus, *use.needs) if x and x not in ("peft", "accelerate")]
    return "; ".join([x for x in (" and ".join(needed), use.note) if x])


def why_not_here(pair: Pair, device: str) -> str:
    """Why a pair cannot run on this machine; "" where it can."""
    if pair.subject in PROBLEMS:
        return ""
    use = USES[pair.use]
    for package in use.needs:
        if importlib.util.find_spec(package) is None:
            return f"needs {package}"
    if use.gpus > (torch.cuda.device_count() if device == "cuda" else 0):
        return f"needs {use.gpus} GPUs" if use.gpus > 1 else "needs a GPU"
    if use.processes and device == "cuda" and torch.cuda.device_count() < 2:
        return "needs two GPUs"
    return ""


@contextlib.contextmanager
def emulated():
    """CUDA graphs that are emulated on a CPU, in all modules that know their class; gives the
    class, which counts."""
    from decoding import Counted
    from emulated_graph import EmulatedGraph

    real = submodule("decoding.capture").Graph
    alive = type("Alive", (), {"add": lambda self, graph: None})()
    facts = {"captures": 0, "replays": 0, "alive": alive}
    base = real if torch.cuda.is_available() else EmulatedGraph
    counted = type("Graph", (Counted, base), facts)
    name = load_package().__name__
    with contextlib.ExitStack() as stack:
        for module in [m for n, m in sys.modules.items() if n.startswith(name)]:
            if vars(module).get("Graph") is real:
                stack.enter_context(mock.patch.object(module, "Graph", counted))
        yield counted


def outcome(pair: Pair, device: str, folder: Path) -> str:
    """What became of a pair, in words: sides.crossing."""
    if pair.subject in PROBLEMS:
        return outcome_of(FUNCTION_USES[pair.use], pair.subject, torch.float32, device)
    use = USES[pair.use]
    if use.processes and not torch.distributed.is_initialized():
        found = found_by(functools.partial(in_process, pair, str(folder)), device, folder)
        return next((x for x in found if x != found[0]), found[0])
    if use.without:
        return elsewhere(pair, use.without)
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch)
        graphs = emulated if use.graphs else lambda: contextlib.nullcontext()
        return crossing(use, pair.subject, device, folder, graphs)
