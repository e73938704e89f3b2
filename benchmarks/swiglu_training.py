"""The part of compare_swiglu.py that times a training step of the whole MLP: `--training`.

The contenders take turns, six steps each a round, so that they meet the same clocks. Memory is
asked for apart: asking takes the host a tenth of a millisecond.
"""

import statistics

import torch
import torch.nn.functional as F
from kernel_time import load_package

SHAPES = [  # K, N, M: Llama-3.1-8B, Qwen3-0.6B, Qwen3.5-27B
    (4096, 14336, 8192),
    (1024, 3072, 16384),
    (5120, 17408, 8192),
]
STEPS = 6
NAMES = ("dx", "dw_gate", "dw_up", "dw_down")


def contenders(package, liger_mlp=False) -> dict:
    """y [M, K] of x [M, K], w_gate and w_up [N, K] and w_down [K, N], by name.

    liger_mlp: with liger_kernel.ops.mlp, which tunes itself for long.
    """

    def eager(x, w_gate, w_up, w_down):
        return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)

    def ours(*tensors):
        return package.fused_swiglu_mlp(*tensors)

    def recompute(*tensors):
        return package.fused_swiglu_mlp(*tensors, recompute=True)

    compiled = torch.compile(eager, dynamic=False)
    found = {"eager": eager, "ours": ours, "recompute": recompute, "compile": compiled}
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        def liger(x, w_gate, w_up, w_down):
            z = LigerSiLUMulFunction.apply(F.linear(x, w_gate), F.linear(x, w_up))
            return F.linear(z, w_down)

        found["liger"] = liger
        if liger_mlp:
            from liger_kernel.ops.mlp import LigerMLPFunction

            found["liger_mlp"] = lambda x, *weights: LigerMLPFunction.apply(x[None], *weights)[0]
    except ImportError:
        pass
    return found


def tune_liger_mlp() -> None:
    """Has liger_kernel.ops.mlp tune itself for all shapes."""
    for K, N, M in SHAPES:
        leaves, dy = tensors(K, N, M)
        contenders(None, liger_mlp=True)["liger_mlp"](*leaves).backward(dy)


def tensors(K, N, M) -> tuple:
    """x, the weights and dy, bf16."""
    shapes = ((M, K, 1), (N, K, K**-0.5), (N, K, K**-0.5), (K, N, N**-0.5), (M, K, 1))
    made = [torch.randn(a, b, device="cuda") * scale for a, b, scale in shapes]
    *leaves, dy = (t.bfloat16() for t in made)
    return [leaf.requires_grad_() for leaf in leaves], dy


def memory(function, leaves, dy) -> dict:
    """MiB beyond the leaves: between forward and backward, and at most."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = function(*leaves)
    held = torch.cuda.memory_allocated() - before - y.nbytes + leaves[0].nbytes
    y.backward(dy)
    del y
    peak = torch.cuda.max_memory_allocated() - before + leaves[0].nbytes
    clear(leaves)
    return {"held": held / 2**20, "peak": peak / 2**20}


def clear(leaves) -> None:
    for leaf in leaves:
        leaf.grad = None


def window(function, leaves, dy, steps) -> dict:
    """ms of a step and of its backward, steps queued one after another."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(steps)]
    for marks in events:
        clear(leaves)
        marks[0].record()
        y = function(*leaves)
        marks[1].record()
        y.backward(dy)
        marks[2].record()
        del y
    torch.cuda.synchronize()
    clear(leaves)
    return {
        "step": statistics.median(a.elapsed_time(c) for a, _, c in events[1:]),
        "backward": statistics.median(b.elapsed_time(c) for _, b, c in events[1:]),
    }


def measure_step(package, K, N, M, rounds, liger_mlp) -> dict:
    leaves, dy = tensors(K, N, M)
    functions = contenders(package, liger_mlp)
    frozen = [leaves[0], *(leaf.detach() for leaf in leaves[1:])]
    cases = {name: (function, leaves) for name, function in functions.items()}
    cases["ours, frozen weights"] = (functions["ours"], frozen)
    taken = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (function, operands) in cases.items():
            figures = window(function, operands, dy, steps=STEPS)
            if number:
                taken[name].append(figures)
    row = {"K": K, "N": N, "M": M}
    for name, figures in taken.items():
        row[name] = {key: statistics.median(f[key] for f in figures) for key in figures[0]}
        row[name].update(memory(*cases[name], dy))
    return row


def gradient_errors(package, K=1024, N=3072, M=2048) -> dict:
    """Relative errors of all gradients against fp64."""
    leaves, dy = tensors(K, N, M)
    functions = contenders(package)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference = torch.autograd.grad(functions["eager"](*wide), wide, dy.double())
    errors = {}
    for name, function in functions.items():
        got = torch.autograd.grad(function(*leaves), leaves, dy)
        pairs = zip(NAMES, got, reference)
        errors[name] = {n: ((a.double() - b).norm() / b.norm()).item() for n, a, b in pairs}
    return errors


def measure_training(rounds: int, liger_mlp: bool) -> list:
    package = load_package()
    torch.manual_seed(0)
    rows = []
    for K, N, M in SHAPES:
        rows.append(measure_step(package, K, N, M, rounds, liger_mlp))
        print(table([rows[-1]]), flush=True)
    rows.append({"errors": gradient_errors(package)})
    print(rows[-1])
    return rows


def table(rows: list) -> str:
    """The rows as Markdown: times, over Liger's, backward, memory."""
    lines = [
        "| K, N, M | | step ms | / Liger | backward ms | holds MiB | peak MiB |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        if "errors" in row:
            continue
        base = row.get("liger", row["eager"])["step"]
        for name, f in row.items():
            if name in "KNM":
                continue
            cells = (f"{row['K']}, {row['N']}, {row['M']}", name, f"{f['step']:.2f}")
            cells += (f"{f['step'] / base:.3f}", f"{f['backward']:.2f}")
            cells += (f"{f['held']:.0f}", f"{f['peak']:.0f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
