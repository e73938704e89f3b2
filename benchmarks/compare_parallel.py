"""Several GPUs of one host: is it right with NCCL, and how fast is it.

    python benchmarks/compare_parallel.py [--json FILE] [--only PART ..] [--seconds 150]

One process a GPU goes through the parts of parallel_checks.py and parallel_times.py, the checks
first; a line says what each found. A part in which a process raises, or which takes longer than
its limit, ends the processes of all; others go on behind it. What the later parts compile is
compiled beside the first ones, and no timing begins before that has ended.

The record has the median time of each row, the largest of the processes'. FLA is timed with its own
cp_context where fla-core is installed. Without GPUs the same parts run in two processes, with gloo
and tiny sizes: a rehearsal, which keeps no record. NVLink multicast is left off.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Optional

import torch
from peers import keep_fla_to_triton
from runner import RESULTS, ROOT, load_package, save

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parallel")]

START = 60  # seconds until every process has begun its first part
WARM = 80  # seconds for all that is compiled beside


def all_parts() -> dict:
    """Name -> Part, in the order in which they run."""
    import parallel_checks
    import parallel_times

    return {part.name: part for part in (*parallel_checks.PARTS, *parallel_times.PARTS)}


class Workers:
    """One process for each GPU, and what they have said so far."""

    def __init__(self, folder: Path, parts: List[str], world: int):
        self.folder, self.parts = folder, parts
        self.began = time.monotonic()
        self.processes = [self._start(rank, world) for rank in range(world)]

    def _start(self, rank: int, world: int) -> subprocess.Popen:
        words = ("--worker", f"{rank}/{world}", "--folder", str(self.folder), "--only", *self.parts)
        # a session of its own: what it starts ends with it
        return subprocess.Popen([sys.executable, __file__, *words], start_new_session=True)

    def said(self) -> List[List[dict]]:
        """The messages of each process; the last line may be half written."""
        found = []
        for rank in range(len(self.processes)):
            path = self.folder / f"{rank}.jsonl"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            found.append([json.loads(line) for line in lines])
        return found

    def trouble(self, limits: Dict[str, float]) -> Optional[tuple]:
        """(part, what is wrong) where the processes cannot go on, else None."""
        said, now = self.said(), time.monotonic()
        errors = [m for messages in said for m in messages if m["state"] == "error"]
        if errors:
            return errors[0]["part"], errors[0]["line"]
        ended = self.ended(said)
        if ended == len(self.parts):
            return None
        part = self.parts[ended]
        begins = [m["at"] for messages in said for m in messages
                  if m["part"] == part and m["state"] == "begin"]  # fmt: skip
        for rank, process in enumerate(self.processes):
            if process.poll() not in (None, 0):
                return part, f"process {rank} ended with {process.returncode}"
        if begins and now - min(begins) > limits[part]:
            return part, f"over its limit of {limits[part]} s"
        if not any(said) and now - self.began > START:
            return part, f"no process has begun in {START} s"
        return None

    def ended(self, said: List[List[dict]]) -> int:
        """How many parts every process has gone through."""
        return min(sum(m["state"] == "end" for m in messages) for messages in said)

    def are_over(self) -> bool:
        return self.ended(self.said()) == len(self.parts)

    def end(self, patience: float) -> None:
        """Waits a little for processes that take their group down by themselves."""
        until = time.monotonic() + patience
        while time.monotonic() < until and any(p.poll() is None for p in self.processes):
            time.sleep(0.1)
        for process in self.processes:
            end(process)


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Warmers:
    """Processes of their own that compile what later parts need; then the file `warm` is there."""

    def __init__(self, folder: Path, parts: List[str], known: dict):
        words = [word for name in parts for word in known[name].warm]
        self.processes = [self._start(word) for word in dict.fromkeys(words)]
        self.file, self.until = folder / "warm", time.monotonic() + WARM

    def _start(self, word: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, __file__, "--warm", word], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def look(self) -> None:
        running = any(process.poll() is None for process in self.processes)
        if running and time.monotonic() > self.until:
            print("what was compiled beside took too long", flush=True)
            self.end()
            running = False
        if not running:
            self.file.touch()

    def end(self) -> None:
        for process in self.processes:
            end(process)


class Record:
    """Rows by what they are of; parts may add to each other's."""

    def __init__(self, path: Optional[Path]):
        self.path, self.rows, self.lines = path, {}, {}

    def take(self, messages: List[dict]) -> None:
        """Those of the first process, whose times are already the largest."""
        new = [m for m in messages if m["state"] == "end" and m["part"] not in self.lines]
        for message in new:
            self.add(message["part"], message["line"], message.get("seconds", 0.0))
            for row in message.get("rows", ()):
                kept = self.rows.setdefault(row["what"], {"what": row["what"], "us": {}})
                kept.update({**row, "us": {**kept["us"], **row["us"]}})
        if new and self.path is not None and self.rows:
            save(self.path, list(self.rows.values()), checks=self.lines)

    def add(self, part: str, line: str, seconds: float) -> None:
        self.lines[part] = line
        print(f"{part} ({seconds:.1f} s): {line}", flush=True)


