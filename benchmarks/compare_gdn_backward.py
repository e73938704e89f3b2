"""The gradient of the chunked gated delta rule alone: its time and errors, ours and the peers'.

    python benchmarks/compare_gdn_backward.py [--json FILE] [--only recompute saved fla]

Head dim 128, bf16, l2norm in the call, initial and final state. FLA's Triton backward refuses to
run on Hopper with Triton 3.4.0 to 3.7.0, which miscompiles it (flash-linear-attention#640); here
its guard is off, for its time and its errors. FlashQLA, where it is installed, compiles for
minutes. Errors are relative to automatic differentiation of the recurrence in fp64.
"""

import argparse
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from kernel_time import (
    RESULTS,
    keep_fla_to_triton,
    load_package,
    save,
    share_autotuning,
    warm_up,
)

SHAPES = [(16, 32, 8192), (16, 32, 32768), (8, 16, 8192), (8, 16, 32768)]  # H, HV, T
WAYS = ("recompute", "saved", "fla", "flash_qla")
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "d_initial")


def tensors(H, HV, T, seed=0):
    """q, k, v, g, beta and the initial state as leaves; gradients of o and of the final state."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, T, H, 128, device="cuda").bfloat16().unbind(0)
    v, do = torch.randn(2, 1, T, HV, 128, device="cuda").bfloat16().unbind(0)
    g = F.logsigmoid(torch.randn(1, T, HV, device="cuda") + 4)
    beta = torch.rand(1, T, HV, device="cuda")
    state, d_state = torch.randn(2, 1, HV, 128, 128, device="cuda").mul(0.2).unbind(0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta, state)]
    return leaves, (do, d_state)


def forward(package, way: str):
    """(o, final state) of the leaves, by the way's own forward."""
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if way == "fla":
        import fla.ops.common.chunk_o as guarded
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        guarded.TRITON_ABOVE_3_7_1 = True
    elif way == "flash_qla":
        from flash_qla import chunk_gated_delta_rule
    else:
        chunk_gated_delta_rule = package.chunk_gated_delta_rule
        options["recompute"] = way == "recompute"

    def call(q, k, v, g, beta, state):
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, **options)

    return call


def backward(call, leaves, outer):
    outputs = call(*leaves)
    return lambda: torch.autograd.grad(outputs, leaves, outer, retain_graph=True)


def measure(package, H, HV, T, only) -> dict:
    from triton.testing import do_bench

    leaves, outer = tensors(H, HV, T)
    calls, row = {}, {"heads": [H, HV], "T": T, "ms": {}}
    for way in only:
        try:
            calls[way] = backward(forward(package, way), leaves, outer)
            calls[way]()
        except Exception as error:  # a peer that is not installed or refuses is left out
            calls.pop(way, None)
            print(f"{way} is left out: {str(error).strip().splitlines()[-1][:120]}")
    times = {way: [] for way in calls}
    for _ in range(3):
        for way, call in calls.items():
            times[way].append(do_bench(call, warmup=10, rep=40, return_mode="median"))
    row["ms"] = {way: round(statistics.median(t), 4) for way, t in times.items()}
    print(row, flush=True)
    return row


def recurrence(q, k, v, g, beta, state):
    """o and the final state in the dtype of the tensors, token by token."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    R = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(R, 2) for x in (q, k))
    o = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[:, :, None, None]
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * 128**-0.5)
    return torch.stack(o, 1), state


def errors(package, T, only, heads=(2, 4)) -> dict:
    leaves, outer = tensors(*heads, T)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = recurrence(*wide)
    want = [*want, *torch.autograd.grad(want, wide, [x.double() for x in outer])]
    row = {"T": T, "heads": list(heads), "error": {}}
    for way in only:
        try:
            got = forward(package, way)(*leaves)
            got = [*got, *torch.autograd.grad(got, leaves, outer)]
        except Exception as error:
            print(f"{way} is left out: {str(error).strip().splitlines()[-1][:120]}")
            continue
        row["error"][way] = {
            name: float(f"{((a.double() - b).norm() / b.norm()).item():.2e}")
            for name, a, b in zip(NAMES, got, want)
        }
        print(T, way, row["error"][way], flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "gdn_backward.json")
    parser.add_argument("--only", nargs="*", default=WAYS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first so many")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_fla_to_triton()
    if options.warm:
        share_autotuning(*map(int, options.warm.split("/")))
        for H, HV in {shape[:2] for shape in SHAPES} | {(2, 4)}:
            leaves, outer = tensors(H, HV, 256)
            backward(forward(None, "fla"), leaves, outer)()
        return
    if "fla" in options.only:
        warm_up(__file__)
    package, rows = load_package(), []
    for T in (64, 1000):
        rows.append(errors(package, T, options.only))
    for shape in SHAPES[: options.shapes]:
        rows.append(measure(package, *shape, options.only))
        save(options.json, rows)


if __name__ == "__main__":
    main()
