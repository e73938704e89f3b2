"""The gradient of the chunked gated delta rule alone: its time and errors, ours and the peers'.

    python benchmarks/compare_gdn_backward.py [--json FILE] [--only recompute saved fla flashqla]

Head dim 128, bf16, l2norm in the call, initial and final state. FLA's Triton backward refuses to
run on Hopper with Triton 3.4.0 to 3.7.0, which miscompiles it (flash-linear-attention#640); here
its guard is off, for its time and its errors. FlashQLA compiles for minutes. `ms` is an eager
call's time, `kernel_ms` the sum of its kernels' by torch's profiler: where they part, the host is
the slower. Errors are relative to automatic differentiation of the recurrence in fp64, root mean
squares over eight draws.
"""

import contextlib
from functools import partial

import torch
import torch.nn.functional as F
from kernel_time import kernels_of, milliseconds
from peers import keep_fla_to_triton, lift_fla_guard, warm_up, working
from runner import over_draws, relative_error, run

SHAPES = [  # B, H, HV, T
    *((1, 16, 32, 8192), (1, 16, 32, 32768), (4, 16, 32, 4096)),
    *((1, 16, 64, 8192), (1, 16, 64, 32768), (4, 16, 64, 4096)),
    *((1, 8, 16, 8192), (1, 8, 16, 32768)),
]
SEVERAL = [(B, *heads, 8192 // B) for heads in ((16, 32), (8, 16), (4, 8)) for B in (4, 8)]
PEERS = ("fla", "flashqla")
ARGUMENTS = {
    "--only": {"nargs": "*", "default": ("recompute", "saved", *PEERS)},
    "--shapes": {"type": int, "default": len(SHAPES), "help": "the first so many"},
    "--several": {"action": "store_true", "help": "8192 tokens in 4 and 8 sequences, no errors"},
}
ERROR_HEADS, ERROR_TOKENS, SEEDS = (2, 4), (64, 1000), 8
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "d_initial")
OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


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


def forward(package, way: str, leaves: list) -> tuple:
    """(o, final state) by the way's own forward."""
    q, k, v, g, beta, state = leaves
    options = OPTIONS
    if way == "fla":
        lift_fla_guard()
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    elif way == "flashqla":
        from flash_qla import chunk_gated_delta_rule as rule
    else:
        rule = package.chunk_gated_delta_rule
        options = {**OPTIONS, "recompute": way == "recompute"}
    return rule(q, k, v, g=g, beta=beta, initial_state=state, **options)


def backward(package, way: str, leaves: list, outer: tuple):
    outputs = forward(package, way, leaves)
    return lambda: torch.autograd.grad(outputs, leaves, outer, retain_graph=True)


def whole(package, way: str, leaves: list, outer: tuple) -> list:
    """Outputs and gradients, as NAMES has them."""
    outputs = forward(package, way, leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, outer)]


def measure(package, B, H, HV, T, only) -> dict:
    makers = {way: partial(backward, package, way, *tensors(B, H, HV, T)) for way in only}
    calls = working(makers)
    kernels = {way: sum(us for _, us in kernels_of(call, 5)) / 5e3 for way, call in calls.items()}
    return {
        "B": B, "heads": [H, HV], "T": T, "ms": milliseconds(calls),
        "kernel_ms": {way: round(ms, 4) for way, ms in kernels.items()},
    }  # fmt: skip


def recurrence(package, x) -> tuple:
    """o and the final state, token by token in fp64."""
    *given, state = (y.double() for y in x)
    return package.fused_recurrent_gated_delta_rule(*given, initial_state=state, **OPTIONS)


def errors(package, T, only) -> dict:
    """Errors by implementation and name: root mean squares over draws."""
    found = {way: [] for way in only}
    for seed in range(SEEDS):
        leaves, outer = tensors(1, *ERROR_HEADS, T, seed)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        want = recurrence(package, wide)
        want = [*want, *torch.autograd.grad(want, wide, [x.double() for x in outer])]
        makers = {way: partial(partial, whole, package, way, leaves, outer) for way in only}
        for way, call in working(makers).items():
            found[way].append(list(map(relative_error, call(), want)))
    row = {"T": T, "heads": list(ERROR_HEADS), "error": {}}
    for way, draws in ((way, draws) for way, draws in found.items() if draws):
        means = zip(NAMES, over_draws(draws))
        row["error"][way] = {name: float(f"{mean:.2e}") for name, mean in means}
    return row


def chosen(options) -> list:
    return SEVERAL if options.several else SHAPES[: options.shapes]


def warm(options) -> None:
    """One part of what the peers compile: of FLA's configurations, of FlashQLA's shapes."""
    part, parts = map(int, options.warm.split("/"))
    shapes = [*chosen(options), *((1, *ERROR_HEADS, T) for T in ERROR_TOKENS)]
    todo = {"fla": [(1, *heads, 256) for heads in {shape[1:3] for shape in shapes}]}
    todo["flashqla"] = shapes[part::parts]
    for way in set(options.only) & set(PEERS):
        with contextlib.suppress(ImportError):
            for shape in todo[way]:
                backward(None, way, *tensors(*shape))()


def rows(package, options):
    keep_fla_to_triton()
    if set(options.only) & set(PEERS) and not options.compiled:
        warm_up()
    for T in () if options.several else ERROR_TOKENS:
        yield errors(package, T, options.only)
    for shape in chosen(options):
        yield measure(package, *shape, options.only)


def record(options) -> str:
    return "_".join(["gdn_backward", *sorted(set(options.only) & set(PEERS))])


if __name__ == "__main__":
    run(__doc__, record, rows, ARGUMENTS, warm)