def supervise(options) -> Record:
    """All parts, in as many starts as it takes."""
    known, until = all_parts(), time.monotonic() + options.seconds
    load_package()  # makes what is generated of it, before many load it at once
    if not set(options.only or ()) <= set(known):
        raise SystemExit(f"--only takes some of {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes, too
    todo = options.only or list(known)
    limits = {name: part.limit for name, part in known.items()}
    cuda = torch.cuda.is_available()
    world = options.processes
    if cuda and torch.cuda.device_count() < world:
        raise SystemExit(f"needs {world} GPUs, and there are {torch.cuda.device_count()}")
    record = Record(options.json if cuda else None)
    with tempfile.TemporaryDirectory() as first:
        warmers = Warmers(Path(first), todo if cuda else [], known)
        try:
            while todo and time.monotonic() < until:
                with tempfile.TemporaryDirectory() as folder:
                    os.symlink(warmers.file, Path(folder) / "warm")
                    workers = Workers(Path(folder), todo, world)
                    todo = go_through(workers, warmers, record, limits, until)
        finally:
            warmers.end()
    for name in todo:
        record.add(name, "not run: no time is left", 0.0)
    return record


def go_through(workers, warmers, record: Record, limits: dict, until: float) -> List[str]:
    """Runs the parts of these workers; those that are left when something goes wrong."""
    parts, wrong = workers.parts, None
    try:
        while not workers.are_over() and time.monotonic() < until and wrong is None:
            time.sleep(0.1)
            warmers.look()
            wrong = workers.trouble(limits)
            record.take(workers.said()[0])
    finally:
        workers.end(patience=5 if wrong is None else 0)
    record.take(workers.said()[0])
    if wrong is None:
        return [name for name in parts if name not in record.lines]
    record.add(wrong[0], f"FAILED: {wrong[1]}", time.monotonic() - workers.began)
    return parts[parts.index(wrong[0]) + 1 :]


def work(options) -> None:
    """One process: goes through the parts, and says how they end."""
    import parallel_worker

    rank, world = map(int, options.worker.split("/"))
    known = all_parts()
    parallel_worker.run(rank, world, options.folder, [known[name] for name in options.only])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "gdn_parallel.json")
    parser.add_argument("--only", nargs="*", help="names of parts, in their order")
    parser.add_argument("--seconds", type=float, default=150, help="for everything")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    keep_fla_to_triton()
    if options.worker:
        work(options)
    elif options.warm:
        import parallel_times

        parallel_times.warm(options.warm)
    else:
        record = supervise(options)
        return int(any(line.startswith(("FAILED", "WRONG")) for line in record.lines.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
