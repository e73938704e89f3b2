"""benchmarks/benchmark_*.py: what is timed beside ours does the whole of it, and gives the same."""

import importlib.util

import pytest
import torch
from conftest import ROOT, relative_error

pytest.importorskip("kernels.benchmark")


def workloads(name, *sizes):
    """The workloads of a file at sizes of a test's."""
    file = ROOT / "benchmarks" / f"benchmark_{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return type("Workloads", (module._workloads(*sizes), module.Benchmark), {})


@pytest.mark.parametrize(
    "name, sizes, size",
    [("gdn_recurrent", (1, 2), 3), ("gdn_chunk", (1, 2), 128), ("swiglu", (24, 40), 3)],
)
def test_the_reference_stands_alone(kernel, name, sizes, size):
    """It is timed without ours before it, and again and again: every time the same, from the start,
    which ours may overwrite."""
    torch.manual_seed(0)
    benchmark = workloads(name, *sizes)()
    benchmark.kernel, benchmark.device = kernel, "cpu"
    benchmark.tensors(size)
    first = benchmark.reference()
    benchmark.run()
    assert relative_error(benchmark.out, first) < 1e-5
    assert torch.equal(benchmark.reference(), first)


@pytest.mark.parametrize("name", ["gdn_recurrent", "gdn_chunk"])
def test_the_reference_reads_every_input(name):
    """An update that is skipped would not."""
    torch.manual_seed(0)
    benchmark = workloads(name, 1, 2)()
    benchmark.device = "cpu"
    benchmark.tensors(64)
    before = benchmark.reference()
    names = {"gdn_recurrent": ("q", "k", "v", "a", "b", "A_log", "dt_bias", "start"),
             "gdn_chunk": ("q", "k", "v", "g", "beta")}[name]  # fmt: skip
    for tensor in names:
        x = getattr(benchmark, tensor)
        setattr(benchmark, tensor, x.roll(1, -1))
        assert not torch.equal(benchmark.reference(), before), tensor
        setattr(benchmark, tensor, x)
