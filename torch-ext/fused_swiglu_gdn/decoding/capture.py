"""Captures and replays a CUDA graph of one step; the only module of decoding/ that calls
torch.cuda's graphs."""

import contextlib
import functools
import gc
import threading
from typing import Callable, List, Optional

import torch

from ..runtime.device import on

capturing = threading.RLock()  # torch cannot capture two graphs of a process at once


@functools.lru_cache(maxsize=64)
def _side(device: torch.device, stream: int) -> torch.cuda.Stream:
    """The side stream on which steps run and are captured that are replayed on `stream`.

    Libraries keep a workspace for each stream, which graphs continue to use: streams that may run
    concurrently must not share one.
    """
    return torch.cuda.Stream(device)


class Graph:
    """One call, captured on a stream of its own and replayed on the current one."""

    def __init__(self, device: torch.device):
        self.device = device
        self.graph: Optional[torch.cuda.CUDAGraph] = None
        self.pool: Optional[tuple] = None  # its memory, which another graph may share

    @staticmethod
    def why_not(device: torch.device) -> Optional[str]:
        if device.type != "cuda":
            return f"the model is on {device.type}"
        if torch.version.hip is not None:
            return "there are no CUDA graphs on an AMD GPU"
        return None

    @staticmethod
    def place(device: torch.device) -> int:
        """The current stream: a graph is replayed on the stream for which it was captured."""
        return torch.cuda.current_stream(device).cuda_stream

    @staticmethod
    def memory(device: torch.device) -> int:
        """Bytes of the device, free or not."""
        return torch.cuda.get_device_properties(device).total_memory

    @staticmethod
    def busy() -> bool:
        """True if the current stream is already being captured."""
        return torch.cuda.is_current_stream_capturing()

    def run(self, call: Callable):
        """Runs call() on the side stream on which it will be captured, so that one-time work is
        done before."""
        with on(self.device), capturing:  # code that is loaded breaks another thread's capture
            current = torch.cuda.current_stream(self.device)
            side = _side(self.device, current.cuda_stream)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                out = call()
            current.wait_stream(side)
        return out

    def capture(self, call: Callable):
        """Captures call() without running it; returns the output that replay() will compute."""
        self.graph = torch.cuda.CUDAGraph()
        pool = self.pool = self.pool or torch.cuda.graph_pool_handle()
        with on(self.device), capturing:
            current = torch.cuda.current_stream(self.device)
            side = _side(self.device, current.cuda_stream)
            try:
                with torch.cuda.stream(current):  # which a failure does not bring back by itself
                    with _no_collection(), _graph(self.graph, side, pool):
                        return call()
            except BaseException:
                self.graph = None
                torch.cuda.synchronize()
                _forget(self.device, side, pool)
                raise

    def replay(self) -> None:
        with on(self.device):
            self.graph.replay()

    @staticmethod
    def delivery(device: torch.device, like: List[torch.Tensor]) -> "Delivery":
        return Delivery(device, like)

    @staticmethod
    def generator(device: torch.device) -> torch.Generator:
        """The generator from which torch draws random numbers by default."""
        return torch.cuda.default_generators[device.index]


class Delivery:
    """Copies tensors to the host; the host waits for these copies alone."""

    def __init__(self, device: torch.device, like: List[torch.Tensor]):
        self.device = device
        self.values = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in like]
        self.there = torch.cuda.Event()

    def send(self, tensors: List[torch.Tensor]) -> None:
        for mine, x in zip(self.values, tensors):
            mine.copy_(x, non_blocking=True)
        self.there.record(torch.cuda.current_stream(self.device))

    def wait(self) -> List[torch.Tensor]:
        self.there.synchronize()
        return self.values


@contextlib.contextmanager
def _no_collection():
    """Keeps the garbage collector still: a graph that it frees breaks a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _graph(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool):
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


def _forget(device: torch.device, side: torch.cuda.Stream, pool) -> None:
    """Clears torch's state of a failed capture: its memory pool, and its use of random numbers."""
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    except (AttributeError, RuntimeError):
        pass  # the capture came to its end, and the graph gives its memory back
    x = torch.zeros(1, device=device)
    with _graph(torch.cuda.CUDAGraph(), side, None):  # random numbers are free once one ends well
        x.zero_()
