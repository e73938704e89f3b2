"""One of the processes of compare_parallel.py: its group, its clock, and what it says."""

import contextlib
import datetime
import json
import os
import statistics
import time
import traceback
from pathlib import Path
from typing import Callable, List, NamedTuple

import torch
import torch.distributed as dist
from kernel_time import memory


class Part(NamedTuple):
    name: str
    limit: float  # seconds
    run: Callable  # of a Worker: (line, rows)
    timed: bool = False  # nothing else may use the GPUs
    warm: tuple = ()  # words for parallel_times.warm: what is compiled for it beside


class LeftOut(Exception):
    """A part that cannot run here, in no process of the group."""


class Worker(NamedTuple):
    rank: int
    world: int
    device: torch.device
    group: object

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def needs_gpu(self) -> None:
        if not self.on_gpu:
            raise LeftOut("needs GPUs")

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def largest(self, value: float) -> float:
        """Over all processes."""
        found = torch.tensor(value, dtype=torch.float64)  # on the CPU: by gloo
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.item()

    def meet(self) -> None:
        """Waits for the other hosts."""
        self.largest(0.0)

    def all_true(self, value: bool) -> bool:
        return self.largest(float(not value)) == 0

    def microseconds(self, call: Callable, calls: int = 10, rounds: int = 5) -> float:
        """Median over rounds of a call among `calls` in a row; the largest of the processes'."""
        calls, rounds = (calls, rounds) if self.on_gpu else (1, 1)
        for _ in range(2):
            call()
        found = []
        for _ in range(rounds):
            self.synchronize()
            self.meet()
            found.append(self._row(call, calls))
        return round(self.largest(statistics.median(found)), 2)

    def _row(self, call: Callable, calls: int) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3 / calls

    def peak_mib(self, call: Callable) -> float:
        return round(memory(call)[1], 1) if self.on_gpu else 0.0

    def host_microseconds(self, call: Callable, calls: int = 10) -> float:
        """What the host needs to start a call while the GPU is busy with others."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - start
        self.synchronize()
        return round(self.largest(spent / calls * 1e6), 1)


def start(rank: int, world: int, folder: Path) -> Worker:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    # gloo beside NCCL: what the host compares goes by the host
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"file://{folder}/store",
        rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    return Worker(rank, world, device, dist.group.WORLD)


def run(rank: int, world: int, folder: Path, parts: List[Part]) -> None:
    worker = start(rank, world, folder)
    with open(folder / f"{rank}.jsonl", "w", buffering=1) as file:

        def say(part: Part, state: str, **more) -> None:
            message = {"part": part.name, "state": state, "at": time.monotonic(), **more}
            file.write(json.dumps(message) + "\n")

        for part in parts:
            while part.timed and not (folder / "warm").exists():
                time.sleep(0.1)
            worker.meet()
            say(part, "begin")
            began, rows = time.monotonic(), []
            try:
                line, rows = part.run(worker)
                worker.synchronize()
            except LeftOut as reason:
                line = f"left out: {reason}"
            except Exception as error:
                traceback.print_exc()
                said = [type(error).__name__, *str(error).strip().splitlines()]
                say(part, "error", line=f"process {rank}: {': '.join(said[:2])[:300]}")
                os._exit(1)  # the others may wait for this one: all are ended and start again
            say(part, "end", line=line, rows=rows, seconds=time.monotonic() - began)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)
