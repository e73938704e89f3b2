"""benchmarks/: what is timed beside ours does the whole of it, and gives the same."""

import argparse
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import types

import bench
import in_tree
import pytest
import torch
from conftest import ROOT, relative_error

pytest.importorskip("kernels.benchmark")


def script(name):
    """A file of benchmarks/ as a module."""
    file = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def workloads(name, **sizes):
    """Those of benchmark.py at sizes of a test's."""
    module = script("benchmark")
    return type("Workloads", (getattr(module, name), module.Benchmark), sizes)


@pytest.mark.parametrize(
    "name, sizes, size",
    [
        ("_Decode", {"HEADS": (1, 2)}, 3),
        ("_Prefill", {"HEADS": (1, 2)}, 128),
        ("_Swiglu", {"K": 24, "N": 40}, 3),
        ("_Experts", {"E": 6, "K": 2, "H": 24, "N": 40}, 3),
    ],
)
def test_the_reference_stands_alone(kernel, name, sizes, size):
    """It is timed without ours before it, and again and again: every time the same, from the start,
    which ours may overwrite."""
    torch.manual_seed(0)
    benchmark = workloads(name, **sizes)()
    benchmark.kernel, benchmark.device = kernel, "cpu"
    benchmark.tensors(size)
    first = benchmark.reference()
    benchmark.run()
    assert relative_error(benchmark.out, first) < 1e-5
    assert torch.equal(benchmark.reference(), first)


