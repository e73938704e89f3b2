"""NVIDIA's compute-sanitizer over the Hopper path of GDN prefill, and over Kimi Delta Attention.

    python tests/sanitize_gdn.py memcheck|racecheck|synccheck [CASE ...]

A small grid: packed sequences with ragged tails and empty ones, pools with skipped rows,
checkpoints, one and two state warpgroups, segments. docs/gdn_hopper.md has the findings.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys

import torch
from conftest import load_package, submodule
from in_tree import parse_on_gpu

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck", "run")

PROCESSORS = {1: 10**9, 2: 0}  # by state warpgroups: what the launcher must believe


def inputs(lengths, H, HV, pool, packed, channels=False):
    """Tensors of a chunked call by name, and of its states."""
    count, device = len(lengths), "cuda"
    B, T = (1, sum(lengths)) if packed else (count, lengths[0])
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device) if packed else None
    q, k, v = (torch.randn(B, T, n, 128, device=device).bfloat16() for n in (H, H, HV))
    g = -torch.rand(B, T, HV, *[128] * channels, device=device)
    beta = torch.rand(B, T, HV, device=device)
    rows = [count, -1, *range(count)][:count]
    state = torch.randn(count + 1 if pool else count, HV, 128, 128, device=device)
    indices = torch.tensor(rows, device=device) if pool else None
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
    return {**x, "state_indices": indices, "cu_seqlens": cu}


def call(lengths, W=1, H=1, HV=2, pool=False, every=0, v_first=False, cut=False, packed=True):
    gdn, gdn_plan = submodule("gdn.hopper.chunk"), submodule("gdn.hopper.plan")
    x = inputs(lengths, H, HV, pool, packed)
    chip = gdn_plan.device
    segments, processors = gdn_plan.count_slots, chip.multiprocessor_count
    if not cut:
        gdn_plan.count_slots = lambda N, *_: (1, N)
    chip.multiprocessor_count = lambda index: processors(index) if cut else PROCESSORS[W]
    calls = submodule("gdn.call")
    options = calls.GdnOptions(
        128**-0.5, use_qk_l2norm=True, state_v_first=v_first, output_final_state=True,
        checkpoint_every=every,
    )  # fmt: skip
    made = calls.GdnCall(**x, A_log=None, dt_bias=None, options=options)
    o, final, *_ = gdn.prepare_gdn_chunk_fwd(made)(*made.tensors)
    torch.cuda.synchronize()
    gdn_plan.count_slots, chip.multiprocessor_count = segments, processors
    assert torch.isfinite(o).all() and torch.isfinite(final).all()


def channels(lengths, H=2, HV=2, pool=False, every=0, v_first=False, packed=True, grad=False):
    """Kimi Delta Attention by its public function, and its gradient."""
    x = inputs(lengths, H, HV, pool, packed, True)
    leaves = [x[name].requires_grad_(grad) for name in ("q", "k", "v", "g", "beta")]
    o, final, *_ = load_package().chunk_kda(
        **x, use_qk_l2norm_in_kernel=True, output_final_state=True, checkpoint_every=every,
        state_v_first=v_first,
    )  # fmt: skip
    found = (o, final)
    if grad:
        found += torch.autograd.grad(o.float().square().sum(), leaves)
    torch.cuda.synchronize()
    assert all(torch.isfinite(y).all() for y in found)


def channel_tokens(T=1, v_first=False):
    """Tokens of three sequences in a pool, whose second row is a null slot."""
    x = inputs([T] * 3, 2, 2, True, False, True)
    x["state_indices"] = torch.tensor([2, -1, 0], device="cuda")
    o, pool = load_package().fused_recurrent_kda(
        **x, use_qk_l2norm_in_kernel=True, inplace_final_state=True, state_v_first=v_first
    )
    torch.cuda.synchronize()
    assert torch.isfinite(o).all() and torch.isfinite(pool).all() and not o[1].any()


CASES = {
    "packed, pool": lambda: call([70, 0, 1, 130], pool=True),
    "packed, pool, W=2": lambda: call([70, 0, 1, 130], 2, pool=True, v_first=True),
    "checkpoints": lambda: call([70, 0, 1, 130], every=64),
    "checkpoints, W=2": lambda: call([70, 0, 1, 130], 2, every=64, v_first=True),
    "equal": lambda: call([100, 100], packed=False, v_first=True),
    "equal, W=2": lambda: call([200, 200], 2, packed=False),
    "segments": lambda: call([4200], packed=False, HV=1, cut=True),
    "segments, packed, pool": lambda: call([4200, 70, 4100], HV=1, cut=True, pool=True),
    "kda, packed, pool": lambda: channels([70, 0, 1, 130], pool=True, v_first=True),
    "kda, checkpoints": lambda: channels([70, 0, 1, 130], H=1, every=64),
    "kda, gradient": lambda: channels([70, 0, 1, 130], H=1, grad=True),
    "kda, gradient, equal": lambda: channels([100, 100], packed=False, v_first=True, grad=True),
    "kda, tokens": channel_tokens,
    "kda, tokens, three": lambda: channel_tokens(3, v_first=True),
}


def main(script: str, cases: dict) -> int:
    """`script`, whose cases these are: run under a tool of compute-sanitizer, or as it is."""
    parser = argparse.ArgumentParser(prog=pathlib.Path(script).name)
    parser.add_argument("tool", choices=TOOLS, help="of compute-sanitizer; run: without it")
    parser.add_argument("cases", nargs="*", default=[], help=f"all, or some of: {', '.join(cases)}")
    options = parse_on_gpu(parser)
    unknown = [name for name in options.cases if name not in cases]
    if unknown:
        parser.error(f"no such case: {unknown[0]!r}")
    chosen = options.cases or list(cases)
    if options.tool != "run":
        if shutil.which("compute-sanitizer") is None:
            parser.error("compute-sanitizer, which comes with the CUDA toolkit, is not on PATH")
        command = ["compute-sanitizer", "--tool", options.tool, sys.executable, script, "run"]
        return subprocess.run([*command, *chosen]).returncode
    torch.manual_seed(0)
    for name in chosen:
        print(f"case: {name}", flush=True)
        cases[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(__file__, CASES))
