"""Kernel time of Kimi Delta Attention beside FLA's: prompts and decoding.

    python benchmarks/compare_kda.py [--json FILE] [--seconds 100]     on a GPU

Head dim 128, bf16, l2norm of q and k in the call. Prompts: gates -5 sigmoid(n) in fp32, given. FLA
is called as transformers calls it ("fla"), and with safe_gate, which needs gates above -5
("fla_safe"); FLA_FLASH_KDA=0 and FLA_TILELANG=0 keep it to its own Triton kernels, and of its
autotuning every kernel gets the configurations that --configurations says. Decoding: raw gates in
our call; FLA is given the gates, and writes new states where ours writes in place. `copy` is a
Triton kernel that reads and writes as many bytes as the states have: the wall.

The rows of FLA that do not fit into --seconds are left out. Errors are relative to fp64, at 1000
tokens and 4 heads for five kinds of gates.
"""

import functools
import sys
import time

import torch
from kernel_time import idle_host_us, microseconds
from peers import keep_fla_to_triton, peer, thin_autotuning, working
from runner import ROOT, relative_error, run, submodule

sys.path.insert(0, str(ROOT / "tests"))
PROMPTS = {
    "H 64, 8192": (1, 8192, 64, None),
    "H 32, 2048": (1, 2048, 32, None),
    "H 32, 8192": (1, 8192, 32, None),
    "H 32, 32768": (1, 32768, 32, None),
    "H 32, packed 4 x 2048": (1, 8192, 32, 4),
}
BATCHES = (1, 64, 256)
ARGUMENTS = {
    "--seconds": {"dest": "of_fla", "type": float, "default": 1e9, "help": "no row of FLA after"},
    "--configurations": {"type": int, "default": 6, "help": "of each kernel of FLA"},
    "--prompts": {"action": "store_true", "help": "no decoding, no errors"},
}
ERRORS = ("softplus", "bounded", "slow", "floor", "wild")


