"""The SwiGLU kernels as their launchers compile them, for tools/compile_all.py."""

import json

from compile_all import PACKAGE, Variant
from triton.experimental.gluon import language as gl

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
        name,
        "swiglu.portable.forward",
        "_swiglu_fwd_kernel",
        signature,
        constexprs,
        options,
        targets,
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
    optional = ("w_half_desc", "z_half_desc", "b_gate_ptr", "b_up_ptr")
    constexprs = dict.fromkeys(optional)
    if halves:
        signature["w_half_desc"] = _block(2, BN // 2, BK, dtype=dtype)
        signature["z_half_desc"] = _block(BM, BN // 2, dtype=dtype)
    if bias:
        signature.update(dict.fromkeys(("b_gate_ptr", "b_up_ptr"), f"*{dtype}:16"))
    constexprs.update(ACTIVATION=activation, UP_FIRST=False)
    constexprs.update(BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK)
    options = {k: tile[k] for k in ("num_warps", "num_stages")}
    return Variant(
        name, "swiglu.hopper.kernels", "swiglu_fwd_kernel", signature, constexprs, options, targets
    )


def _three_quarter(name, tile, targets):
    BM, BN, BK = (tile[f"BLOCK_{d}"] for d in "MNK")
    signature = {
        "x_desc": _block(BM, BK),
        "w_half_desc": _block(2, BN // 2, BK),
        "w_quarter_desc": _block(2, BN // 4, BK),
        "z_half_desc": _block(BM, BN // 2),
        "z_quarter_desc": _block(BM, BN // 4),
    }
    return _plain("three_quarter_fwd", name, tile, targets, signature, {"UP_FIRST": False})


def _wf(name, tile, targets):
    BM, BN, BK = (tile[f"BLOCK_{d}"] for d in "MNK")
    signature = {
        "x_desc": _block(BM, BK),
        "w_gate_desc": _block(BK, BN),
        "w_up_desc": _block(BK, BN),
        "z_desc": _block(BM, BN),
    }
    return _plain("wf_fwd", name, tile, targets, signature, {})


def _dx(name, tile, targets):
    BM, BN, BK = (tile[f"BLOCK_{d}"] for d in "MNK")
    signature = {"d_desc": _block(1, BM, BK), "w_desc": _block(1, BK, BN)}
    signature.update(dx_desc=_block(BM, BN // 2), **dict.fromkeys(("M", "N", "K", "group"), "i32"))
    constexprs = {"UP_FIRST": False, **{f"BLOCK_{d}": tile[f"BLOCK_{d}"] for d in "MNK"}}
    options = {k: tile[k] for k in ("num_warps", "num_stages")}
    module = "swiglu.hopper.backward"
    return Variant(name, module, "_swiglu_dx_kernel", signature, constexprs, options, targets)


def _gate(name, kernel, operands, targets):
    """A kernel of swiglu/portable/gate.py: pointers in front, no products."""
    signature = dict.fromkeys(operands, "*bf16:16")
    signature.update({f"stride_{kernel}": "i32:16"}, N="i32:16")
    constexprs = {"ACTIVATION": "silu", "BLOCK": 1024}
    module = "swiglu.portable.gate"
    return Variant(name, module, f"_{name[7:]}_kernel", signature, constexprs, {}, targets)


def _box(*shape: int, dtype: str = "bf16") -> str:
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), element)
    return f"tensordesc<{dtype}[{', '.join(map(str, shape))}],{layout!r}>"


def _tailed(name, kernel, operands, sizes, with_z=True, activation="silu", **constexprs):
    """A kernel of swiglu/hopper/training_kernels.py."""
    config = _config("hopper_swiglu_training")["default"]
    signature = {**operands, **dict.fromkeys((*sizes, "group"), "i32")}
    pointer = operands.get("gate_up_ptr", "*bf16:16")
    constexprs.update(ACTIVATION=activation, STAGES=config["STAGES"], REGISTERS=config["REGISTERS"])
    if with_z:
        signature["z_ptr"] = pointer
    else:
        constexprs["z_ptr"] = None
    options = {"num_warps": 8, "maxnreg": 168}
    module = "swiglu.hopper.training_kernels"
    return Variant(name, module, kernel, signature, constexprs, options, ("sm_90",))


def _tailed_all() -> list:
    BK = _config("hopper_swiglu_training")["default"]["BLOCK_K"]
    forward = {
        "x_desc": _box(128, BK),
        "w_desc": _box(2, 128, BK),
        "gate_up_desc": _box(128, 1, 64),
    }
    found = [
        _tailed(
            f"hopper_swiglu_saving_fwd,up_first={up_first}", "swiglu_saving_fwd_kernel",
            forward, "MNK", UP_FIRST=up_first,
        )
        for up_first in (False, True)
    ]  # fmt: skip
    for dtype, activation, with_z in (
        ("bf16", "silu", True), ("bf16", "silu", False), ("fp16", "gelu_tanh", True)
    ):  # fmt: skip
        operands = {
            "dy_desc": _box(128, BK, dtype=dtype),
            "w_down_desc": _box(BK, 256, dtype=dtype),
            "gate_up_ptr": f"*{dtype}:16",
        }
        name = f"hopper_swiglu_gradient,{dtype},{activation}" + (",z" if with_z else "")
        found.append(_tailed(name, "swiglu_gradient_kernel", operands, "MND", with_z, activation))
    return found


def _plain(kernel, name, tile, targets, signature, constexprs):
    """A kernel of swiglu/hopper/kernels.py without bias, by what its descriptors are."""
    signature = {**signature, **dict.fromkeys(("M", "N", "K", "group"), "i32")}
    constexprs = {**constexprs, "b_gate_ptr": None, "b_up_ptr": None, "ACTIVATION": "silu"}
    constexprs.update({f"BLOCK_{d}": tile[f"BLOCK_{d}"] for d in "MNK"})
    options = {k: tile[k] for k in ("num_warps", "num_stages")}
    module, kernel = "swiglu.hopper.kernels", f"swiglu_{kernel}_kernel"
    return Variant(name, module, kernel, signature, constexprs, options, targets)


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
        name, targets = f"hopper_swiglu_fwd,{_size(tile)}", ("sm_90",)
        if tile["columns"] != tile["BLOCK_N"]:
            add(_three_quarter(f"{name},three quarters", tile, targets))
            continue
        add(_hopper(name, tile, targets))
        add(_wf(f"hopper_swiglu_wf_fwd,{_size(tile)}", tile, targets))
        if tile["halves_cost"]:
            add(_hopper(f"{name},halves", tile, targets, True))
            add(_hopper(f"{name},halves,bias,gelu", tile, targets, True, True, "gelu_tanh", "fp16"))
    add(_gate("swiglu_gate_fwd", "in", ("gate_ptr", "up_ptr", "z_ptr"), ANY))
    add(_gate("swiglu_gate_bwd", "dz", ("dz_ptr", "gate_up_ptr", "z_ptr"), ANY))
    tile = _config("hopper_swiglu_dx")["default"]
    add(_dx(f"hopper_swiglu_dx,{_size(tile)}", tile, ("sm_90", "sm_100", "sm_120")))
    tile = _config("hopper_swiglu_dx,device_name=NVIDIA_H200")["default"]
    add(_dx(f"hopper_swiglu_dx,{_size(tile)}", tile, ("sm_90",)))
    for variant in _tailed_all():
        add(variant)
    return list(found.values())


VARIANTS = _all()
