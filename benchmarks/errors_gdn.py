"""Errors of GDN prefill and of FLA's on the same inputs, against the recurrence in fp64.

    python benchmarks/errors_gdn.py [--json FILE]     on a GPU

||x - ref|| / ||ref|| of the outputs and of the final state, 1024 tokens, 2 heads of q and k, 8 of
v, head dim 128, l2norm of q and k in the call, a random initial state; root mean squares over eight
draws. A ratio above 1 is one where
we are further off than FLA (FLA_FLASH_QLA=0 and FLA_TILELANG=0 keep it to its Triton kernels).
"""

import argparse
import importlib
from pathlib import Path

import torch
import torch.nn.functional as F
from compare_gdn_backward import recurrence
from kernel_time import RESULTS, keep_fla_to_triton, load_package, parse_on_gpu, save

GATES = ("qwen", "slow", "g=0", "g=-30")
BETAS = ("random", "0", "1")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
T, H, HV, D = 1024, 2, 8, 128
SEEDS = 8  # a sequence of one repeated key has few errors, which may add up or cancel


def tensors(gates: str, beta: str, keys: str, dtype: torch.dtype, seed: int) -> tuple:
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, device="cuda")

    q, k, v = (normal(1, T, n, D).to(dtype) for n in (H, H, HV))
    if keys == "repeated":
        k = k[:, :1].expand_as(k).contiguous()
    raw = normal(1, T, HV)
    decay = torch.linspace(0.01, 16, HV, device="cuda")
    g = {
        "qwen": -decay * F.softplus(raw + 1),
        "slow": F.logsigmoid(raw + 4),
        "g=0": torch.zeros_like(raw),
        "g=-30": torch.full_like(raw, -30.0),
    }[gates]
    strength = raw.sigmoid() if beta == "random" else torch.full_like(raw, float(beta))
    return q, k, v, g, strength, 0.2 * normal(1, HV, D, D)


def functions(package) -> dict:
    """Name -> function(x) of (outputs, final state)."""
    dispatch = importlib.import_module(f"{package.__name__}.runtime.dispatch")
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def ours(folder):
        def call(x):
            with dispatch.force(folder):
                return package.chunk_gated_delta_rule(*x[:5], initial_state=x[5], **options)

        return call

    found = {"portable": ours("portable"), "hopper": ours("hopper")}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla

        found["fla"] = lambda x: fla(*x[:5], initial_state=x[5], **options)
    except ImportError:
        print("FLA is not installed: no comparison")
    return found


def errors(call, x, ref) -> list:
    """Errors of the outputs and the state; absolute where the reference is zero."""
    return [
        ((a.double() - b).norm() / (b.norm() if b.norm() > 0 else 1)).item()
        for a, b in zip(call(x), ref)
    ]


def compare(calls, case, dtype) -> dict:
    """By name the errors of o and of the state: root mean squares over the seeds."""
    found = {name: [] for name in calls}
    for seed in range(SEEDS):
        x = tensors(*case, dtype, seed)
        ref = recurrence(*(y.double() for y in x))
        for name, call in calls.items():
            if name == "hopper" and dtype == torch.float32:
                continue  # the portable kernels serve fp32
            try:
                found[name].append(errors(call, x, ref))
            except Exception as error:  # FLA refuses some
                print(f"{name} is left out: {str(error).strip().splitlines()[-1][:120]}")
    return {
        name: [(sum(e * e for e in column) / len(column)) ** 0.5 for column in zip(*rows)]
        for name, rows in found.items()
        if rows
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "gdn_chunk_errors_fla.json")
    options = parse_on_gpu(parser)
    keep_fla_to_triton()
    calls = functions(load_package())
    cases = [(g, b, "random") for g in GATES for b in BETAS]
    cases += [(g, b, "repeated") for g in ("g=0", "slow") for b in ("random", "1")]
    rows = []
    for dtype in DTYPES:
        for case in cases:
            with torch.no_grad():
                found = compare(calls, case, dtype)
            rows.append({"dtype": str(dtype)[6:], "case": case, "error": found})
            peer = found.get("fla")
            ratios = [
                f"{name} {e[0]:.2e} {e[1]:.2e}"
                + (f" ({e[0] / peer[0]:.2f} {e[1] / peer[1]:.2f})" if peer and all(peer) else "")
                for name, e in found.items()
            ]
            print(rows[-1]["dtype"], *case, "|", " | ".join(ratios), flush=True)
            save(options.json, rows)


if __name__ == "__main__":
    main()