def prompt(B, T, H, pieces) -> tuple:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, 128, device="cuda").bfloat16().unbind(0)
    g = -5 * torch.sigmoid(torch.randn(B, T, H, 128, device="cuda"))
    beta = torch.rand(B, T, H, device="cuda")
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if pieces is not None:
        options["cu_seqlens"] = torch.arange(pieces + 1, device="cuda") * (T // pieces)
    return (q, k, v, g, beta), options


def load_fla(configurations: int) -> tuple:
    """FLA's functions of prompts and of tokens, or None, with so many configurations a kernel."""
    keep_fla_to_triton()
    thin_autotuning(configurations)
    return peer("fla.ops.kda", "chunk_kda"), peer("fla.ops.kda", "fused_recurrent_kda")


def phases(x, options) -> dict:
    """The launches of a prompt, one by one: prepare (three where it is the portable one), scan."""
    calls, portable = submodule("kda.call"), submodule("kda.portable.chunk")
    given = submodule("gdn.call").GdnOptions(128**-0.5, use_qk_l2norm=True, output_final_state=True)
    cu = options.get("cu_seqlens")
    call = calls.KdaCall(*x, None, None, None, None, cu, given)
    q, k, v, g, beta = x
    forms = {"prepare, portable": portable.Chunked(call)}
    if torch.cuda.get_device_capability()[0] == 9:
        forms["prepare"] = submodule("kda.hopper.chunk").Chunked(call)
    timed = {
        name: functools.partial(form.prepare, q, k, g, beta, None, None, cu)
        for name, form in forms.items()
    }
    chunked = list(forms.values())[-1]
    tb, p, kd, qd, ke, gam, _, _, *decay = chunked.prepare(q, k, g, beta, None, None, cu)
    o, (states, _) = torch.empty_like(v), chunked.states(v, None, None)
    scanned = (qd, kd, v, o), (tb, p, gam), cu, (None, None, states, None), ke, *decay
    return {**timed, "scan": functools.partial(chunked.scan, *scanned)}


def copied(states):
    from compare_gdn_recurrent import copy

    return lambda: [copy(state) for state in states]


def decode(package, fla, B, H, dtype) -> dict:
    """States take turns, so that what one call wrote is no longer in the cache."""
    torch.manual_seed(0)
    count = 3 if B > 1 else 24
    q, k, v, a = torch.randn(4, B, 1, H, 128, device="cuda").bfloat16().unbind(0)
    b, A_log = torch.randn(B, 1, H, device="cuda").bfloat16(), torch.randn(H, device="cuda") * 0.5
    dt_bias = torch.randn(H * 128, device="cuda")
    states = [0.1 * torch.randn(B, H, 128, 128, device="cuda").to(dtype) for _ in range(count)]
    raw = {
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "A_log": A_log,
        "dt_bias": dt_bias, "lower_bound": -5.0, "use_qk_l2norm_in_kernel": True,
        "inplace_final_state": True,
    }  # fmt: skip

    def ours(v_first):
        return lambda: [
            package.fused_recurrent_kda(
                q, k, v, a, b, initial_state=state, state_v_first=v_first, **raw
            )
            for state in states
        ]

    calls = {"copy": copied(states), "ours": ours(True), "ours_kv": ours(False)}
    if fla is not None and dtype == torch.float32:
        g = -5 * torch.sigmoid(A_log.exp()[:, None] * (a.float() + dt_bias.view(H, 128)))
        beta = b.float().sigmoid()
        calls["fla"] = lambda: [
            fla(q, k, v, g, beta, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True) for state in states
        ]  # fmt: skip
    times = microseconds(calls, rounds=3, rep_ms=6)
    row = {"B": B, "heads": [H, H], "state": str(dtype)[6:]}
    return {**row, "us": {name: t / count for name, t in times.items()}}


def errors(package, fla):
    from kda_problems import kda_inputs

    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    for gates in ERRORS:
        x = kda_inputs(1, 1000, 4, 4, 128, 128, torch.bfloat16, gates, device="cuda")
        x["beta"] = x["beta"].bfloat16().float()
        want = package.fused_recurrent_kda(**{n: y.double() for n, y in x.items()}, **options)
        found = {"ours": lambda x=x: package.chunk_kda(**x, **options)}
        if fla is not None:
            found["fla"] = lambda x=x: fla(**x, **options)
            found["fla_safe"] = lambda x=x: fla(**x, **options, safe_gate=True)
        row = {"errors": gates}
        for name, call in found.items():
            row[name] = list(map(relative_error, call(), want))
        yield row


def beside_fla(package, fla, row: dict, case: tuple):
    """The row of a prompt with FLA's time, both in turns: they are what it says in the end."""
    x, given = prompt(*case)
    for kind, safe in (("fla_safe", True), ("fla", False)):
        calls = {
            "ours": functools.partial(package.chunk_kda, *x, **given),
            kind: functools.partial(fla, *x, **given, safe_gate=safe),
        }
        if kind in working({kind: functools.partial(calls.get, kind)}):
            row["us"].update(microseconds(calls, rounds=3, rep_ms=10))
        yield row


@torch.no_grad()
def rows(package, options):
    began, prompts = time.perf_counter(), {}
    fla, fla_step = load_fla(options.configurations)
    for name, case in PROMPTS.items():
        x, given = prompt(*case)
        call = functools.partial(package.chunk_kda, *x, **given)
        us = microseconds({"ours": call, **phases(x, given)}, rounds=3, rep_ms=10)
        prompts[name] = {"what": name, "us": us, "host_us": {"ours": idle_host_us(call)}}
        yield prompts[name]
    for H in () if options.prompts else (32, 64):
        for B in BATCHES:
            for dtype in (torch.float32, torch.bfloat16):
                yield decode(package, fla_step if B <= 64 else None, B, H, dtype)
    yield from () if options.prompts else errors(package, None)
    todo = [beside_fla(package, fla, prompts[name], PROMPTS[name]) for name in prompts if fla]
    todo += [errors(package, fla)] * bool(fla and not options.prompts)
    for some in todo:
        while time.perf_counter() - began < options.of_fla:
            row = next(some, None)
            if row is None:
                break
            yield row


if __name__ == "__main__":
    run(__doc__, "kda", rows, ARGUMENTS)
