"""The SwiGLU kernels as their launchers compile them, for tools/compile_all.py."""

import json

from compile_all import PACKAGE, Variant

CONFIGS = PACKAGE / "configs"
ANY = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


def _config(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def _portable(name, config, targets, dtype="bf16", even=True, stride_k=1, bias=False):
    """stride_k=1: weights as in nn.Linear; None: the transposed Wf."""
    config = dict(config)
    options = {k: config.pop(k) for k in ("num_warps", "num_stages")}
    signature = {f"{p}_ptr": f"*{dtype}:16" for p in ("x", "w_gate", "w_up", "z")}
    signature.update(dict.fromkeys(("M", "N"), "i32"), K="i32:16", stride_x="i32:16")
    constexprs = {"b_gate_ptr": None, "b_up_ptr": None}
    if bias:
        signature.update(dict.fromkeys(constexprs, f"*{dtype}:16"))
        constexprs = {}
    if stride_k == 1:
        signature["stride_n"] = "i32:16"
        constexprs["stride_k"] = 1
    else:
        signature["stride_k"] = "i32:16"
        constexprs["stride_n"] = 1
    constexprs.update(config, ACTIVATION="silu", PRECISION="ieee", EVEN_K=even)
    return Variant(
        name, "portable.swiglu", "_swiglu_fwd_kernel", signature, constexprs, options, targets
    )


def _block(*sizes, dtype="bf16") -> str:
    return f"tensordesc<{dtype}[{', '.join(map(str, sizes))}]>"


def _hopper(name, tile, targets, halves=False, bias=False, activation="silu", dtype="bf16"):
    BM, BN, BK = (tile[f"BLOCK_{d}"] for d in "MNK")
    signature = {
        "x_desc": _block(BM, BK, dtype=dtype),
        "w_desc": _block(2, BN, BK, dtype=dtype),
        "z_desc": _block(BM, BN, dtype=dtype),
        **dict.fromkeys(("M", "N", "K", "whole", "group"), "i32"),
    }
    constexprs = {"w_half_desc": None, "z_half_desc": None, "b_gate_ptr": None, "b_up_ptr": None}
    if halves:
        signature["w_half_desc"] = _block(2, BN // 2, BK, dtype=dtype)
        signature["z_half_desc"] = _block(BM, BN // 2, dtype=dtype)
    if bias:
        signature.update(dict.fromkeys(("b_gate_ptr", "b_up_ptr"), f"*{dtype}:16"))
    constexprs.update(ACTIVATION=activation, UP_FIRST=False)
    constexprs.update(BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK)
    options = {k: tile[k] for k in ("num_warps", "num_stages")}
    return Variant(
        name, "hopper.swiglu", "_swiglu_fwd_kernel", signature, constexprs, options, targets
    )


def _wf(name, tile, targets):
    BM, BN, BK = (tile[f"BLOCK_{d}"] for d in "MNK")
    signature = {
        "x_desc": _block(BM, BK),
        "w_gate_desc": _block(BK, BN),
        "w_up_desc": _block(BK, BN),
        "z_desc": _block(BM, BN),
        **dict.fromkeys(("M", "N", "K", "group"), "i32"),
    }
    constexprs = {"b_gate_ptr": None, "b_up_ptr": None, "ACTIVATION": "silu"}
    constexprs.update(BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK)
    options = {k: tile[k] for k in ("num_warps", "num_stages")}
    return Variant(
        name, "hopper.swiglu", "_swiglu_wf_fwd_kernel", signature, constexprs, options, targets
    )


def _size(config: dict) -> str:
    sizes = "x".join(str(config[f"BLOCK_{d}"]) for d in "MNK")
    return f"{sizes},warps={config['num_warps']},stages={config['num_stages']}"


def _all() -> list:
    found = {}

    def add(variant):
        found.setdefault(variant.name, variant)

    general = _config("portable_swiglu_fwd")
    for config in [general["default"]] + [e["config"] for e in general["tuned"]]:
        add(_portable(f"portable_swiglu_fwd,{_size(config)}", config, ANY))
    add(_portable("portable_swiglu_fwd,uneven", general["default"], ANY, even=False))
    add(_portable("portable_swiglu_fwd,Wf", general["default"], ANY, stride_k=None))
    add(_portable("portable_swiglu_fwd,fp16,bias", general["default"], ANY, "fp16", bias=True))
    h200 = "portable_swiglu_fwd,device_name=NVIDIA_H200"
    if (CONFIGS / f"{h200}.json").exists():
        for config in [e["config"] for e in _config(h200)["tuned"]]:
            add(_portable(f"portable_swiglu_fwd,{_size(config)}", config, ("sm_90",)))
    for tile in _config("hopper_swiglu_fwd")["default"]["tiles"]:
        add(_hopper(f"hopper_swiglu_fwd,{_size(tile)}", tile, ("sm_90", "sm_100", "sm_120")))
        add(_wf(f"hopper_swiglu_wf_fwd,{_size(tile)}", tile, ("sm_90", "sm_100", "sm_120")))
    for tile in _config("hopper_swiglu_fwd,device_name=NVIDIA_H200")["default"]["tiles"]:
        add(_hopper(f"hopper_swiglu_fwd,{_size(tile)}", tile, ("sm_90",)))
        add(_wf(f"hopper_swiglu_wf_fwd,{_size(tile)}", tile, ("sm_90",)))
        if tile["half_cost"]:
            add(_hopper(f"hopper_swiglu_fwd,{_size(tile)},halves", tile, ("sm_90",), True))
            name = f"hopper_swiglu_fwd,{_size(tile)},halves,bias,gelu,fp16"
            add(_hopper(name, tile, ("sm_90",), True, True, "gelu_tanh", "fp16"))
    return list(found.values())


VARIANTS = _all()