INPUTS = {
    "_Decode": ("q", "k", "v", "a", "b", "A_log", "dt_bias", "start"),
    "_Prefill": ("q", "k", "v", "g", "beta"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_reference_reads_every_input(name):
    """An update that is skipped would not."""
    torch.manual_seed(0)
    benchmark = workloads(name, HEADS=(1, 2))()
    benchmark.device = "cpu"
    benchmark.tensors(64)
    before = benchmark.reference()
    for tensor in INPUTS[name]:
        x = getattr(benchmark, tensor)
        setattr(benchmark, tensor, x.roll(1, -1))
        assert not torch.equal(benchmark.reference(), before), tensor
        setattr(benchmark, tensor, x)


@pytest.fixture
def run_on_cpu(monkeypatch, tmp_path):
    """Runs a comparison by its command line where there is no GPU, with stand-ins for its clocks,
    and returns the rows of the record that it wrote."""

    def run(name, *words, **members):
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        module, record = script(name), tmp_path / f"{name}.json"
        runner = sys.modules["runner"]
        monkeypatch.setattr(runner, "machine", dict)
        monkeypatch.setattr(runner, "parse_on_gpu", argparse.ArgumentParser.parse_args)
        for member, value in {"DEVICE": "cpu", **members}.items():
            monkeypatch.setattr(module, member, value)
        monkeypatch.setattr(sys, "argv", [name, *words, "--json", str(record)])
        module.main()
        return module, json.loads(record.read_text())["rows"]

    return run


def stub_sonicmoe(kernel):
    """Computes with our kernels what SonicMoE's function would compute from the same arguments."""

    def inputs(x, top, token, ids, w1, b1, w2, b2, *, E, concat_layout, **more):
        assert concat_layout and b1 is None and b2 is None and E == w2.shape[-1]
        assert token.dtype == ids.dtype == torch.int32 and len(token) == len(ids) == len(top)
        shape = (len(x), -1)
        weights = (w.permute(2, 0, 1) for w in (w1, w2))
        return kernel.fused_experts(x, *weights, ids.view(shape), top.view(shape)), None

    enums = types.SimpleNamespace(ActivationType=types.SimpleNamespace(SWIGLU=None))
    return types.SimpleNamespace(moe_general_routing_inputs=inputs), enums


@pytest.mark.parametrize("sonic", [False, True])
def test_compare_experts(run_on_cpu, kernel, monkeypatch, sonic):
    pytest.importorskip("transformers.integrations.moe")
    for name, module in zip(("sonicmoe", "sonicmoe.enums"), stub_sonicmoe(kernel)):
        monkeypatch.setitem(sys.modules, name, module)

    def timed(calls):
        return 0.5 if [call() for call in ([calls] if callable(calls) else calls)] else None

    def host(call, calls):
        return timed(call)

    def memory(forward, backward):
        backward(forward())
        return 2.0, 3.0

    module, rows = run_on_cpu(
        "compare_experts", "--models", "Next", "--tokens", "1", "9", "--training", "5",
        *["--sonicmoe"] * sonic, MODELS={"Next": (6, 2, 16, 8)}, graph_ms=timed, event_ms=timed,
        host_us=host, memory=memory, seconds=timed,
    )  # fmt: skip
    names = {"ours", "grouped_mm", *["sonicmoe"] * sonic}
    how = ", eager" if sonic else ""
    title = module.TITLES["Next"]
    labels = [f"{title}, 1 token{how}", f"{title}, 9 tokens{how}"]
    assert [row["what"] for row in rows] == [*labels, f"{title}, 5 tokens, training step"]
    assert all(row["us"].keys() == names for row in rows[:2])
    assert rows[2]["us"].keys() == names | {"ours, recompute=True"}
    assert all(error < 0.02 for row in rows[:2] for error in row["error"].values())
    page = script("page")
    record = {"name": "experts_sonicmoe", "command": "", "gpu": "a GPU", "torch": "", "date": ""}
    assert title in "".join(page.section({**record, "rows": rows}))


def test_compare_router(run_on_cpu):
    def microseconds(calls):
        found = {name: call() for name, call in calls.items()}
        assert torch.allclose(found["ours"][0].float(), found["torch"][0].float(), atol=1e-2)
        return dict.fromkeys(found, 1.0)

    _, rows = run_on_cpu("compare_router", "--cases", "8:2", "32:4", microseconds=microseconds)
    assert [row["what"] for row in rows][:2] == [
        "2 of 8 experts, 1 token",
        "2 of 8 experts, 64 tokens",
    ]
    assert len(rows) == 6


@pytest.mark.parametrize("mode", ["--loop", "--replay"])
def test_compare_generate(run_on_cpu, monkeypatch, mode):
    """A token is the difference of a long and a short call, by their number."""
    pytest.importorskip("transformers")
    from tiny_models import BASE

    def seconds(call):  # 3 ms for a prompt, 2 for a token
        return 3e-3 + 2e-3 * (call().shape[1] - 7)

    models = {"tiny": ("A Llama", "llama", {**BASE, "vocab_size": 1000})}
    _, rows = run_on_cpu(
        "compare_generate", mode, "--cases", "tiny:2", MODELS=models, PROMPT=7, NEW=9, SHORT=4,
        TURNS=2, seconds=seconds, graph_us=lambda model, batch: 1500.0,
    )  # fmt: skip
    (row,) = rows
    assert row["what"] == "A Llama, batch 2, a token"
    others = {"ours, waiting", "graph"} if mode == "--loop" else {"ours, replay"}
    assert row["us"].keys() == row["turns"].keys() == {"ours", *others}
    for way, us in row["us"].items():
        assert us == pytest.approx(1500 if way == "graph" else 2000)
        assert len(row["turns"][way]) == 2


def test_one_line_where_a_script_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["compare_norm.py"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("runner").run("Compares norms.", "rms_norm", rows=None)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("compare_norm.py: needs a GPU")


def test_every_comparison_needs_a_gpu():
    """But that of several processes, which runs on a CPU, too."""
    files = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("compare_*.py")}
    assert len(files) > 10
    asks = re.compile(r"\brun(\(|,)\s*__doc__|parse_on_gpu\(")
    assert [n for n, text in files.items() if not asks.search(text)] == ["compare_parallel.py"]


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.path.insert(0, "tools")
runpy.run_path("tools/bench.py", run_name="__main__")
"""


def test_bench_says_what_it_does_before_it_does_anything():
    """The first line is printed even if torch cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_TORCH]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1 and "import of torch halted" in ran.stderr
    (line,) = ran.stdout.splitlines()
    assert line.startswith("bench: times benchmarks/benchmark*.py beside plain torch")


def test_bench_ends_in_one_line_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out.count("\n") == err.count("\n") == 1
    assert err.startswith("bench: needs a GPU, and torch")


def test_bench_interrupted(monkeypatch, capsys):
    def interrupt(parser, options):
        raise KeyboardInterrupt

    monkeypatch.setattr(in_tree, "need_gpu", interrupt)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    assert bench.main() == 130
    assert capsys.readouterr().out.endswith("\nbench: interrupted\n")


WORKLOADS = """
from kernels.benchmark import Benchmark

class Sums(Benchmark):
    seed = 0

    def setup(self):
        self.x = {x}

    def benchmark_first(self):
        self.out = self.x + 1

    def benchmark_second(self):
        self.out = self.x + 1

    def verify_first(self):
        return self.x + 1

    def verify_second(self):
        return self.x + {second}
"""


@pytest.mark.parametrize("second", [1, 2])
def test_bench_shows_each_result_as_it_comes(monkeypatch, capsys, tmp_path, repository, second):
    """The one after a wrong result as well."""
    from kernels.cli import benchmark

    text = WORKLOADS.replace("{x}", "__import__('torch').ones(3)")
    (tmp_path / "benchmark.py").write_text(text.replace("{second}", str(second)))
    monkeypatch.setattr(in_tree, "ROOT", repository)
    monkeypatch.setattr(
        benchmark, "discover_benchmark_scripts", lambda *a: [tmp_path / "benchmark.py"] * 2
    )
    seen, time_one = [], benchmark.run_benchmark_class

    def watched(*arguments):
        seen.append(capsys.readouterr().out)
        return time_one(*arguments)

    monkeypatch.setattr(benchmark, "run_benchmark_class", watched)
    code = bench.run(types.SimpleNamespace(iterations=2, warmup=1))
    seen.append(capsys.readouterr().out)
    assert seen[0].startswith("bench: 4 workloads on ") and seen[0].count("\n") == 1
    names = ("1 of 4  Sums first", "2 of 4  Sums second", "3 of 4  Sums first")
    assert all(name in line for name, line in zip(names, seen))
    assert " ms   reference " in seen[1] and "speed-up" in seen[3]
    said = seen[2].partition("\n")[0]
    assert ("Verification failed for second" in said) == (second == 2)
    assert code == second - 1 and f"{6 - 2 * second} of 4 are right" in seen[4]


def test_bench_times_every_workload():
    from kernels.cli import benchmark

    scripts = benchmark.discover_benchmark_scripts(".", ROOT)
    classes = [c for file in scripts for c in benchmark.discover_benchmark_classes(file, ROOT)]
    found = bench.workloads(classes)
    assert len(found) == len(dict(found)) >= 2 * len(classes) >= 16
    for name, kind in found:
        left = [n for n in dir(kind) if n.startswith("benchmark_") and callable(getattr(kind, n))]
        assert left == [f"benchmark_{name.split()[1]}"] and name.split()[0] == kind.__name__
        assert hasattr(kind, left[0].replace("benchmark", "verify"))  # `show` wants its time


def test_trials_of_a_tuner_are_shortened(monkeypatch):
    """peers.shorten_autotuning: by triton's clock, for tuners that are there already."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(Autotuner, "do_bench", Autotuner.__dict__["do_bench"])  # back at the end
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **how: (call, how))
    tuner = object.__new__(Autotuner)
    script("peers").shorten_autotuning(2, 7)
    call, how = tuner.do_bench("a trial", quantiles=(0.5, 0.2))
    assert (call, how) == ("a trial", {"quantiles": (0.5, 0.2), "warmup": 2, "rep": 7})


def test_a_patched_module_is_not_timed_as_ours(kernel, monkeypatch):
    """A function that no file holds, in the place of one that a layer calls."""
    tiny_models = pytest.importorskip("tiny_models")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runner = importlib.import_module("runner")
    model = tiny_models.random_model("llama")
    modeling = sys.modules[type(model).__module__]
    with kernel.use_reference():
        runner.kernelized(kernel, model)
        kernel.restore(model)
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda *arguments: arguments)
        with pytest.raises(RuntimeError, match="self_attn.*apply_rotary_pos_emb, which is patched"):
            runner.kernelized(kernel, model)
