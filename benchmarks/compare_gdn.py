"""Kernel time, eager host time and errors of GDN prefill against the peers that are installed.

    python benchmarks/compare_gdn.py [--json FILE] [--plot FILE.png]     on a GPU

Head dim 128, bf16, l2norm of q and k in the call, initial and final state, two regimes of gates:
"qwen" as Qwen3.5 initialises them (A from 0.01 to 16), "slow" logsigmoid(n + 4). Peers: FLA's
Triton kernels (FLA_FLASH_QLA=0 and FLA_TILELANG=0 keep FLA to them; not on the rows of four
sequences), aiter's chunk_gated_delta_rule_opt_vk (tuned; GATED_DELTA_RULE_TRITON_AUTOTUNE=0 takes
its defaults), FlashInfer, FlashQLA: see gdn_peers.py. `prepare` is our first
kernel alone, `copy` a copy of what it must read and write at least. Errors of o and of the final
state are relative to the recurrence in fp64. Prints the README's table at the end.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from gdn_peers import MAKERS, WARMED, warm
from kernel_time import RESULTS, ROOT, load_package, microseconds, save, warm_up

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

    folders = {"prepare": "gdn.portable.prepare", "prepare_hopper": "gdn.hopper.chunk"}
    kernels = {
        name: importlib.import_module(f"{package.__name__}.{path}").gdn_prepare
        for name, path in folders.items()
    }
    q, k, _, g, beta, _ = tensors(1, 32768, 16, 64, "qwen")
    args = (q, k, g, beta, None, None, None, 128**-0.5, True, False, False)
    blocks = kernels["prepare"](*args)
    moved = sum(y.numel() * y.element_size() for y in (q, k, g, beta, *blocks))
    source = torch.randn(moved // 4, device="cuda").bfloat16()  # read and written: `moved` bytes
    target = torch.empty_like(source)
    times = {name: (lambda f=f: f(*args)) for name, f in kernels.items()}
    times["copy"] = lambda: target.copy_(source)
    return {"bytes": moved, **microseconds(times)}


def label(B, T, H, HV) -> str:
    return f"{H}/{HV}, {T}" if B == 1 else f"{H}/{HV}, {B} x {T}"


def label_of(row) -> str:
    return label(row["B"], row["T"], *row["heads"])


def plot(rows, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    regimes = [gates for gates in GATES if any(row["gates"] == gates for row in rows)]
    size = (11, 3.6 * len(regimes))
    figure, all_axes = plt.subplots(len(regimes), figsize=size, squeeze=False, layout="constrained")
    names = [n for n in (*OURS, *PEERS) if any(n in row["us"] for row in rows)]
    width = 0.8 / len(names)
    for gates, axes in zip(regimes, all_axes[:, 0]):
        mine = [row for row in rows if row["gates"] == gates]
        for i, name in enumerate(names):
            heights = [r["us"].get(name, float("nan")) / min(r["us"].values()) for r in mine]
            axes.bar([j + i * width for j in range(len(mine))], heights, width, label=name)
        marks = [label_of(row).replace(", ", "\n") for row in mine]
        axes.set_xticks([j + 0.4 - width / 2 for j in range(len(mine))], marks, fontsize=8)
        axes.set_ylabel("kernel time, best of the row = 1")
        axes.set_title(f"GDN prefill, head dim 128, bf16, gates: {gates}")
        axes.legend()
    figure.savefig(path, dpi=150)


def table(rows) -> str:
    """In Markdown: milliseconds, ours over FlashInfer's, and errors of o and of the final state; in
    each cell one figure for every regime of gates."""
    names = [n for n in (*OURS, *PEERS) if any(n in row["us"] for row in rows)]
    regimes = [gates for gates in GATES if any(row["gates"] == gates for row in rows)]
    ratios = [("hopper", "flashinfer"), ("fla", "hopper"), ("fla", "portable")]
    ratios += [("flashqla", "hopper"), ("aiter", "hopper"), ("aiter", "portable")]
    ratios = [pair for pair in ratios if set(pair) <= set(names)]
    checked = [n for n in ("hopper", "flashinfer", "flashqla", "aiter") if n in names]
    heads = ["q/k heads / v heads, tokens", *names, *(f"{a} / {b}" for a, b in ratios)]
    heads += [f"errors, {name}" for name in checked]

    def ratio(us, a, b):
        return f"{us[a] / us[b]:.2f}" if a in us and b in us else ""

    def errors_of(row, name):
        found = row["error"].get(name)
        return " ".join(f"{e * 1e3:.1f}e-3" for e in found) if found else ""

    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for case in dict.fromkeys(map(label_of, rows)):
        mine = [r for g in regimes for r in rows if label_of(r) == case and r["gates"] == g]
        cells = [[f"{r['us'][n] / 1e3:.3f}" if n in r["us"] else "" for r in mine] for n in names]
        cells += [[ratio(r["us"], *pair) for r in mine] for pair in ratios]
        cells += [[errors_of(r, n) for r in mine] for n in checked]
        lines.append(
            "| " + " | ".join([case, *(" / ".join(filter(None, c)) for c in cells)]) + " |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "gdn_chunk.json")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", nargs="*", default=(*OURS, *PEERS), help="default: all")
    parser.add_argument("--gates", nargs="*", default=GATES)
    parser.add_argument("--rows", nargs="*", help='as printed, "16/64, 2048"; default: all')
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after this long")
    parser.add_argument("--show", action="store_true", help="the record in --json, without timing")
    parser.add_argument("--compiled", action="store_true", help="warm nothing up before")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [case for case in CASES if not options.rows or label(*case) in options.rows]
    if options.warm:
        warm(tensors, cases, options.only, *map(int, options.warm.split("/")))
        return
    if options.show:
        rows = json.loads(options.json.read_text())["rows"]
    else:
        rows = timed(options, cases)
    print(table(rows))
    if options.plot and rows:
        plot(rows, options.plot)


def timed(options, cases) -> list:
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
    return rows


if __name__ == "__main__":
    main()
