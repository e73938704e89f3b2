"""Kernel time, host time and error of routed experts in FP8 with block scales, on Hopper.

    python benchmarks/compare_fp8_experts.py [--models 35B] [--json FILE]     on a GPU

`ours` has its weights in e4m3 with a scale for 128 x 128 values and quantises x and what the down
projection takes; `ours, bf16` is fused_experts on the same weights in bf16. `limit` is the time
that the chip needs at least: the weights of the experts that are hit at 4.28 TB/s, or 6 S H I
operations at 1979 TFLOP/s. Times are of CUDA graphs over several routings. Errors are of some
tokens against fp64 on dequantised weights: of ours, and of the formula in torch, which rounds where
transformers rounds.
"""

from functools import partial

import torch
from compare_experts import MODELS, TITLES, inputs
from compare_fp8 import dequantised, quantised_weight
from kernel_time import graph_ms, host_us
from runner import DEVICE, relative_error, run, submodule

ARGUMENTS = {
    "--models": {"nargs": "+", "choices": list(MODELS)[:4], "default": ["35B", "30B"]},
}
TOKENS, SOME = (1, 16, 64, 512, 2048, 8192), 16


def quantised(weight: torch.Tensor) -> tuple:
    """Codes and scales of [E, N, K], an expert at a time."""
    return tuple(map(torch.stack, zip(*map(quantised_weight, weight))))


def problem(model: str) -> tuple:
    """Weights in bf16; codes and scales of them."""
    E, _, H, N = MODELS[model]
    plain = [torch.empty(s, device=DEVICE, dtype=torch.bfloat16).normal_(0, s[-1] ** -0.5)
             for s in ((E, 2 * N, H), (E, H, N))]  # fmt: skip
    return plain, [t for w in plain for t in quantised(w)]


def limit_us(model: str, T: int, ids: torch.Tensor) -> float:
    _, K, H, N = MODELS[model]
    operations = 6 * T * K * H * N / 1979e12
    return 1e6 * max(operations, len(ids.unique()) * 3 * H * N / 4.28e12)


def exact(w_gate_up, s_gate_up, w_down, s_down, x, ids, top) -> torch.Tensor:
    """In fp64, [T, H]."""
    y = torch.zeros(x.shape, device=x.device, dtype=torch.float64)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ dequantised(w_gate_up[e], s_gate_up[e]).t()).chunk(2, 1)
        found = (torch.nn.functional.silu(gate) * up) @ dequantised(w_down[e], s_down[e]).t()
        y.index_add_(0, token, found * top[token, slot].double().unsqueeze(1))
    return y


@torch.no_grad()
def rows(package, options):
    call, reference = submodule("experts.ops_fp8").fp8_experts, submodule("experts.reference")
    for model in options.models:
        plain, tensors = problem(model)
        for T in TOKENS:
            args = [inputs(model, T, n) for n in range(8 if T <= 64 else 2 if T <= 512 else 1)]
            few = [x[:SOME] for x in args[0]]
            row = {"what": f"{TITLES[model]} in FP8, {T} token" + "s" * (T > 1)}
            row["limit_us"] = limit_us(model, T, args[0][1])
            y, (x, ids, top) = exact(*tensors, *few), few
            row["error"] = {
                "ours": relative_error(call(args[0][0], *tensors, *args[0][1:])[:SOME], y),
                "formula": relative_error(reference.fp8_experts_fwd(x, *tensors, ids, top), y),
            }
            bf16 = package.fused_experts
            timed = {
                "ours": [partial(call, a, *tensors, b, c) for a, b, c in args],
                "ours, bf16": [partial(bf16, a, *plain, b, c) for a, b, c in args],
            }
            row["us"] = {name: 1e3 * graph_ms(calls) for name, calls in timed.items()}
            if T <= 16:
                row["host_us"] = {name: host_us(calls[0], 50) for name, calls in timed.items()}
            yield row
        del plain, tensors, timed
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__doc__, "fp8_experts", rows, ARGUMENTS)
