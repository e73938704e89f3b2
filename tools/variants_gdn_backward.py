"""The kernels of the GDN gradient as their launchers compile them, for tools/compile_all.py.

The tables for chips without one of their own, and those for the H200.
"""

import dataclasses
import json

import triton.language as tl
from compile_all import PACKAGE, Variant, load

NVIDIA = ("sm_80", "sm_90", "sm_100", "sm_120")
STRIDES = ("i32:16",) * 3
LOOPS = ("states", "query", "key")
GATES = ("i32", "i32", "i32")
TYPES = {  # of pointers that are not in the inputs' dtype
    "A_log": "fp32", "dt_bias": "fp32", "f": "fp32", "cumulative": "fp32", "parts": "fp32",
    "ends": "fp32", "s0": "fp32", "ds0": "fp32", "ds1": "fp32", "by_query": "fp32",
    "by_key": "fp32", "sums": "fp32",
}  # fmt: skip
CONSTEXPRS = {
    "cu_ptr": None, "H": 16, "R": 2, "K": 128, "V": 128, "NORM": True, "BETA_MAX": 1.0,
    "SMALL": 1e-12, "FEW_TOKENS": 8, "LOW": tl.bfloat16, "BLOCK_K": 64, "PREC": "tf32", "HV": 32,
    "NQ": 4, "NK": 4,
}  # fmt: skip


def _variant(phase: str, config: dict, targets, where="", dtype="bf16", K=128) -> Variant:
    module, kernel = f"gdn.portable.backward_{phase}", f"_{phase}_bwd_kernel"
    config = dict(config)
    options = {"num_warps": config.pop("num_warps"), "num_stages": 3}
    known = {**CONSTEXPRS, "HEADS": 32 if phase == "beta" else 2, "K": K, "V": K, **config}
    known["NQ"] = known["NK"] = K // 32
    if dtype == "fp32":
        known.update(LOW=tl.float32, PREC="tf32x3")
    signature, constexprs = {}, {}
    for name in getattr(load(module), kernel).arg_names:
        if name in known:
            constexprs[name] = known[name]
        elif name.endswith("_ptr"):
            signature[name] = f"*{TYPES.get(name[:-4], dtype)}:16"
        elif name.endswith("_strides"):
            state = name.startswith(("s0", "ds"))
            gate = name.startswith(("g_", "beta_"))
            signature[name] = (*STRIDES, "i32") if state else GATES if gate else STRIDES
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    name = f"gdn_backward_{phase} {dtype}{where}"
    return Variant(name, module, kernel, signature, constexprs, options, targets)


def _table(name: str) -> dict:
    return json.loads((PACKAGE / "configs" / f"{name}.json").read_text())


def _on_all(phase: str, config: dict, *args) -> tuple:
    """For NVIDIA, and for AMD with what its launcher makes of the configuration."""
    amd = load("gdn.portable.backward").for_waves(config)
    there = _variant(phase, amd, ("gfx942",), *args)
    exact = {k: "ieee" if k == "PREC" else v for k, v in there.constexprs.items()}
    return _variant(phase, config, NVIDIA, *args), dataclasses.replace(there, constexprs=exact)


def _registers(phase: str, config: dict, nvidia: Variant, amd: Variant, *args) -> tuple:
    """In fp32, where chips with tensor memory have a form of their own."""
    own = load("gdn.portable.backward").for_registers(phase, config, 128)
    others = tuple(target for target in nvidia.targets if target != "sm_100")
    nvidia = dataclasses.replace(nvidia, targets=others)
    return nvidia, _variant(phase, own, ("sm_100",), *args), amd


def _all():
    for phase, config in _table("portable_gdn_chunk_bwd")["default"].items():
        yield from _on_all(phase, config)
    for entry in _table("portable_gdn_chunk_bwd_wide")["tuned"]:
        half = entry["sizes"]["bytes"] == 2
        sizes = (" K=256", "bf16", 256) if half else ("", "fp32", 128)
        for phase in LOOPS:
            found = _on_all(phase, entry["config"][phase], *sizes)
            yield from found if half else _registers(phase, entry["config"][phase], *found, *sizes)
    config = _table("portable_gdn_chunk_bwd,device_name=NVIDIA_H200")["default"]
    for phase in LOOPS:
        yield _variant(phase, config[phase], ("sm_90",), " H200")


VARIANTS = list(_all())
