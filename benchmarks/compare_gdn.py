"""Kernel time, eager host time and errors of GDN prefill against the peers that are installed.

    python benchmarks/compare_gdn.py --only hopper portable fla [--json FILE]     on a GPU

Head dim 128, bf16, l2norm of q and k in the call, initial and final state, two regimes of gates:
"qwen" as Qwen3.5 initialises them (A from 0.01 to 16), "slow" logsigmoid(n + 4). Sequences are a
batch, or packed one after another with `cu_seqlens`. Peers: FLA's
Triton kernels (FLA_FLASH_QLA=0 and FLA_TILELANG=0 keep FLA to them), aiter's
chunk_gated_delta_rule_opt_vk (tuned; GATED_DELTA_RULE_TRITON_AUTOTUNE=0 takes its defaults),
FlashInfer, FlashQLA: see peers.py. `prepare` is our first kernel alone, `copy` a copy of what it
must read and write at least. Errors of o and of the final state are relative to the recurrence in
fp64.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from kernel_time import idle_host_us, microseconds
from peers import MAKERS, packed, shorten_autotuning, warm_gdn, warm_up, working
from records import lengths_of
from runner import ROOT, SECONDS, relative_error, run, submodule

sys.path.insert(0, str(ROOT / "tests"))

HEADS, OURS = ((16, 64), (16, 32), (2, 8)), ("hopper", "portable")
CASES = [(B, T, *h) for h in HEADS for B, T in ((1, 2048), (1, 8192), (1, 32768), (4, 8192))]
CASES += [(B, T, 16, 32) for B, T in ((4, 2048), (8, 1024), (8, 4096))] + [(1, 8192, 48, 48)]
PACKED = ((24576, 8192), (2048,) * 4, (1024,) * 8, (128,) * 64)  # lengths of sequences
CASES += [(lengths, sum(lengths), 16, 32) for lengths in PACKED]
ARGUMENTS = {
    "--only": {"nargs": "*", "default": (*OURS, *MAKERS), "help": "default: all"},
    "--gates": {"nargs": "*", "default": ("slow", "qwen")},
    "--rows": {"nargs": "*", "help": 'as printed, "16/64, 2048"; default: all'},
    **SECONDS,
}


def tensors(B, T, H, HV, gates, seed=0, device="cuda"):
    """q, k, v, g, beta, states of zeros and cu_seqlens: of B sequences of T tokens, or packed where
    B is a tuple of lengths."""
    torch.manual_seed(seed)
    lengths, B = (B, 1) if isinstance(B, tuple) else ((T,) * B, B)
    bounds = torch.tensor((0, *lengths), device=device).cumsum(0)
    q, k = torch.randn(2, B, T, H, 128, device=device).bfloat16().unbind(0)
    v = torch.randn(B, T, HV, 128, device=device).bfloat16()
    raw = torch.randn(B, T, HV, device=device)
    decay = torch.empty(HV, device=device).uniform_(0.01, 16)
    g = -decay * F.softplus(raw * 0.1 + 1) if gates == "qwen" else F.logsigmoid(raw + 4)
    beta = torch.rand(B, T, HV, device=device)
    state = torch.zeros(len(lengths), HV, 128, 128, device=device)
    return q, k, v, g, beta, state, bounds


def ours(package, name, x):
    """The public function; for the portable kernels with dispatch held to them."""
    dispatch = submodule("runtime.dispatch")
    *given, state, _ = x
    public = partial(
        package.chunk_gated_delta_rule, *given, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=packed(x),
    )  # fmt: skip

    def portable():
        with dispatch.force("portable"):
            return public()

    call = portable if name == "portable" else public
    with dispatch.served() as record:
        call()
    if record["gdn_chunk_fwd"] != [name]:
        raise ImportError(f"{name} does not serve this call")
    return call


def exact(x) -> tuple:
    """o and the final state in fp64."""
    from fp64_recurrence import recurrence

    *given, state, bounds = x
    o, final, _ = recurrence(*given, bounds, 128**-0.5, True, state)
    return o.unflatten(0, given[0].shape[:2]), final


@torch.no_grad()
def compare(package, B, T, H, HV, gates, only) -> dict:
    x = tensors(B, T, H, HV, gates)
    makers = {name: partial(ours, package, name, x) for name in OURS}
    makers.update({name: partial(make, x) for name, make in MAKERS.items()})
    wanted = [name for name in makers if name in only]
    found, want = working({name: makers[name] for name in wanted}), exact(x)
    lengths = {"lengths": B} if isinstance(B, tuple) else {"B": B}
    return {
        **lengths, "T": T, "heads": [H, HV], "gates": gates,
        "us": microseconds(found, rounds=3, rep_ms=6),
        "host_us": {name: idle_host_us(call) for name, call in found.items()},
        "error": {name: list(map(relative_error, call(), want)) for name, call in found.items()},
    }  # fmt: skip


@torch.no_grad()
def prepare_time() -> dict:
    """The prepare kernels alone at 16/64 and 32768 tokens, and a copy of as many bytes."""
    calls = submodule("gdn.call")
    q, k, v, g, beta, *_ = tensors(1, 32768, 16, 64, "qwen")
    options = calls.GdnOptions(128**-0.5, use_qk_l2norm=True)
    call = calls.GdnCall(q, k, v, g, beta, *(None,) * 5, options)
    folders = {"prepare": "gdn.portable.prepare", "prepare_hopper": "gdn.hopper.plan"}
    kernels = {name: submodule(path).Prepare(call) for name, path in folders.items()}
    args = (q, k, g, beta, None, None, None)
    blocks = kernels["prepare"](*args)
    moved = sum(y.numel() * y.element_size() for y in (q, k, g, beta, *blocks))
    source = torch.randn(moved // 4, device="cuda").bfloat16()  # read and written: `moved` bytes
    target = torch.empty_like(source)
    times = {name: partial(prepare, *args) for name, prepare in kernels.items()}
    times["copy"] = lambda: target.copy_(source)
    return {"bytes": moved, **microseconds(times)}


def chosen(options) -> list:
    def label(B, T, H, HV) -> str:
        if isinstance(B, tuple):
            return f"{H}/{HV}, packed {lengths_of(B)}"
        return f"{H}/{HV}, {T}" if B == 1 else f"{H}/{HV}, {B} x {T}"

    return [case for case in CASES if not options.rows or label(*case) in options.rows]


def rows(package, options):
    if set(options.only) & {"fla", "aiter", "flashqla"} and not options.compiled:
        warm_up()  # they compile for minutes
    shorten_autotuning()
    options.facts["prepare"] = prepare_time()
    for case in chosen(options):
        for gates in options.gates:
            yield compare(package, *case, gates, options.only)


def record(options) -> str:
    return "_".join(["gdn_chunk", *sorted(set(options.only) & set(MAKERS))])


if __name__ == "__main__":
    run(
        __doc__,
        record,
        rows,
        ARGUMENTS,
        lambda options: warm_gdn(tensors, chosen(options), options),
    )
