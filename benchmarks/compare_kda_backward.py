"""The gradient of Kimi Delta Attention: its time, its launches' times and its errors, beside FLA's.

    python benchmarks/compare_kda_backward.py [--json FILE] [--seconds 200] [--configurations 2]

Head dim 128, bf16, l2norm in the call, gates -5 sigmoid(n) in fp32. FLA as compare_kda.py calls it;
its guard against Triton 3.4.0 to 3.7.0 on Hopper is off, and of its autotuning every kernel gets so
many configurations. `backward` is the gradient alone, `both` with the forward before it: medians of
eager calls by the GPU's clock. Errors are relative to automatic differentiation of the recurrence
in fp64, at 500 tokens and 4 heads for five kinds of gates, and for raw gates of both formulas.
Those of A_log and dt_bias, sums of terms of either sign, are relative to the root of the sum of the
terms' squares. While other processes compile what of FLA is timed, ours is compiled and its errors
are taken; what of FLA does not begin within --seconds is left out.
"""

import contextlib
import subprocess
import time
from functools import partial
from typing import Iterator

import torch
from compare_kda import ERRORS, load_fla, prompt
from kernel_time import kernels_of, milliseconds
from peers import lift_fla_guard, shorten_autotuning, start_warming, working
from runner import run

SHAPES = {
    "H 32, 8192": (1, 8192, 32, None),
    "H 32, packed 4 x 2048": (1, 8192, 32, 4),
    "H 32, 2048": (1, 2048, 32, None),
    "H 64, 8192": (1, 8192, 64, None),
}
RAW = {"raw, softplus": None, "raw, bounded": -5.0}
WAYS = {"fla_safe": {"safe_gate": True}, "fla": {}}  # of FLA
# what it compiles, but for other lengths, a process each
COMPILED = [(name, way) for way in WAYS for name in SHAPES if name != "H 32, 2048"]


def calls_of(function, x, options, safe: dict) -> dict:
    leaves = [y.clone().requires_grad_() for y in x]

    def forward():
        return function(*leaves, **options, **safe)

    o, state = forward()
    outer = (torch.randn_like(o), torch.randn_like(state))

    def backward():
        return torch.autograd.grad((o, state), leaves, outer, retain_graph=True)

    def both():
        return torch.autograd.grad(forward(), leaves, outer)

    backward()
    return {"backward": backward, "both": both}


def launches(call, times: int = 3) -> dict:
    """Microseconds of each kernel of a call, by torch's profiler."""
    found = {}
    for name, us in kernels_of(call, times):
        found[name[:60]] = found.get(name[:60], 0.0) + us / times
    return {name: round(us, 1) for name, us in found.items() if us > 1}


def inputs(gates: str) -> tuple:
    """Inputs by name at 500 tokens, and the options of their call."""
    from kda_problems import kda_inputs

    x = kda_inputs(
        1, 500, 4, 4, 128, 128, torch.bfloat16, ERRORS[0] if gates in RAW else gates, device="cuda"
    )
    x["beta"] = x["beta"].bfloat16().float()
    x["initial_state"] = torch.randn(1, 4, 128, 128, device="cuda") * 0.2
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if gates in RAW:
        x["g"] = torch.randn_like(x["g"]).bfloat16()
        x["A_log"] = torch.linspace(-1.0, 2.0, 4, device="cuda")
        x["dt_bias"] = torch.linspace(-3.0, 1.0, 512, device="cuda")
        options.update(use_gate_in_kernel=True, lower_bound=RAW[gates])
    return x, options


def sizes(x: dict, wanted: dict, bound) -> dict:
    """What the errors of gradients are relative to."""
    found = {name: y.norm() for name, y in wanted.items()}
    if "A_log" in x:
        a = x["g"].double() + x["dt_bias"].double().view(4, 128)
        by_rate = a if bound else torch.nn.functional.softplus(a) / a.sigmoid()
        found["dt_bias"], found["A_log"] = found["g"], (wanted["g"] * by_rate).norm()
    return found


