"""The gradient of the chunked gated delta rule alone: its time and errors, ours and the peers'.

    python benchmarks/compare_gdn_backward.py [--json FILE] [--only recompute saved fla flashqla]

Head dim 128, bf16, l2norm in the call, initial and final state. FLA's Triton backward refuses to
run on Hopper with Triton 3.4.0 to 3.7.0, which miscompiles it (flash-linear-attention#640); here
its guard is off, for its time and its errors. FlashQLA compiles for minutes. `ms` is an eager
call's time, `kernel_ms` the sum of its kernels' by torch's profiler: where they part, the host is
the slower. Errors are relative to automatic differentiation of the recurrence in fp64, root mean
squares over eight draws.
"""

import argparse
import contextlib
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from kernel_time import (
    keep_fla_to_triton,
    load_package,
    parse_on_gpu,
    record_of,
    save,
    share_autotuning,
    warm_up,
)

SHAPES = [  # B, H, HV, T
    *((1, 16, 32, 8192), (1, 16, 32, 32768), (4, 16, 32, 4096)),
    *((1, 16, 64, 8192), (1, 16, 64, 32768), (4, 16, 64, 4096)),
    *((1, 8, 16, 8192), (1, 8, 16, 32768)),
]
WAYS = ("recompute", "saved", "fla", "flashqla")
ERROR_HEADS, ERROR_TOKENS, SEEDS = (2, 4), (64, 1000), 8
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "d_initial")


def tensors(B, H, HV, T, seed=0):
    """q, k, v, g, beta and the initial state as leaves; gradients of o and of the final state."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, B, T, H, 128, device="cuda").bfloat16().unbind(0)
    v, do = torch.randn(2, B, T, HV, 128, device="cuda").bfloat16().unbind(0)
    g = F.logsigmoid(torch.randn(B, T, HV, device="cuda") + 4)
    beta = torch.rand(B, T, HV, device="cuda")
    state, d_state = torch.randn(2, B, HV, 128, 128, device="cuda").mul(0.2).unbind(0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta, state)]
    return leaves, (do, d_state)


def forward(package, way: str):
    """(o, final state) of the leaves, by the way's own forward."""
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if way == "fla":
        import fla.ops.common.chunk_o as guarded
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        guarded.TRITON_ABOVE_3_7_1 = True
    elif way == "flashqla":
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


def said(error) -> str:
    return [type(error).__name__, *str(error).strip().splitlines()][-1][:120]


def kernel_ms(call, calls: int = 5) -> float:
    """The sum of the kernels' times of one call, what they read warm in the L2 or not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profiler.key_averages()) / calls / 1e3


def measure(package, B, H, HV, T, only) -> dict:
    from triton.testing import do_bench

    leaves, outer = tensors(B, H, HV, T)
    calls, row = {}, {"B": B, "heads": [H, HV], "T": T, "ms": {}}
    for way in only:
        try:
            calls[way] = backward(forward(package, way), leaves, outer)
            calls[way]()
        except Exception as error:  # a peer that is not installed or refuses is left out
            calls.pop(way, None)
            print(f"{way} is left out: {said(error)}")
    times = {way: [] for way in calls}
    for _ in range(3):
        for way, call in calls.items():
            times[way].append(do_bench(call, warmup=10, rep=40, return_mode="median"))
    row["ms"] = {way: round(statistics.median(t), 4) for way, t in times.items()}
    row["kernel_ms"] = {way: round(kernel_ms(call), 4) for way, call in calls.items()}
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


def errors(package, T, only) -> dict:
    """Errors by implementation and name."""
    squares = {way: [] for way in only}
    for seed in range(SEEDS):
        leaves, outer = tensors(1, *ERROR_HEADS, T, seed)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        want = recurrence(*wide)
        want = [*want, *torch.autograd.grad(want, wide, [x.double() for x in outer])]
        for way in only:
            try:
                got = forward(package, way)(*leaves)
                got = [*got, *torch.autograd.grad(got, leaves, outer)]
            except Exception as error:
                print(f"{way} is left out: {said(error)}")
                continue
            ratios = ((a.double() - b).norm() / b.norm() for a, b in zip(got, want))
            squares[way].append([ratio.item() ** 2 for ratio in ratios])
    row = {"T": T, "heads": list(ERROR_HEADS), "error": {}}
    for way, draws in squares.items():
        means = [statistics.mean(column) ** 0.5 for column in zip(*draws)]
        row["error"][way] = {name: float(f"{mean:.2e}") for name, mean in zip(NAMES, means)}
        print(T, way, row["error"][way], flush=True)
    return row


def warm(shapes, only, part: int, parts: int) -> None:
    """One part of what the peers compile: of FLA's configurations, of FlashQLA's shapes."""
    share_autotuning(part, parts)
    shapes = [*shapes, *((1, *ERROR_HEADS, T) for T in ERROR_TOKENS)]
    todo = {"fla": [(1, *heads, 256) for heads in {shape[1:3] for shape in shapes}]}
    todo["flashqla"] = shapes[part::parts]
    for way, chosen in todo.items():
        with contextlib.suppress(ImportError):
            for shape in chosen if way in only else ():
                backward(forward(None, way), *tensors(*shape))()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="default: gdn_backward_<peers>.json in results/")
    parser.add_argument("--only", nargs="*", default=WAYS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first so many")
    parser.add_argument("--compiled", action="store_true", help="warm nothing up before")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parse_on_gpu(parser)
    keep_fla_to_triton()
    shapes = SHAPES[: options.shapes]
    if options.warm:
        warm(shapes, options.only, *map(int, options.warm.split("/")))
        return
    peers = [way for way in ("fla", "flashqla") if way in options.only]
    if peers and not options.compiled:
        warm_up(__file__, "--shapes", str(options.shapes), "--only", *peers)
    options.json = options.json or record_of("gdn_backward", peers)
    package, rows = load_package(), []
    for T in ERROR_TOKENS:
        rows.append(errors(package, T, options.only))
    for shape in shapes:
        rows.append(measure(package, *shape, options.only))
        save(options.json, rows)


if __name__ == "__main__":
    main()
