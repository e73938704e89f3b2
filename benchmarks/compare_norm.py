"""Kernel time, host time and error of `rms_norm` and `silu_mul` against Liger, torch and a copy.

    python benchmarks/compare_norm.py [--json FILE]     on a GPU

Eager torch is `F.rms_norm` (of x + residual), and `F.silu(gate) * up`. A copy moves as many bytes
as the call has to: every input read once, every result written once. A training step is the forward
and the gradients of x and the weight (of gate and up). Several sets of tensors take turns where one
would stay in L2.
"""

import itertools
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from kernel_time import host_us, microseconds
from peers import peer
from runner import relative_error, run

EPS, FEW = 1e-6, 64
SIZES = [  # rows, width
    (1, 4096), (64, 4096), (2048, 4096), (8192, 2560), (8192, 4096), (8192, 5120), (8192, 8192),
    (262144, 128),
]  # fmt: skip


class Kind(NamedTuple):
    """One operation: its sizes, the tensors [M, D] that it and its gradient move, and the calls
    of x (gate), w and r (up)."""

    title: str
    sizes: list
    moved: tuple
    ours: Callable
    eager: Callable
    liger: Callable


def kinds(package) -> dict:
    added = peer("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    norm = peer("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    gate = peer("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    rms_norm = package.rms_norm
    return {
        "norm": Kind(
            "rms_norm, {} x {}", SIZES, (2, 3),
            lambda x, w: rms_norm(x, w, EPS),
            lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS),
            norm and (lambda x, w: norm.apply(x, w, EPS, 0.0, "llama", False)),
        ),
        "residual": Kind(
            "rms_norm with a residual, {} x {}", SIZES[:5], (4, 3),
            lambda x, w, r: rms_norm(x, w, EPS, residual=r)[0],
            lambda x, w, r: F.rms_norm(x + r, x.shape[-1:], w, EPS),
            added and (lambda x, w, r: added.apply(x, r, w, EPS, 0.0, "llama", False)[0]),
        ),
        "silu_mul": Kind(
            "silu_mul, {} x {}", [(64, 14336), (8192, 14336)], (3, 5),
            package.silu_mul, lambda gate, up: F.silu(gate) * up, gate and gate.apply,
        ),
    }  # fmt: skip


def inputs(kind: str, M: int, D: int) -> list:
    x, other = torch.randn(2, M, D, device="cuda", dtype=torch.bfloat16).unbind(0)
    if kind == "silu_mul":
        return [x, other]
    weight = torch.randn(D, device="cuda", dtype=torch.bfloat16)
    return [x, weight, other] if kind == "residual" else [x, weight]


def in_turn(function, sets: list):
    turns = itertools.cycle(sets)
    return lambda: function(*next(turns))


def copy_of(bytes_moved: int, count: int):
    shape = (2, bytes_moved // 4)
    sets = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).unbind(0) for _ in range(count)]
    return in_turn(lambda to, of: to.copy_(of), sets)


def step(function, dy):
    """The forward of leaves and their gradients, of the first two of them."""

    def run(*leaves):
        return torch.autograd.grad(function(*leaves), leaves[:2], dy)

    return run


def exact(of: Kind, tensors: list) -> torch.Tensor:
    """The first rows in fp64, of x + residual as bf16 has it."""
    x, w, *r = tensors
    if of.title.startswith("silu"):
        return of.eager(x[:256].double(), w[:256].double())
    x = x + r[0] if r else x
    return F.rms_norm(x[:256].double(), x.shape[-1:], w.double(), EPS)


def measure(of: Kind, kind: str, M: int, D: int, training: bool) -> dict:
    moved = (of.moved[0] + training * of.moved[1]) * M * D * 2
    sets = [inputs(kind, M, D) for _ in range(1 if M <= FEW else max(2, 3 * 10**8 // moved))]
    calls = {"ours": of.ours, "eager": of.eager, **({"liger": of.liger} if of.liger else {})}
    row = {"what": of.title.format(M, D) + ", training step" * training}
    with torch.set_grad_enabled(training):
        if training:
            for t in itertools.chain(*sets):
                t.requires_grad_()
            dy = torch.randn_like(sets[0][0])
            calls = {name: step(f, dy) for name, f in calls.items()}
        else:
            ref = exact(of, sets[0])
            row["error"] = {n: relative_error(f(*sets[0])[:256], ref) for n, f in calls.items()}
        timed = {name: in_turn(f, sets) for name, f in calls.items()}
        if M <= FEW:
            row["host_us"] = {name: host_us(f) for name, f in timed.items()}
        timed["copy"] = copy_of(moved, 1 if M <= FEW else 2)
        row["us"] = microseconds(timed, rounds=2, rep_ms=3)
    return row


def rows(package, options):
    for kind, of in kinds(package).items():
        for M, D in of.sizes:
            for training in (False, True) if M > FEW else (False,):
                yield measure(of, kind, M, D, training)


if __name__ == "__main__":
    run(__doc__, "rms_norm", rows)
