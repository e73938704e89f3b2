"""The kernels of the GDN gradient as their launchers compile them, for tools/compile_all.py.

Of Hopper's, the tables for the H200: others' states and keys, and small betas, spill a little.
"""

import json

import triton.language as tl
from compile_all import PACKAGE, Variant, load

OTHERS = ("sm_80", "sm_100", "sm_120", "gfx942")
STRIDES = ("i32:16",) * 3
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


def _variant(phase: str, config: dict, targets, where="") -> Variant:
    module, kernel = f"common.gdn_backward_{phase}", f"_{phase}_bwd_kernel"
    config = dict(config)
    options = {"num_warps": config.pop("num_warps"), "num_stages": 3}
    known = {**CONSTEXPRS, "HEADS": 32 if phase == "beta" else 2, **config}
    signature, constexprs = {}, {}
    for name in getattr(load(module), kernel).arg_names:
        if name in known:
            constexprs[name] = known[name]
        elif name.endswith("_ptr"):
            signature[name] = f"*{TYPES.get(name[:-4], 'bf16')}:16"
        elif name.endswith("_strides"):
            state = name.startswith(("s0", "ds"))
            gate = name.startswith(("g_", "beta_"))
            signature[name] = (*STRIDES, "i32") if state else GATES if gate else STRIDES
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    return Variant(
        f"gdn_backward_{phase} bf16{where}", module, kernel, signature, constexprs, options, targets
    )


def _configs(name: str) -> dict:
    return json.loads((PACKAGE / "configs" / f"{name}.json").read_text())["default"]


def _all():
    config = _configs("portable_gdn_chunk_bwd")
    for phase in ("states", "key", "beta"):
        yield _variant(phase, config[phase], OTHERS)
    for phase in ("query", "gates"):
        yield _variant(phase, config[phase], ("sm_90", *OTHERS))
    config = _configs("portable_gdn_chunk_bwd,device_name=NVIDIA_H200")
    for phase in ("states", "query", "key"):
        yield _variant(phase, config[phase], ("sm_90",), " H200")


VARIANTS = list(_all())
