"""Kernel time and error of `fused_swiglu` against one cuBLAS product, eager torch and Liger.

    python benchmarks/compare_swiglu.py [--quick | --rows K,M ..] [--liger-mlp] [--json FILE]
    python benchmarks/compare_swiglu.py --training      a step of the MLP; all of these on a GPU

page.py and pictures.py make tables and pictures of the records.
`gemm` is one cuBLAS product with the two weights concatenated and no gate: the same operations and
less to write than the two products, so the wall that a fused kernel races.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from kernel_time import (
    RESULTS,
    load_package,
    microseconds,
    parse_on_gpu,
    save,
    share_autotuning,
    warm_up,
)
from swiglu_training import measure_training, tune_liger_mlp

LLAMA_8B, QWEN_SMALL = (4096, 14336), (1024, 3072)
SHAPES = [(*size, M) for size in (LLAMA_8B, QWEN_SMALL) for M in (1, 64, 512, 4096, 16384)]
MORE = [
    (*size, M) for size in (LLAMA_8B, QWEN_SMALL) for M in (3, 8, 16, 128, 256, 1000, 2048, 4097)
]
MORE += [(*size, M) for size in ((4096, 11008), (1536, 8960)) for M in (1, 512, 4096)]
MORE += [(5120, 17408, M) for M in (1, 8, 512, 4096)]


def tensors(K, N, M):
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)  # [M, K]
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5 for _ in range(2)]
    return x, *weights  # [N, K] each


def calls(package, x, w_gate, w_up, liger_mlp):
    """What is timed, by name; all but gemm return z [M, N]."""
    both = torch.cat([w_gate, w_up])  # [2 N, K]
    found = {
        "gemm": lambda: F.linear(x, both),
        "eager": lambda: F.silu(F.linear(x, w_gate)) * F.linear(x, w_up),
        "ours": lambda: package.fused_swiglu(x, w_gate, w_up),
    }
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        found["liger"] = lambda: LigerSiLUMulFunction.apply(F.linear(x, w_gate), F.linear(x, w_up))
    except ImportError:
        pass
    if liger_mlp and x.shape[0] <= 512:
        from liger_kernel.ops import mlp

        found["liger_mlp"] = lambda: mlp.gemm_swiglu(x[None], w_gate, w_up, 1.0, False)[0][0]
    return found


def error(z, x, w_gate, w_up) -> float:
    """Relative error of the first 256 rows against fp64."""
    x, w_gate, w_up = x[:256].double(), w_gate.double(), w_up.double()
    ref = F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)
    return ((z[:256].double() - ref).norm() / ref.norm()).item()


def host_microseconds(call) -> float:
    """Time until an eager call returns, the queue being empty: least mean of 5 runs of 100."""
    means = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(100):
            call()
        means.append((time.perf_counter() - start) * 1e4)
        torch.cuda.synchronize()
    return min(means[1:])


def measure(options) -> None:
    package = load_package()
    torch.manual_seed(0)
    rows = []
    shapes = SHAPES if options.quick else SHAPES + MORE
    for K, N, M in shapes:
        if options.rows and (K, M) not in options.rows:
            continue
        with torch.no_grad():
            args = tensors(K, N, M)
            timed = calls(package, *args, options.liger_mlp)
            errors = {name: error(f(), *args) for name, f in timed.items() if name != "gemm"}
            row = {
                "K": K,
                "N": N,
                "M": M,
                "us": microseconds(timed, rounds=3, rep_ms=6),
                "error": errors,
            }
            row["served"] = package.implementation_of(package.fused_swiglu, *args)
            if M in (1, 512) and (K, N) == QWEN_SMALL:
                row["host_us"] = host_microseconds(timed["ours"])
        rows.append(row)
        print(line(row), flush=True)
        save(options.json, rows)


def line(row: dict) -> str:
    us, gemm = row["us"], row["us"]["gemm"]
    peers = [name for name in us if name not in ("gemm", "ours")]
    cells = [f"{row['K']}, {row['N']}", str(row["M"]), f"{us['ours']:.1f}", f"{gemm:.1f}"]
    cells += [f"{us['ours'] / gemm:.2f}"] + [f"{us['ours'] / us[name]:.2f}" for name in peers]
    cells += [f"{row['error']['ours'] / row['error']['eager']:.2f}"]
    return "| " + " | ".join(cells) + " |"


def pair(text: str) -> tuple:
    K, M = map(int, text.split(","))
    return K, M


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the rows of the first table")
    parser.add_argument("--rows", nargs="+", type=pair, help="only these, each as K,M")
    parser.add_argument("--liger-mlp", action="store_true", help="with liger_kernel.ops.mlp (slow)")
    parser.add_argument("--training", action="store_true", help="a training step of the MLP")
    parser.add_argument("--json", type=Path, help="default: in benchmarks/results/")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parse_on_gpu(parser)
    if options.warm:
        share_autotuning(*map(int, options.warm.split("/")))
        tune_liger_mlp()
        return
    name = "swiglu_training.json" if options.training else "swiglu_fwd.json"
    options.json = options.json or RESULTS / name
    if options.training:
        if options.liger_mlp:
            warm_up(__file__)
        save(options.json, measure_training(8, options.liger_mlp))
    else:
        measure(options)


if __name__ == "__main__":
    main()
