"""Seconds of first calls in a fresh process with an empty Triton cache, imports apart.

    python benchmarks/first_call.py [--json FILE]     on a GPU

Each case runs in a process of its own: a call, a repeat of it, and a call of another shape of the
same model, which should compile nothing.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from compare_gdn import tensors
from kernel_time import seconds
from runner import RESULTS, load_package, parse_on_gpu, save


def swiglu(package, M):
    x, *weights = (
        torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (M, 14336, 14336)
    )
    return lambda: package.fused_swiglu(x, *weights)


def prefill(package, T, packed=False):
    q, k, v, g, beta, _ = tensors(1, T, 16, 32, "slow")
    cu_seqlens = torch.tensor([0, T // 3, T], device="cuda") if packed else None
    return lambda: package.chunk_gated_delta_rule(
        q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def training(package, T):
    *qkv, g, beta, _ = tensors(1, T, 16, 32, "slow")
    leaves = [x.clone().requires_grad_() for x in qkv]

    def step():
        o, _ = package.chunk_gated_delta_rule(*leaves, g, beta, use_qk_l2norm_in_kernel=True)
        o.sum().backward()

    return step


CASES = {  # name -> (implementation, maker, sizes of the first call and of another)
    "swiglu, 1 token": (None, swiglu, (1, 8)),
    "swiglu, 4096 tokens": (None, swiglu, (4096, 8192)),
    "prefill, hopper": ("hopper", prefill, (2048, 3000)),
    "prefill, portable": ("portable", prefill, (2048, 3000)),
    "prefill, packed": (None, lambda p, T: prefill(p, T, True), (2048, 3000)),
    "prefill and gradient": (None, training, (2048, 3000)),
}


def alone(name: str) -> dict:
    implementation, make, (first, other) = CASES[name]
    package = load_package()
    dispatch = sys.modules[f"{package.__name__}.runtime.dispatch"]
    torch.randn(8, 8, device="cuda").bfloat16() @ torch.randn(8, 8, device="cuda").bfloat16()
    calls = make(package, first), make(package, other)
    with dispatch.force(implementation) if implementation else contextlib.nullcontext():
        times = [seconds(calls[0]), seconds(calls[0]), seconds(calls[1])]
    return dict(zip(("first", "again", "another shape"), (round(t, 4) for t in times)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "first_call.json")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parse_on_gpu(parser)
    if options.alone:
        print(json.dumps(alone(options.alone)))
        return
    rows = []
    for name in CASES:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            command = [sys.executable, __file__, "--alone", name]
            out = subprocess.run(command, env=environment, capture_output=True, text=True)
        if out.returncode:
            print(f"{name} is left out: {out.stderr.strip().splitlines()[-1][:200]}")
            continue
        rows.append({"what": name, "seconds": json.loads(out.stdout.splitlines()[-1])})
        print(rows[-1], flush=True)
        save(options.json, rows)


if __name__ == "__main__":
    main()
