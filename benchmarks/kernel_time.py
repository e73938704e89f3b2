"""The clocks of the comparisons: kernels by CUDA graph, eager calls by the GPU's and the host's."""

import statistics
import time
from typing import Callable, Dict, List, Tuple

import torch


def in_turns(calls: Dict[str, Callable], rounds: int, clock: Callable) -> Dict[str, float]:
    """The median over rounds of clock(call), by name. The calls of a round follow each other, so
    that a clock that drifts drifts for all of them; the last is first in every other round."""
    orders = [list(calls), list(calls)[::-1]]
    turns = [{name: clock(calls[name]) for name in orders[i % 2]} for i in range(rounds)]
    return {name: statistics.median(turn[name] for turn in turns) for name in calls}


def microseconds(calls: Dict[str, Callable], rounds: int = 3, rep_ms: int = 20) -> Dict[str, float]:
    """Kernel time of each call by CUDA-graph replay."""
    from triton.testing import do_bench_cudagraph

    def clock(call) -> float:
        return do_bench_cudagraph(call, rep=rep_ms, return_mode="median") * 1e3

    return in_turns(calls, rounds, clock)


def milliseconds(calls: Dict[str, Callable], rounds: int = 3, warmup: int = 10, rep: int = 40):
    """Time of each eager call by the GPU's clock."""
    from triton.testing import do_bench

    def clock(call) -> float:
        return do_bench(call, warmup=warmup, rep=rep, return_mode="median")

    return {name: round(ms, 4) for name, ms in in_turns(calls, rounds, clock).items()}


def wall(call: Callable, least: float = 0.2) -> float:
    """Microseconds of a call as a program sees it: host and GPU, calls one after another."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < least:
        call()
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def seconds(call: Callable, synchronize: Callable = torch.cuda.synchronize) -> float:
    """Seconds by the host's clock, from an idle GPU to an idle GPU."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def host_us(call: Callable, calls: int = 100, runs: int = 5, warm: int = 0, of=min) -> float:
    """Microseconds until an eager call returns, the queue being empty: the least (or what `of`
    says) of the means of several runs."""
    for _ in range(warm):
        call()
    means = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return of(means[1:])


def idle_host_us(call: Callable) -> float:
    """Median microseconds until an eager call returns, the GPU idle before each."""
    return host_us(call, calls=1, runs=50, warm=10, of=statistics.median)


def event_ms(call: Callable) -> float:
    """Median milliseconds of ten runs of an eager call that is started on an idle GPU."""
    times = []
    for _ in range(12):  # two to warm up
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])


def memory(forward: Callable, backward: Callable = lambda out: None) -> Tuple[float, float]:
    """MiB that are allocated after forward(), and at the peak of it and of backward(its result),
    beyond what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    held = torch.cuda.memory_allocated() - before
    backward(out)
    torch.cuda.synchronize()
    return held / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20


def kernels_of(call: Callable, calls: int = 1) -> List[Tuple[str, float]]:
    """(name, microseconds) of each kernel of several calls, one after another."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [(e.name, e.device_time) for e in record.events() if e.device_type == on_gpu]


def graphed(call: Callable) -> Callable:
    """The call as a CUDA graph: its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def graph_ms(calls: List[Callable]) -> float:
    """Milliseconds a call by replaying one graph of all calls: the median of replays for 60 ms."""
    replay = graphed(lambda: [call() for call in calls])
    times, began = [], time.time()
    while len(times) < 4 or (time.time() - began < 0.06 and len(times) < 200):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / len(calls))
    return statistics.median(times[1:])
