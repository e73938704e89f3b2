"""The part of compare_swiglu.py that times a training step of the whole MLP: `--training`.

The contenders take turns, so that they meet the same clocks. Memory is asked for apart: asking
takes the host a tenth of a millisecond.
"""

from functools import partial

import torch
import torch.nn.functional as F
from kernel_time import memory, milliseconds
from peers import peer, warm_up
from runner import relative_error

SHAPES = [  # K, N, M: Llama-3.1-8B, Qwen3-0.6B, Qwen3.5-27B
    (4096, 14336, 8192),
    (1024, 3072, 16384),
    (5120, 17408, 8192),
]
ROUNDS = 8
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
        gradients(contenders(None, liger_mlp=True)["liger_mlp"], *tensors(K, N, M))


def tensors(K, N, M) -> tuple:
    """x, the weights and dy, bf16."""
    shapes = ((M, K, 1), (N, K, K**-0.5), (N, K, K**-0.5), (K, N, N**-0.5), (M, K, 1))
    made = [torch.randn(a, b, device="cuda") * scale for a, b, scale in shapes]
    *leaves, dy = (t.bfloat16() for t in made)
    return [leaf.requires_grad_() for leaf in leaves], dy


def gradients(function, leaves, dy, y=None):
    """Of those leaves that need one; y: function(*leaves)."""
    y = function(*leaves) if y is None else y
    return torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], dy)


def measure(package, K, N, M, liger_mlp) -> dict:
    """Of each contender ms of a step, and MiB beyond the weights: between forward and backward,
    where x is held and y, which is as large, is not yet; and at most."""
    leaves, dy = tensors(K, N, M)
    functions = contenders(package, liger_mlp)
    cases = {name: (function, leaves, dy) for name, function in functions.items()}
    frozen = [leaves[0], *(leaf.detach() for leaf in leaves[1:])]
    cases["ours, frozen weights"] = (functions["ours"], frozen, dy)
    steps = {name: partial(gradients, *case) for name, case in cases.items()}
    times = milliseconds(steps, ROUNDS, rep=100)
    row = {"K": K, "N": N, "M": M}
    for name, (function, its, _) in cases.items():
        held, peak = memory(partial(function, *its), partial(gradients, function, its, dy))
        row[name] = {"step": times[name], "held": held, "peak": peak + leaves[0].nbytes / 2**20}
    return row


def errors(package, K=1024, N=3072, M=2048) -> dict:
    """Relative errors of all gradients against fp64."""
    leaves, dy = tensors(K, N, M)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference = gradients(eager, wide, dy.double())
    found = {}
    for name, function in contenders(package).items():
        got = gradients(function, leaves, dy)
        found[name] = dict(zip(NAMES, map(relative_error, got, reference)))
    return found


def rows(package, options):
    if options.liger_mlp and not options.compiled:
        warm_up()
    for shape in SHAPES:
        yield measure(package, *shape, options.liger_mlp)
    yield {"errors": errors(package)}