def gradients(function, x: dict, outer, options: dict) -> dict:
    leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
    outputs = function(**leaves, **options)
    outer = [y.to(z.dtype) for y, z in zip(outer, outputs)]
    return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), outer)))


def problem(package, gates: str) -> tuple:
    """Inputs, their options and outer gradients, gradients in fp64, and what errors are relative
    to."""
    x, options = inputs(gates)
    outer = (torch.randn(1, 500, 4, 128, device="cuda"), torch.randn(1, 4, 128, 128).cuda())
    outer = (outer[0].bfloat16(), outer[1])
    wide = {name: y.double() for name, y in x.items()}
    want = gradients(package.fused_recurrent_kda, wide, outer, options)
    return x, options, outer, want, sizes(x, want, options.get("lower_bound"))


def errors(given: tuple, way: str, function, more: dict) -> dict:
    """The way's errors under its name, as far as it runs."""
    x, options, outer, want, of = given
    if more and options.get("lower_bound", 0) is None:
        return {}  # safe_gate asks for a bound
    call = partial(gradients, function, x, outer, {**options, **more})
    if not working({way: lambda: call}):
        return {}
    ratios = {n: ((y.double() - want[n]).norm() / of[n]).item() for n, y in call().items()}
    return {way: {f"d{name}": float(f"{ratio:.2e}") for name, ratio in ratios.items()}}


def timed(name: str, way: str, function, more: dict) -> Iterator[dict]:
    """The way's row of a shape, where it runs."""
    calls = {}

    def both():
        calls.update(calls_of(function, *prompt(*SHAPES[name]), more))
        return calls["both"]

    if working({way: both}):
        row = {"gradient": name, "way": way, "ms": milliseconds(calls, warmup=5, rep=15)}
        yield {**row, "launches_us": launches(calls["both"])} if way == "ours" else row


def warm(options) -> None:
    """One of COMPILED."""
    fla, _ = load_fla(options.configurations)
    shorten_autotuning()
    if fla:
        name, way = COMPILED[int(options.warm.split("/")[0])]
        lift_fla_guard()
        calls_of(fla, *prompt(*SHAPES[name]), WAYS[way])


def rows(package, options):
    began = time.perf_counter()
    fla, _ = load_fla(options.configurations)
    shorten_autotuning()
    ours, peers, workers = ("ours", package.chunk_kda, {}), [], []
    if fla:
        workers = [] if options.compiled else start_warming(len(COMPILED))
        peers = [(way, fla, safe) for way, safe in WAYS.items()]
        lift_fla_guard()

    def in_time(what: str) -> Iterator[tuple]:
        """The peers, as long as there is time."""
        for peer in peers:
            if time.perf_counter() - began < options.of_fla:
                yield peer
            else:
                print(f"{peer[0]} of {what} is left out: no time", flush=True)

    for name in SHAPES:
        calls_of(package.chunk_kda, *prompt(*SHAPES[name]), {})
    problems = {gates: problem(package, gates) for gates in (*ERRORS, *RAW)}
    found = {gates: {"errors": gates, **errors(x, *ours)} for gates, x in problems.items()}
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(max(options.of_fla - (time.perf_counter() - began), 0))
        worker.terminate()  # what has no time is left out below
    for name in SHAPES:
        yield from timed(name, *ours)
        for peer in in_time(name):
            yield from timed(name, *peer)
    yield from found.values()
    for gates, x in problems.items():
        for peer in in_time(f"errors, {gates}"):
            found[gates].update(errors(x, *peer))
            yield found[gates]


ARGUMENTS = {
    "--seconds": {"dest": "of_fla", "type": float, "default": 1e9, "help": "no row of FLA after"},
    "--configurations": {"type": int, "default": 2, "help": "of each kernel of FLA"},
}

if __name__ == "__main__":
    run(__doc__, "kda_backward", rows, ARGUMENTS, warm, share=False)
