"""Time, error and memory of `fused_experts` against transformers' grouped_mm experts.

    python benchmarks/compare_experts.py [--models 35B 30B] [--tokens 1 64] [--json FILE]   on a GPU
    python benchmarks/compare_experts.py --first-call       a new process, nothing compiled before
    python benchmarks/compare_experts.py --render benchmarks/results/experts.json

`limit` is the time that the chip needs at least: 6 S H I operations at 720 TFLOP/s or the weights
of the experts that are hit at 4.28 TB/s, whichever is more (a training step: three times that). A
forward is timed by CUDA graph over several routings, so that the weights of a few experts do not
stay in L2; a training step by events, with --sonicmoe also transformers' "sonicmoe", which needs
`kernels` and the Hub and compiles for minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from kernel_time import RESULTS, load_package, save

MODELS = {  # experts, slots of a token, model width, hidden width
    "35B": (256, 8, 2048, 512),  # Qwen3.5-35B-A3B
    "Next": (512, 10, 2048, 512),  # Qwen3-Next-80B
    "30B": (128, 8, 2048, 768),  # Qwen3-30B-A3B
    "Mixtral": (8, 2, 4096, 14336),  # Mixtral-8x7B
}
TOKENS = (1, 16, 64, 512, 8192, 32768)
STEPS = 5


class Module(torch.nn.Module):
    """What transformers' implementations read of a module of experts."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    has_post_expert_norm, _is_expert_parallel = False, False

    def __init__(self, w_gate_up, w_down):
        super().__init__()
        self.num_experts, self.act_fn = w_down.shape[0], F.silu
        self.gate_up_proj, self.down_proj = w_gate_up, w_down

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def weights_of(model, requires_grad=False) -> list:
    E, _, H, N = MODELS[model]
    shapes = ((E, 2 * N, H), (E, H, N))
    made = [torch.empty(s, device="cuda", dtype=torch.bfloat16).normal_(0, s[-1] ** -0.5)
            for s in shapes]  # fmt: skip
    return [torch.nn.Parameter(w, requires_grad=requires_grad) for w in made]


def inputs(model, T, seed=0) -> tuple:
    """x [T, H], ids and weights [T, K] of a random router."""
    E, K, H, _ = MODELS[model]
    random = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(T, H, device="cuda", generator=random).bfloat16()
    top, ids = torch.rand(T, E, device="cuda", generator=random).topk(K, -1)
    return x, ids, (top / top.sum(-1, keepdim=True)).bfloat16()


def contenders(package, weights, sonic=False) -> dict:
    """out [T, H] of x, ids, weights of the slots; by name."""
    from transformers.integrations import moe

    module = Module(*weights)
    found = {
        "ours": lambda x, ids, top: package.fused_experts(x, *weights, ids, top),
        "grouped_mm": lambda *args: moe.grouped_mm_experts_forward(module, *args),
    }
    if sonic:
        found["sonicmoe"] = lambda *args: moe.sonicmoe_experts_forward(module, *args)
    return found


def limit_ms(model, T, ids) -> float:
    _, K, H, N = MODELS[model]
    flops = 6 * T * K * H * N / 720e12
    return 1e3 * max(flops, len(ids.unique()) * 3 * H * N * 2 / 4.28e12)


def error(out, x, ids, top, w_gate_up, w_down) -> float:
    """Relative error of up to 12 tokens against fp64."""
    tokens = torch.linspace(0, x.shape[0] - 1, min(12, x.shape[0])).long().unique().tolist()
    ref = torch.zeros(len(tokens), x.shape[1], device="cuda", dtype=torch.float64)
    for i, t in enumerate(tokens):
        for e, weight in zip(ids[t].tolist(), top[t].double()):
            gate, up = (w_gate_up[e].double() @ x[t].double()).chunk(2)
            ref[i] += weight * (w_down[e].double() @ (F.silu(gate) * up))
    return ((out[tokens].double() - ref).norm() / ref.norm()).item()


