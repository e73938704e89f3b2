"""The part of compare_swiglu.py that times a training step of the whole MLP: `--training`.

The contenders take turns, six steps each a round, so that they meet the same clocks. Memory is
asked for apart: asking takes the host a tenth of a millisecond.
"""

import statistics

import torch
import torch.nn.functional as F
from kernel_time import memory
from peers import peer, warm_up
from runner import relative_error

SHAPES = [  # K, N, M: Llama-3.1-8B, Qwen3-0.6B, Qwen3.5-27B
    (4096, 14336, 8192),
    (1024, 3072, 16384),
    (5120, 17408, 8192),
]
STEPS, ROUNDS = 6, 8
NAMES = ("dx", "dw_gate", "dw_up", "dw_down")


def eager(x, w_gate, w_up, w_down):
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def contenders(package, liger_mlp=False) -> dict:
    """y [M, K] of x [M, K], w_gate and w_up [N, K] and w_down [K, N], by name.

    liger_mlp: with liger_kernel.ops.mlp, which tunes itself for long.
    """
    found = {
        "eager": eager,
        "ours": lambda *tensors: package.fused_swiglu_mlp(*tensors),
        "recompute": lambda *tensors: package.fused_swiglu_mlp(*tensors, recompute=True),
        "compile": torch.compile(eager, dynamic=False),
    }
    liger = peer("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    if liger:
        found["liger"] = lambda x, w_gate, w_up, w_down: F.linear(
            liger.apply(F.linear(x, w_gate), F.linear(x, w_up)), w_down
        )
    mlp = peer("liger_kernel.ops.mlp", "LigerMLPFunction") if liger_mlp else None
    if mlp:
        found["liger_mlp"] = lambda x, *weights: mlp.apply(x[None], *weights)[0]
    return found


def warm(options) -> None:
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


def held_and_peak(function, leaves, dy) -> dict:
    """MiB beyond the weights: between forward and backward, where x is held and y is not yet, which
    is as large; and at most."""
    held, peak = memory(lambda: function(*leaves), lambda y: y.backward(dy))
    clear(leaves)
    return {"held": held, "peak": peak + leaves[0].nbytes / 2**20}


def clear(leaves) -> None:
    for leaf in leaves:
        leaf.grad = None


def window(function, leaves, dy) -> dict:
    """ms of a step and of its backward, steps queued one after another."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(STEPS)]
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


def measure(package, K, N, M, liger_mlp) -> dict:
    leaves, dy = tensors(K, N, M)
    functions = contenders(package, liger_mlp)
    cases = {name: (function, leaves) for name, function in functions.items()}
    frozen = [leaves[0], *(leaf.detach() for leaf in leaves[1:])]
    cases["ours, frozen weights"] = (functions["ours"], frozen)
    turns = [{name: window(*case, dy) for name, case in cases.items()} for _ in range(ROUNDS + 1)]
    row = {"K": K, "N": N, "M": M}
    for name, case in cases.items():
        figures = [turn[name] for turn in turns[1:]]
        row[name] = {key: statistics.median(f[key] for f in figures) for key in figures[0]}
        row[name].update(held_and_peak(*case, dy))
    return row


def errors(package, K=1024, N=3072, M=2048) -> dict:
    """Relative errors of all gradients against fp64."""
    leaves, dy = tensors(K, N, M)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference = torch.autograd.grad(eager(*wide), wide, dy.double())
    found = {}
    for name, function in contenders(package).items():
        got = torch.autograd.grad(function(*leaves), leaves, dy)
        found[name] = dict(zip(NAMES, map(relative_error, got, reference)))
    return found


def rows(package, options):
    if options.liger_mlp and not options.compiled:
        warm_up()
    for shape in SHAPES:
        yield measure(package, *shape, options.liger_mlp)
    yield {"errors": errors(package)}
