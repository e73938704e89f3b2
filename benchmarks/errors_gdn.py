"""Errors of GDN prefill and of FLA's on the same inputs, against the recurrence in fp64.

    python benchmarks/errors_gdn.py [--json FILE]     on a GPU

||x - ref|| / ||ref|| of the outputs and of the final state, 1024 tokens, 2 heads of q and k, 8 of
v, head dim 128, l2norm of q and k in the call, a random initial state; root mean squares over eight
draws. FLA_FLASH_QLA=0 and FLA_TILELANG=0 keep FLA to its Triton kernels.
"""

from functools import partial

import torch
import torch.nn.functional as F
from compare_gdn_backward import OPTIONS, recurrence
from peers import keep_fla_to_triton, peer, working
from runner import over_draws, relative_error, run, submodule

GATES = ("qwen", "slow", "g=0", "g=-30")
BETAS = ("random", "0", "1")
CASES = [(g, b, "random") for g in GATES for b in BETAS]
CASES += [(g, b, "repeated") for g in ("g=0", "slow") for b in ("random", "1")]
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
    dispatch = submodule("runtime.dispatch")

    def ours(folder, x):
        with dispatch.force(folder):
            return package.chunk_gated_delta_rule(*x[:5], initial_state=x[5], **OPTIONS)

    found = {folder: partial(ours, folder) for folder in ("portable", "hopper")}
    fla = peer("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    if fla:
        found["fla"] = lambda x: fla(*x[:5], initial_state=x[5], **OPTIONS)
    return found


@torch.no_grad()
def compare(package, ways: dict, case: tuple, dtype) -> dict:
    """By name the errors of o and of the state: root mean squares over the seeds. The portable
    kernels serve fp32."""
    found = {name: [] for name in ways if name != "hopper" or dtype != torch.float32}
    for seed in range(SEEDS):
        x = tensors(*case, dtype, seed)
        want = recurrence(package, x)
        makers = {name: partial(partial, ways[name], x) for name in found}
        for name, call in working(makers).items():
            found[name].append(list(map(relative_error, call(), want)))
    return {name: over_draws(draws) for name, draws in found.items() if draws}


def rows(package, options):
    keep_fla_to_triton()
    ways = functions(package)
    for dtype in DTYPES:
        for case in CASES:
            error = compare(package, ways, case, dtype)
            yield {"dtype": str(dtype)[6:], "case": case, "error": error}


if __name__ == "__main__":
    run(__doc__, "gdn_chunk_errors_fla", rows)