def graph_ms(calls) -> float:
    """Milliseconds a call by replaying one graph of all calls: the median of replays for 60 ms."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times, began = [], time.time()
    while len(times) < 4 or (time.time() - began < 0.06 and len(times) < 200):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / len(calls))
    return statistics.median(times[1:])


def host_us(call) -> float:
    """Time until an eager call returns, the queue being empty: least mean of 5 runs of 50."""
    means = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(50):
            call()
        means.append((time.perf_counter() - start) * 2e4)
        torch.cuda.synchronize()
    return min(means[1:])


def measure_forward(package, model, T, weights) -> dict:
    count = 8 if T <= 64 else 2 if T <= 512 else 1
    args = [inputs(model, T, seed) for seed in range(count)]
    row = {
        "model": model,
        "T": T,
        "limit_ms": limit_ms(model, T, args[0][1]),
        "ms": {},
        "error": {},
    }
    with torch.no_grad():
        for name, call in contenders(package, weights).items():
            row["error"][name] = error(call(*args[0]), *args[0], *weights)
            row["ms"][name] = graph_ms([lambda a=a, call=call: call(*a) for a in args])
            if T == 1:
                row.setdefault("host_us", {})[name] = host_us(lambda c=call: c(*args[0]))
    row["served"] = package.implementation_of(
        package.fused_experts, args[0][0], *weights, *args[0][1:]
    )
    return row


def measure_training(package, model, T, sonic=False) -> dict:
    """ms of a step with the gradients of x, both weights and the routing weights, and MiB."""
    weights = weights_of(model, requires_grad=True)
    x, ids, top = inputs(model, T)
    x, top, dout = x.requires_grad_(), top.requires_grad_(), torch.randn_like(x)
    row = {"model": model, "T": T, "training": True, "limit_ms": 3 * limit_ms(model, T, ids)}
    row.update(ms={}, held_mib={}, peak_mib={})
    calls = contenders(package, weights, sonic)
    calls["recompute"] = lambda x, ids, top: package.fused_experts(
        x, *weights, ids, top, recompute=True
    )
    leaves = [x, *weights]
    for name, call in calls.items():
        args = [x, ids, top]
        times = []
        for _ in range(STEPS):
            for leaf in (*leaves, top):
                leaf.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            out = call(*args)
            held = torch.cuda.memory_allocated() - before - out.nbytes
            out.backward(dout)
            marks[1].record()
            torch.cuda.synchronize()
            times.append(marks[0].elapsed_time(marks[1]))
            peak = torch.cuda.max_memory_allocated() - before
            del out
        row["ms"][name] = statistics.median(times[1:])
        row["held_mib"][name], row["peak_mib"][name] = held / 2**20, peak / 2**20
    return row


def measure(options) -> None:
    package = load_package()
    torch.manual_seed(0)
    rows, began = [], time.time()
    for model in options.models:
        weights = weights_of(model)
        for T in options.tokens:
            if time.time() - began < options.seconds:
                rows.append(measure_forward(package, model, T, weights))
                print(line(rows[-1]), flush=True)
        del weights
        for T in options.training:
            if time.time() - began < options.seconds:
                torch.cuda.empty_cache()
                rows.append(measure_training(package, model, T, options.sonicmoe))
                print(line(rows[-1]), flush=True)
        save(options.json, rows)
    if options.first_call:
        save(options.json, rows, first_call_s=first_calls())


def first_calls() -> dict:
    """Seconds of the first call of a new process with empty caches, and of calls after it."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--call-once"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def call_once() -> None:
    """Prints seconds of calls at 35B's sizes in this process: decoding, then other numbers of
    tokens and other routings."""
    package, weights, found = load_package(), weights_of("35B"), {}
    torch.cuda.synchronize()
    with torch.no_grad():
        for name, T, seed in (("T=1", 1, 0), ("T=1, other routing", 1, 1), ("T=2", 2, 0),
                              ("T=8192", 8192, 0), ("T=8000", 8000, 1)):  # fmt: skip
            x, ids, top = inputs("35B", T, seed)
            torch.cuda.synchronize()
            start = time.perf_counter()
            package.fused_experts(x, *weights, ids, top)
            torch.cuda.synchronize()
            found[name] = round(time.perf_counter() - start, 4)
    print(json.dumps(found))


def line(row: dict) -> str:
    ms, ours = row["ms"], row["ms"]["ours"]
    cells = [row["model"], str(row["T"]), "step" if row.get("training") else "forward"]
    cells += [f"{row['limit_ms']:.4f}", f"{ours:.4f}", f"{ours / row['limit_ms']:.2f}"]
    cells += [f"{ms['grouped_mm'] / ours:.2f}"]
    if row.get("training"):
        held = row["held_mib"]
        cells += [f"{held['ours']:.0f} / {held['grouped_mm']:.0f}"]
        cells += [f"recompute {ms['recompute']:.3f} ms, {held['recompute']:.0f} MiB"]
    else:
        cells += [f"{row['error']['ours'] / row['error']['grouped_mm']:.2f}"]
        host = row.get("host_us")
        cells += [f"host {host['ours']:.1f} us, {host['grouped_mm']:.1f}" if host else ""]
    return "| " + " | ".join(cells) + " |"


def render(path: Path) -> None:
    """The table as Markdown on the screen, the picture beside the record."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    record = json.loads(path.read_text())
    rows = record["rows"]
    head = ["model", "tokens", "", "limit ms", "ours ms", "ours / limit", "speed-up of grouped_mm"]
    head += ["error / grouped_mm's, or MiB held", ""]
    print(f"{record['gpu']}, torch {record['torch']}, Triton {record['triton']}, {record['date']}")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    print("\n".join(line(row) for row in rows))
    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    for model in MODELS:
        mine = [r for r in rows if r["model"] == model and not r.get("training")]
        if mine:
            speed = [r["ms"]["grouped_mm"] / r["ms"]["ours"] for r in mine]
            axis.plot([r["T"] for r in mine], speed, marker="o", label=model)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set(xscale="log", xlabel="tokens", ylabel="speed-up over grouped_mm", ylim=(0, None))
    axis.set_title(f"Routed experts forward, bf16, {record['gpu']}, {record['date']}", fontsize=10)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--training", nargs="*", type=int, default=(8192, 32768))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after so many")
    parser.add_argument("--first-call", action="store_true", help="a new process, too")
    parser.add_argument("--json", type=Path, default=RESULTS / "experts.json")
    parser.add_argument("--render", type=Path, help="only render this record")
    parser.add_argument("--sonicmoe", action="store_true", help="time its training step, too")
    parser.add_argument("--call-once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call_once:
        call_once()
    elif options.render:
        render(options.render)
    else:
        measure(options)


if __name__ == "__main__":
    main()
