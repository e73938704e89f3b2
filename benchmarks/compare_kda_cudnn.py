"""Kimi Delta Attention beside cuDNN frontend's kernels for Hopper: prompts, gradients, errors.

    python benchmarks/compare_kda_cudnn.py [--parts prompts gradients errors]
        [--gates strong slow raw] [--json FILE]     on a GPU of compute capability 9.0

It needs nvidia-cudnn-frontend with the package cuda-bindings, and a CUDA toolkit's headers, from
which its kernels are compiled when they are first called. Head dim 128, bf16, gates in fp32 given:
`strong` ones are -5 sigmoid(n), of which a few tokens leave nothing of a state; `slow` ones those
of Kimi Linear as it is initialised, -exp(A_log) softplus(n + dt_bias). `raw` ones are the strong
ones' n in bf16, with the bound: our call activates them, and FLA's fused_kda_gate does so before
cuDNN's, with two of its configurations tried. Prompts are normalised in the call; gradients are
those of given normalised q and k, the only ones that cuDNN's kernel takes, medians of eager calls.
Errors are of o, relative to fp64, at 1000 tokens and 4 heads. Rows take the places of the record's
of the same name.
"""

import functools

import torch
import torch.nn.functional as F
from compare_kda import ERRORS, prompt
from kernel_time import idle_host_us, microseconds, milliseconds
from peers import keep_fla_to_triton, peer, thin_autotuning, working
from runner import relative_error, run

PROMPTS = {
    "64 heads, 8192 tokens": (1, 8192, 64, None),
    "32 heads, 512 tokens": (1, 512, 32, None),
    "32 heads, 2048 tokens": (1, 2048, 32, None),
    "32 heads, 8192 tokens": (1, 8192, 32, None),
    "32 heads, packed 4 x 2048 tokens": (1, 8192, 32, 4),
    "12 heads, 2048 tokens": (1, 2048, 12, None),
    "8 heads, 8192 tokens": (1, 8192, 8, None),
}
GATES = ("strong", "slow", "raw")
BOUND = -5.0  # of raw gates
OPTIONS = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


def slow_gates(shape) -> torch.Tensor:
    heads, K = shape[-2:]
    rate = torch.empty(heads, 1, device="cuda").uniform_(1, 16)
    dt = torch.empty(heads, K, device="cuda").uniform_(-6.9, -2.3).exp()  # 0.001 to 0.1
    bias = dt + torch.log(-torch.expm1(-dt))
    return -rate * F.softplus(torch.randn(shape, device="cuda") + bias)


def cudnn(x, cu_seqlens=None, **options):
    """A call of cuDNN's on q, k, v, g, beta: o [B, T, HV, V] and the final states [N, HV, V, K]."""
    from cudnn.linear_attention.ops import kimi_delta_attention

    B, T = x[0].shape[:2]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(B + 1, device="cuda") * T
    cu_seqlens = cu_seqlens.int()

    def call(*tensors):
        flat = [y.flatten(0, 1) for y in tensors or x]
        o, state = kimi_delta_attention(*flat, cu_seqlens, **options)[:2]
        return o.unflatten(0, (B, T)), state

    return call


def gradient(x, forward):
    leaves = [y.clone().requires_grad_() for y in x]
    o, state = forward(*leaves)
    outer = (torch.randn_like(o), torch.randn_like(state))
    return lambda: torch.autograd.grad((o, state), leaves, outer, retain_graph=True)


def activated(call, activate, x, A_log):
    """A call of cuDNN's on raw gates, which another kernel activates before."""

    def both():
        g = activate(x[3], A_log, lower_bound=BOUND)
        return call(*x[:3], g, x[4])

    return both


def prompts(package, gates):
    keep_fla_to_triton()
    thin_autotuning(2)
    activate = peer("fla.ops.kda.gate", "fused_kda_gate")
    for name, case in PROMPTS.items():
        for kind in gates:
            x, given = prompt(*case)
            raw = {}
            if kind == "slow":
                x = (*x[:3], slow_gates(x[3].shape), x[4])
            elif kind == "raw":
                A_log = torch.zeros(case[2], device="cuda")
                raw = {"use_gate_in_kernel": True, "lower_bound": BOUND, "A_log": A_log}
                x = (*x[:3], torch.randn_like(x[0]), x[4])
            ours = functools.partial(package.chunk_kda, *x, **given, **raw)
            theirs = cudnn(x, **given)
            if raw:
                theirs = activated(theirs, activate, x, A_log)
            makers = {"ours": lambda f=ours: f, "cudnn": lambda f=theirs: f}
            with torch.no_grad():
                calls = working(makers, needed=("ours",))
                us = microseconds(calls, rounds=5, rep_ms=10)
                host = {way: idle_host_us(call) for way, call in calls.items()}
            yield {"what": f"{name}, {kind} gates", "us": us, "host_us": host}


def gradients(package, gates):
    ours = functools.partial(package.chunk_kda, **OPTIONS)  # normalises q and k once more
    for name in ("32 heads, 2048 tokens", "32 heads, 8192 tokens", "64 heads, 8192 tokens"):
        (q, k, *rest), _ = prompt(*PROMPTS[name])
        x = (*(F.normalize(y.float(), dim=-1).bfloat16() for y in (q, k)), *rest)
        makers = {
            "ours": lambda x=x: gradient(x, ours),
            "cudnn": lambda x=x: gradient(x, cudnn(x, output_final_state=True)),
        }
        ms = milliseconds(working(makers, needed=("ours",)), warmup=5, rep=20)
        us = {way: time * 1e3 for way, time in ms.items()}
        yield {"what": f"gradient, {name}, strong gates", "us": us}


def errors(package, gates):
    from kda_problems import kda_inputs

    for kind in ERRORS:
        x = kda_inputs(1, 1000, 4, 4, 128, 128, torch.bfloat16, kind, device="cuda")
        x["beta"] = x["beta"].bfloat16().float()
        with torch.no_grad():
            wide = {name: y.double() for name, y in x.items()}
            want, _ = package.fused_recurrent_kda(**wide, **OPTIONS)
            found = {"ours": package.chunk_kda(**x, **OPTIONS)[0]}
            others = working({"cudnn": lambda x=x: cudnn(list(x.values()), **OPTIONS)})
            found.update({way: call()[0] for way, call in others.items()})
        row = {way: relative_error(o, want) for way, o in found.items()}
        yield {"what": f"gates: {kind}", "error": row}


PARTS = {"prompts": prompts, "gradients": gradients, "errors": errors}


def rows(package, options):
    for part in options.parts:
        yield from PARTS[part](package, options.gates)


ARGUMENTS = {
    "--parts": {"nargs": "+", "choices": PARTS, "default": list(PARTS)},
    "--gates": {"nargs": "+", "choices": GATES, "default": list(GATES), "help": "of prompts"},
}

if __name__ == "__main__":
    run(__doc__, "kda_cudnn", rows, ARGUMENTS, merge=True)
