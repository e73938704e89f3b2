"""Compiles the calls that take the most shared memory, for chips that differ in how much a program
may have, and fails where one takes more. Without a GPU.

    python tools/widest.py [--chip sm_86] [--call "gdn training"] [--kernel key]
"""

import argparse
import itertools
import sys
from typing import List, Tuple

import compile_all
import launched
from launched import BF16, FP16, FP32, torch

# Settings are for a compute capability or for all, so one chip of each will do. sm_80, sm_86 and
# sm_89 have the same ones: what fits into sm_86 fits into all three.
CHIPS = {
    **{chip: launched.CHIPS[chip] for chip in ("sm_80", "sm_90", "sm_100", "sm_120")},
    "sm_86": ("NVIDIA_A10", (8, 6), 72),
    "sm_89": ("NVIDIA_L4", (8, 9), 58),
}
# bytes that a program may have, by the CUDA C++ Programming Guide's table of compute capabilities
SHARED = {
    "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448,
    "sm_120": 101376,
}  # fmt: skip


def _gated_norm(kernel, D, dtype=FP32):
    x, gate, weight = (launched.values(*n, D, dtype=dtype, grad=True) for n in ((99,), (99,), ()))
    return launched.with_gradients(lambda: kernel.rms_norm_gated(x, gate, weight), x, gate, weight)


def _calls() -> dict:
    """By the sizes, dtypes and options that settings depend on: the widest of each, and what lies
    just above a size at which they change."""
    found, calls = {}, launched.named_calls
    rule, states = launched._rule, dict(state=FP32, packed=(700, 1348))
    for dtype, (K, V) in itertools.product((BF16, FP32), ((128, 128), (16, 256), (256, 256))):
        sizes = dict(K=K, V=V, dtype=dtype)
        kind = f"{str(dtype)[6:]}, head dims {K} and {V}"
        found |= calls(rule, f"gdn training, {kind}", {"": dict(grad=True, **states)}, **sizes)
        pool = dict(pool=torch.int64, checkpoints=64, padded=True, raw=True, **states)
        found |= calls(rule, f"gdn prefill, {kind}", {"": pool}, **sizes)
        if K <= 128:
            long = dict(T=32768, H=2, HV=4, state=FP32)
            found |= calls(rule, f"gdn prefill, long, {kind}", {"": long}, **sizes)
    kind = "kda training, bfloat16, head dims 128 and 256"
    found |= calls(launched._channels, kind, {"": dict(grad=True, raw=True, **states)}, V=256)
    for rows, drafts in ((128, 1), (64, 16)):
        table = {str(state)[6:]: dict(state=state, dtype=state) for state in (BF16, FP32)}
        more = dict(B=8, T=drafts, K=256, V=256, R=rows, max_tokens=drafts)
        found |= calls(launched._replay, f"gdn replay, ring of {rows}", table, **more)
    for D in (80, 96, 160, 256):
        table = {str(mask): dict(mask=mask) for mask in (None, torch.bool, FP32)}
        more = dict(B=2, HQ=71, HK=1, dtype=FP16)
        found |= calls(launched._kvcache, f"attention decode, head dim {D}", table, D=D, **more)
    for angles in (0, 1, 2):
        wide = dict(HQ=16, HK=16, D=1024, R=1024, norm="all", dtype=FP32, tables=FP32, weights=FP32)
        table = {"gradient": dict(T=100, grad=True), "one token": dict(cache=True)}
        kind = f"attention rotary, angles {angles}"
        found |= calls(launched._rotary, kind, table, angles=angles, **wide)
    for tokens in (1, 8, 16, 17, 33, 64):
        table = {"": dict(K=4096), "one weight": dict(K=9216, rows=(2560,))}
        found |= calls(launched._projections, f"projection, {tokens} tokens", table, B=tokens)
    for D in (5120, 8192, 8200, 12288, 16384, 20000):
        alone = dict(added=False)
        table = {"fp32": dict(dtype=FP32), "fp32, alone": dict(dtype=FP32, **alone), "alone": alone}
        more = dict(M=4096, D=D, weight=FP32, grad=True, casting_mode="gemma")
        found |= calls(launched._rms_norm, f"rms_norm training, {D} columns", table, **more)
    table = {f"{D} channels": dict(D=D) for D in (64, 1024, 16384)}
    found |= calls(_gated_norm, "gdn_layer norm", table)
    oss = dict(E=32, K=4, H=2880, N=2880, turned=True, biased=True, interleaved=True)
    oss |= dict(activation="swigluoai", limit=7.0)
    table = {f"T {T}{name}": dict(T=T, grad=True, **more) for T in (40, 1000, 8192)
             for name, more in (("", {}), (", gpt-oss", oss))}  # fmt: skip
    table |= {
        "T 1, 64 slots": dict(T=1, K=64),
        "T 4096, 1024 experts": dict(T=4096, E=1024, H=64, N=64),
    }
    found |= calls(launched._experts, "experts", table)
    table = {f"M {M}": dict(M=M) for M in (8, 64, 512, 4096)}
    return found | calls(launched._swiglu, "swiglu forward", table)


def launches(chip: str, call: str = "", kernel: str = "") -> List[Tuple[str, object]]:
    """(call, record) of each kernel, once for each that differs; only of calls and kernels whose
    names hold these."""
    table = {name: make for name, make in _calls().items() if call in name}
    found: dict = {}
    for name, record in launched.launches_on(CHIPS[chip], table):
        if kernel in record.name:
            kind = tuple(map(str, (record.name, *record[2:6])))
            found.setdefault(kind, (name, record))
    return list(found.values())


def taken(call: str, chip: str, record) -> int:
    """Bytes of shared memory of a program."""
    report = compile_all.compile_one(call, chip, record)
    if report.error:
        raise RuntimeError(f"{chip}, {call}, {record.name}: {report.error}")
    return report.shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS)
    parser.add_argument("--call", default="", help="only calls whose name holds this")
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this")
    options = parser.parse_args()
    over = 0
    compile_all.print_row("call", "kernel", "chip", "shared/B", "note")
    compile_all.print_row(*["---"] * 5)
    for chip in [options.chip] if options.chip else CHIPS:
        for call, record in launches(chip, options.call, options.kernel):
            bytes_, most = taken(call, chip, record), SHARED[chip]
            over += bytes_ > most
            note = f"above {most}" if bytes_ > most else ""
            compile_all.print_row(call, record.name, chip, bytes_, note)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
