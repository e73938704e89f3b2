"""Kernel time, host time and error of `rms_norm` and `silu_mul` against Liger, torch and a copy.

    python benchmarks/compare_norm.py [--json FILE]     on a GPU

Eager torch is `F.rms_norm` (of x + residual), and `F.silu(gate) * up`. A copy moves as many bytes
as the call has to: every input read once, every result written once. A training step is the forward
and the gradients of x and the weight (of gate and up). Several sets of tensors take turns where one
would stay in L2.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from compare_swiglu import host_microseconds
from kernel_time import RESULTS, load_package, microseconds, parse_on_gpu, save

NORMS = [  # rows, width
    (1, 4096), (64, 4096), (2048, 4096), (8192, 2560), (8192, 4096), (8192, 5120), (8192, 8192),
    (262144, 128),
]  # fmt: skip
GATES = [(64, 14336), (8192, 14336)]
EPS, FEW = 1e-6, 64


def contenders(package, kind: str, width: int) -> dict:
    """Of tensors as inputs() makes them: what computes y."""
    if kind == "silu_mul":
        found = {"ours": package.silu_mul, "eager": lambda gate, up: F.silu(gate) * up}
    elif kind == "residual":
        found = {
            "ours": lambda x, w, r: package.rms_norm(x, w, EPS, residual=r)[0],
            "eager": lambda x, w, r: F.rms_norm(x + r, (width,), w, EPS),
        }
    else:
        found = {
            "ours": lambda x, w: package.rms_norm(x, w, EPS),
            "eager": lambda x, w: F.rms_norm(x, (width,), w, EPS),
        }
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Added
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Norm
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Gate
    except ImportError:
        return found
    found["liger"] = {
        "silu_mul": Gate.apply,
        "residual": lambda x, w, r: Added.apply(x, r, w, EPS, 0.0, "llama", False)[0],
        "norm": lambda x, w: Norm.apply(x, w, EPS, 0.0, "llama", False),
    }[kind]
    return found


def inputs(kind: str, M: int, D: int) -> list:
    x, other = torch.randn(2, M, D, device="cuda", dtype=torch.bfloat16).unbind(0)
    if kind == "silu_mul":
        return [x, other]
    weight = torch.randn(D, device="cuda", dtype=torch.bfloat16)
    return [x, weight, other] if kind == "residual" else [x, weight]


def units(kind: str, training: bool) -> int:
    """Number of tensors [M, D] that are read or written."""
    forward = {"norm": 2, "residual": 4, "silu_mul": 3}[kind]
    return forward + training * {"norm": 3, "residual": 3, "silu_mul": 5}[kind]


def in_turn(function, sets: list):
    turns = itertools.cycle(sets)
    return lambda: function(*next(turns))


def copy_of(units: int, M: int, D: int):
    """A copy that moves as many bytes as `units` tensors [M, D]."""
    half = units * M * D // 2
    count = 1 if M <= FEW else 2
    sets = [
        torch.randn(2, half, device="cuda", dtype=torch.bfloat16).unbind(0) for _ in range(count)
    ]
    return in_turn(lambda to, of: to.copy_(of), sets)


def step(function, dy):
    """The forward of leaves and their gradients, of the first two of them."""

    def run(*leaves):
        return torch.autograd.grad(function(*leaves), leaves[:2], dy)

    return run


def error(y, kind, tensors) -> float:
    wide = [t[:256].double() if t.ndim == 2 else t.double() for t in tensors]
    if kind == "silu_mul":
        ref = F.silu(wide[0]) * wide[1]
    else:
        x = wide[0] if kind == "norm" else (tensors[0] + tensors[2])[:256].double()
        ref = F.rms_norm(x, x.shape[-1:], wide[1], EPS)
    return ((y[:256].double() - ref).norm() / ref.norm()).item()


TITLES = {
    "norm": "rms_norm, {} x {}",
    "residual": "rms_norm with a residual, {} x {}",
    "silu_mul": "silu_mul, {} x {}",
}


def measure_one(package, kind: str, M: int, D: int, training: bool) -> dict:
    moved = units(kind, training) * M * D * 2
    sets = [inputs(kind, M, D) for _ in range(1 if M <= FEW else max(2, 3 * 10**8 // moved))]
    calls, row = contenders(package, kind, D), {"what": TITLES[kind].format(M, D)}
    with torch.set_grad_enabled(training):
        if training:
            row["what"] += ", training step"
            for t in itertools.chain(*sets):
                t.requires_grad_()
            dy = torch.randn_like(sets[0][0])
            timed = {name: in_turn(step(f, dy), sets) for name, f in calls.items()}
        else:
            row["error"] = {name: error(f(*sets[0]), kind, sets[0]) for name, f in calls.items()}
            timed = {name: in_turn(f, sets) for name, f in calls.items()}
            if M <= FEW:
                row["host_us"] = {name: host_microseconds(f) for name, f in timed.items()}
        timed["copy"] = copy_of(units(kind, training), M, D)
        row["us"] = microseconds(timed, rounds=2, rep_ms=3)
    return row


def measure(path: Path) -> None:
    package, rows = load_package(), []
    torch.manual_seed(0)
    for kind, M, D in (
        *(("norm", *size) for size in NORMS),
        *(("residual", *size) for size in NORMS[:5]),
        *(("silu_mul", *size) for size in GATES),
    ):
        for training in (False, True) if M > FEW else (False,):
            rows.append(measure_one(package, kind, M, D, training))
            shown = " ".join(f"{name} {t:.2f}" for name, t in rows[-1]["us"].items())
            print(rows[-1]["what"], shown, rows[-1].get("host_us", ""), flush=True)
    save(path, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "rms_norm.json")
    measure(parse_on_gpu(parser).json)
