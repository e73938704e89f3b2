"""Kernel time and error of `fused_swiglu` against one cuBLAS product, eager torch and Liger.

    python benchmarks/compare_swiglu.py [--quick | --rows K,M ..] [--liger-mlp] [--json FILE]
    python benchmarks/compare_swiglu.py --training      a step of the MLP; all of these on a GPU

`gemm` is one cuBLAS product with the two weights concatenated and no gate: the same operations and
less to write than the two products, so the wall that a fused kernel races.
"""

import swiglu_training
import torch
import torch.nn.functional as F
from kernel_time import host_us, microseconds
from peers import peer
from runner import relative_error, run

LLAMA_8B, QWEN_SMALL = (4096, 14336), (1024, 3072)
SHAPES = [(*size, M) for size in (LLAMA_8B, QWEN_SMALL) for M in (1, 64, 512, 4096, 16384)]
MORE = [
    (*size, M) for size in (LLAMA_8B, QWEN_SMALL) for M in (3, 8, 16, 128, 256, 1000, 2048, 4097)
]
MORE += [(*size, M) for size in ((4096, 11008), (1536, 8960)) for M in (1, 512, 4096)]
MORE += [(5120, 17408, M) for M in (1, 8, 512, 4096)]


def pair(text: str) -> tuple:
    K, M = map(int, text.split(","))
    return K, M


ARGUMENTS = {
    "--quick": {"action": "store_true", "help": "only the rows of the first table"},
    "--rows": {"nargs": "+", "type": pair, "help": "only these, each as K,M"},
    "--liger-mlp": {"action": "store_true", "help": "with liger_kernel.ops.mlp (slow)"},
    "--training": {"action": "store_true", "help": "a training step of the MLP"},
}


def calls(package, liger, liger_mlp, x, w_gate, w_up) -> dict:
    """What is timed, by name; all but gemm return z [M, N]."""
    both = torch.cat([w_gate, w_up])  # [2 N, K]
    found = {
        "gemm": lambda: F.linear(x, both),
        "eager": lambda: F.silu(F.linear(x, w_gate)) * F.linear(x, w_up),
        "ours": lambda: package.fused_swiglu(x, w_gate, w_up),
    }
    if liger:
        found["liger"] = lambda: liger.apply(F.linear(x, w_gate), F.linear(x, w_up))
    if liger_mlp and x.shape[0] <= 512:
        found["liger_mlp"] = lambda: liger_mlp(x[None], w_gate, w_up, 1.0, False)[0][0]
    return found


@torch.no_grad()
def measure(package, K, N, M, *liger) -> dict:
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)  # [M, K]
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5 for _ in range(2)]
    timed = calls(package, *liger, x, *weights)
    few, wide = x[:256].double(), [w.double() for w in weights]
    ref = F.silu(F.linear(few, wide[0])) * F.linear(few, wide[1])
    errors = {n: relative_error(call()[:256], ref) for n, call in timed.items() if n != "gemm"}
    row = {"K": K, "N": N, "M": M, "us": microseconds(timed, rounds=3, rep_ms=6), "error": errors}
    row["served"] = package.implementation_of(package.fused_swiglu, x, *weights)
    if M in (1, 512) and (K, N) == QWEN_SMALL:
        row["host_us"] = host_us(timed["ours"])
    return row


def rows(package, options):
    if options.training:
        yield from swiglu_training.rows(package, options)
        return
    liger = peer("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    liger_mlp = peer("liger_kernel.ops.mlp", "gemm_swiglu") if options.liger_mlp else None
    for K, N, M in SHAPES if options.quick else SHAPES + MORE:
        if not options.rows or (K, M) in options.rows:
            yield measure(package, K, N, M, liger, liger_mlp)


def record(options) -> str:
    return "swiglu_training" if options.training else "swiglu_fwd"


if __name__ == "__main__":
    run(__doc__, record, rows, ARGUMENTS, swiglu_training.warm)
