"""The GDN prefill kernels as their launchers compile them, for tools/compile_all.py."""

import json

from compile_all import PACKAGE, Variant, load

ANY = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
H200 = ("sm_90",)
STRIDES = ("i32:16",) * 3
STATE = ("i32:16",) * 4


def _config(name: str) -> dict:
    return json.loads((PACKAGE / "configs" / f"{name}.json").read_text())


def _split(config: dict):
    """A configuration as (constexprs, compiler options)."""
    options = {k: config[k] for k in ("num_warps", "num_stages", "maxnreg") if k in config}
    return {k: v for k, v in config.items() if k not in options}, options


def _pointers(dtype, *names):
    return {f"{name}_ptr": f"*{dtype}:16" for name in names}


def _packed(packed: bool):
    """(signature, constexprs) of cu_seqlens."""
    return ({"cu_ptr": "*i64"}, {}) if packed else ({}, {"cu_ptr": None})


def _prepare(name, targets, config, dtype="bf16", K=128, R=4, l2norm=True, packed=False, raw=False):
    prepare = load("common.gdn_prepare")
    constexprs, options = _split(config)
    cu, no_cu = _packed(packed)
    signature = {
        **_pointers(dtype, "q", "k", "tb", "p"),
        **_pointers("fp32", "g", "beta", "f", "decay"),
        **cu,
        "q_strides": STRIDES,
        "k_strides": STRIDES,
        "g_strides": ("i32", "i32", "i32"),
        "beta_strides": ("i32", "i32", "i32"),
        **dict.fromkeys(("T", "N", "NT"), "i32"),
        "scale": "fp32",
    }
    gate = ("A_log_ptr", "dt_bias_ptr")
    if raw:
        signature.update(dict.fromkeys(gate, "*fp32:16"))
    else:
        constexprs.update(dict.fromkeys(gate))
    constexprs.update(
        no_cu, H=16, R=R, K=K, L2NORM=l2norm, BETA_MAX=1.0 if raw else 0.0,
        **prepare.tiles(K, R), **prepare.precision(f"{dtype}", l2norm),
    )  # fmt: skip
    return Variant(
        name, "common.gdn_prepare", "_prepare_kernel", signature, constexprs, options, targets
    )


def _scan(name, targets, config, dtype="bf16", D=128, R=4, packed=False, carry=False, state="fp32"):
    constexprs, options = _split(config)
    cu, no_cu = _packed(packed)
    signature = {
        **_pointers(dtype, "q", "k", "v", "o", "tb", "p"),
        **_pointers(state, "s0", "s1"),
        **_pointers("fp32", "f"),
        **cu,
        **dict.fromkeys(("q_strides", "k_strides", "v_strides"), STRIDES),
        **dict.fromkeys(("s0_strides", "s1_strides"), STATE),
        **dict.fromkeys(("T", "N", "NS", "SEGMENT", "E"), "i32"),
    }
    constexprs.update(no_cu, index_ptr=None, mid_ptr=None)
    if carry:
        signature["carry_ptr"] = "*fp32:16"
    else:
        constexprs["carry_ptr"] = None
    constexprs.update(H=16, R=R, K=D, V=D, V_FIRST=False, BLOCK_K=_power(D))
    return Variant(
        name, "portable.gdn_scan", "_scan_kernel", signature, constexprs, options, targets
    )


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
