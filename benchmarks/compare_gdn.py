"""Kernel time, eager host time and errors of GDN prefill against the peers that are installed.

    python benchmarks/compare_gdn.py --only hopper portable fla [--json FILE]     on a GPU

Head dim 128, bf16, l2norm of q and k in the call, initial and final state, two regimes of gates:
"qwen" as Qwen3.5 initialises them (A from 0.01 to 16), "slow" logsigmoid(n + 4). Peers: FLA's
Triton kernels (FLA_FLASH_QLA=0 and FLA_TILELANG=0 keep FLA to them; not on the rows of four
sequences), aiter's chunk_gated_delta_rule_opt_vk (tuned; GATED_DELTA_RULE_TRITON_AUTOTUNE=0 takes
its defaults), FlashInfer, FlashQLA: see gdn_peers.py. `prepare` is our first
kernel alone, `copy` a copy of what it must read and write at least. Errors of o and of the final
state are relative to the recurrence in fp64. page.py makes the table, pictures.py the picture.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from gdn_peers import MAKERS, WARMED, warm
from kernel_time import ROOT, load_package, microseconds, parse_on_gpu, record_of, save, warm_up

sys.path.insert(0, str(ROOT / "tests"))

CASES = [
    (B, T, H, HV)
    for H, HV in ((16, 64), (16, 32), (2, 8))
    for B, T in ((1, 2048), (1, 8192), (1, 32768), (4, 8192))
]
FLA_CASES = [(1, T, H, HV) for H, HV in ((16, 64), (16, 32), (2, 8)) for T in (2048, 8192, 32768)]
GATES = ("slow", "qwen")
OURS = ("hopper", "portable")
PEERS = tuple(MAKERS)


def tensors(B, T, H, HV, gates, seed=0):
    torch.manual_seed(seed)
    q, k = torch.randn(2, B, T, H, 128, device="cuda").bfloat16().unbind(0)
    v = torch.randn(B, T, HV, 128, device="cuda").bfloat16()
    raw = torch.randn(B, T, HV, device="cuda")
    decay = torch.empty(HV, device="cuda").uniform_(0.01, 16)
    g = -decay * F.softplus(raw * 0.1 + 1) if gates == "qwen" else F.logsigmoid(raw + 4)
    beta = torch.rand(B, T, HV, device="cuda")
    state = torch.zeros(B, HV, 128, 128, device="cuda")
    return q, k, v, g, beta, state


def ours(package, name, x):
    """The public function; for the portable kernels with dispatch held to them."""
    import importlib

    dispatch = importlib.import_module(f"{package.__name__}.runtime.dispatch")
    q, k, v, g, beta, state = x

    def public():
        return package.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
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


def host(call) -> float:
    """Median microseconds of an eager call, launch by launch, the GPU idle before each."""
    for _ in range(10):
        call()
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def errors(x, found) -> dict:
    """Relative errors of o and of the final state of each call."""
    from fp64_recurrence import recurrence

    q, k, v, g, beta, state = x
    B, T = q.shape[:2]
    cu_seqlens = torch.arange(B + 1, device="cuda") * T
    o, final, _ = recurrence(q, k, v, g, beta, cu_seqlens, 128**-0.5, True, state)
    o = o.unflatten(0, (B, T))
    out = {}
    for name, call in found.items():
        pairs = zip(call(), (o, final))
        out[name] = [((y.double() - z).norm() / z.norm()).item() for y, z in pairs]
    return out


def calls(package, x, only) -> dict:
    found = {}
    case = (*x[0].shape[:3], x[2].shape[2])
    makers = {name: (lambda name=name: ours(package, name, x)) for name in OURS}
    makers.update({name: (lambda make=make: make(x)) for name, make in MAKERS.items()})
    for name, maker in makers.items():
        if name not in only or (name == "fla" and case not in FLA_CASES):
            continue
        try:
            call = maker()
            call()
            found[name] = call
        except Exception as error:  # a peer that is not installed or refuses is left out
            said = [type(error).__name__, *str(error).strip().splitlines()]
            print(f"{name} is left out: {said[-1][:120]}")
    return found


def compare(package, B, T, H, HV, gates, only) -> dict:
    x = tensors(B, T, H, HV, gates)
    row = {"B": B, "T": T, "heads": [H, HV], "gates": gates}
    with torch.no_grad():
        found = calls(package, x, only)
        row["us"] = microseconds(found, rounds=3, rep_ms=6)
        row["host_us"] = {name: host(call) for name, call in found.items()}
        row["error"] = errors(x, found)
    print(row, flush=True)
    return row


def prepare_time(package) -> dict:
    """The prepare kernels alone at 16/64 and 32768 tokens, and a copy of as many bytes."""
    import importlib

    def module(path):
        return importlib.import_module(f"{package.__name__}.{path}")

    calls = module("gdn.call")
    q, k, v, g, beta, _ = tensors(1, 32768, 16, 64, "qwen")
    options = calls.GdnOptions(128**-0.5, use_qk_l2norm=True)
    call = calls.GdnCall(q, k, v, g, beta, *(None,) * 5, options)
    folders = {"prepare": "gdn.portable.prepare", "prepare_hopper": "gdn.hopper.plan"}
    kernels = {name: module(path).Prepare(call) for name, path in folders.items()}
    args = (q, k, g, beta, None, None, None)
    blocks = kernels["prepare"](*args)
    moved = sum(y.numel() * y.element_size() for y in (q, k, g, beta, *blocks))
    source = torch.randn(moved // 4, device="cuda").bfloat16()  # read and written: `moved` bytes
    target = torch.empty_like(source)
    times = {name: (lambda f=f: f(*args)) for name, f in kernels.items()}
    times["copy"] = lambda: target.copy_(source)
    return {"bytes": moved, **microseconds(times)}


def label(B, T, H, HV) -> str:
    return f"{H}/{HV}, {T}" if B == 1 else f"{H}/{HV}, {B} x {T}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="default: gdn_chunk_<peers>.json in results/")
    parser.add_argument("--only", nargs="*", default=(*OURS, *PEERS), help="default: all")
    parser.add_argument("--gates", nargs="*", default=GATES)
    parser.add_argument("--rows", nargs="*", help='as printed, "16/64, 2048"; default: all')
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after this long")
    parser.add_argument("--compiled", action="store_true", help="warm nothing up before")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parse_on_gpu(parser)
    cases = [case for case in CASES if not options.rows or label(*case) in options.rows]
    if options.warm:
        warm(tensors, cases, options.only, *map(int, options.warm.split("/")))
        return
    peers = [name for name in options.only if name in PEERS]
    options.json = options.json or record_of("gdn_chunk", peers)
    timed(options, cases)


def timed(options, cases) -> None:
    warmed = [name for name in WARMED if name in options.only]
    if warmed and not options.compiled:
        chosen = ["--rows", *options.rows] if options.rows else []
        warm_up(__file__, "--only", *warmed, *chosen)
    package = load_package()
    rows, start = [], time.perf_counter()
    alone = prepare_time(package)
    print(alone, flush=True)
    for case in cases:
        for gates in options.gates:
            if time.perf_counter() - start < options.seconds:
                rows.append(compare(package, *case, gates, options.only))
                save(options.json, rows, prepare=alone)


if __name__ == "__main__":
    main()
