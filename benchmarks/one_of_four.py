"""One of four processes that share a sequence, on one GPU: what its kernels and its host take.

    python benchmarks/one_of_four.py [--ranks 1 3] [--json FILE]

Its group sends nothing, so that neither the exchange nor a wait for the others is in these times;
what an exchange takes the host is a row of its own, of NCCL's call in a group of one. Beside it is
the same part of the sequence alone. The GPU's times are of calls that were started while it was
busy, the host's the median of calls in a row.
"""

import copy
import os
import statistics
import time
from contextlib import contextmanager
from functools import partial
from typing import Callable, Dict, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from kernel_time import in_turns
from parallel_times import RULE, layer_of, layer_step, ours, sizes, step, tensors
from parallel_worker import Worker
from runner import load_package, run, submodule

PROCESSES, ROUNDS = 4, 9
MESSAGE = 8 << 20  # bytes that a process sends of 64 heads


@contextmanager
def one_of(rank: int) -> Iterator[Worker]:
    """This process as one of four, whose group sends nothing and compares nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=PROCESSES)
    exchange = submodule("parallel.exchange")
    silent = mock.patch.object(exchange, "_one_tensor", lambda *_: lambda *given: None)
    apart = mock.patch.object(exchange, "agrees", lambda group: False)
    try:
        with silent, apart:
            yield Worker(rank, PROCESSES, device, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host(call: Callable, calls: int = 4) -> float:
    """Microseconds of the host for a call among others."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - start
    synchronize()
    return spent / calls * 1e6


def kernels(call: Callable, calls: int = 4) -> float:
    """Microseconds of the GPU for a call that the host has started before."""
    if not torch.cuda.is_available():
        return host(call, calls)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    synchronize()
    torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    synchronize()
    return start.elapsed_time(stop) * 1e3 / calls


def timed(what: str, calls: Dict[str, Callable]) -> Iterator[dict]:
    for call in (*calls.values(), *calls.values()):
        call()
    for of, clock in ("the GPU", kernels), ("the host", host):
        found = in_turns(calls, ROUNDS, clock)
        yield {"what": f"{what}: {of}", "us": {name: round(x, 1) for name, x in found.items()}}


def rank_rows(rank: int) -> Iterator[dict]:
    kernel = load_package()
    with one_of(rank) as worker:
        T, H, HV = sizes(worker, *RULE)
        cp = kernel.build_cp_context([0, T], worker.group)
        own = [cp.shard(x) for x in tensors(worker, T, H, HV, "slow")]
        shared, what = partial(ours, cp_context=cp), f"rank {rank}, {H}/{HV} heads, {T} tokens"
        with torch.no_grad():
            calls = {
                "ours": partial(shared, own),
                "its part alone": partial(ours, own, output_final_state=True),
            }
            yield from timed(f"{what}, forward", calls)
        calls = {"ours": step(shared, own), "its part alone": step(ours, own)}
        yield from timed(f"{what}, forward and backward", calls)
        alone, tokens = layer_of(worker), T // PROCESSES
        layer = copy.deepcopy(alone)
        kernel.kernelize(alone, mode="training")
        kernel.kernelize(layer, mode="training", cp_group=worker.group, cp_attention=False)
        x = torch.randn(1, tokens, alone.hidden_size, device=worker.device, dtype=torch.bfloat16)
        calls = {
            "ours": layer_step(layer, x.clone(), cp_context=cp),
            "its part alone": layer_step(alone, x.clone()),
        }
        yield from timed(f"rank {rank}, a layer's step, {T} tokens", calls)


def message() -> Iterator[dict]:
    """NCCL's all-gather in a group of one: the call itself."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group("nccl", rank=0, world_size=1)
    exchange, group = submodule("parallel.exchange"), dist.group.WORLD
    own = torch.zeros(MESSAGE // 4, device="cuda")
    everyone, send = torch.empty_like(own)[None], exchange._one_tensor("all_gather", type(group))

    def call() -> None:
        work = send(group, everyone, own, exchange._gathering(False))
        if work is not None:
            work.wait()

    call()
    found = statistics.median(host(call) for _ in range(ROUNDS))
    yield {"what": "NCCL's call of an all-gather: the host", "us": {"ours": round(found, 1)}}
    dist.destroy_process_group()


def rows(package, options) -> Iterator[dict]:
    for rank in options.ranks:
        yield from rank_rows(rank)
    if torch.cuda.is_available():
        yield from message()


RANKS = {"type": int, "nargs": "+", "default": [1, 3], "help": "which of the four"}

if __name__ == "__main__":
    run(__doc__, "gdn_parallel_one", rows, {"--ranks": RANKS})
