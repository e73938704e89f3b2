"""The decode kernels and what stands round the rule as their launchers compile them, for
tools/compile_all.py."""

import json

from compile_all import PACKAGE, Variant

ANY = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
X, F, STEP = "*bf16:16", "*fp32:16", "i32:16"


def _config(name: str) -> dict:
    return json.loads((PACKAGE / "configs" / f"{name}.json").read_text())


def _configs(name: str) -> list:
    """Every configuration of an operation, tuned or default."""
    table = _config(name)
    return [table["default"]] + [entry["config"] for entry in table.get("tuned", [])]


def _rule_pointers(state: str) -> dict:
    names = ("q", "k", "v", "g", "beta", "o")
    return {
        **{f"{name}_ptr": X for name in names},
        "A_log_ptr": F, "dt_bias_ptr": F, "initial_ptr": state, "final_ptr": state,
        "strides": (STEP,) * 10, "scale": "fp32",
    }  # fmt: skip


def _sizes(K=128, V=128) -> dict:
    return {"H": 16, "HV": 32, "K": K, "V": V, "L2NORM": True, "BETA_SCALE": 1.0, "BLOCK_K": K}


def _rule(name, layout, config, state):
    """One token, and any number of tokens out of a pool."""
    config = dict(config)
    options = {n: config.pop(n) for n in ("num_warps",)}
    pool = {"read_ptr": "*i64:16"}
    constexprs = {**_sizes(), "V_FIRST": layout == "vk", "write_ptr": None}
    one = {**constexprs, **config, "read_ptr": None, "INPLACE": False}
    inplace = {**one, "INPLACE": True, "final_ptr": None}
    many = {**constexprs, "ALL_STATES": False, "BLOCK_V": config["BLOCK_V"], "cu_ptr": None}
    pointers = _rule_pointers(state)
    step = ("gdn.portable.recurrent_step", "_gdn_recurrent_step_kernel")
    loop = ("gdn.portable.recurrent", "_gdn_recurrent_fwd_kernel")
    yield Variant(f"{name},one token", *step, pointers, one, options, ANY)
    alone = {n: kind for n, kind in pointers.items() if n != "final_ptr"}
    yield Variant(f"{name},in place", *step, alone, inplace, options, ANY)
    if state == F:  # tiles are kept in fp32 from token to token
        for states in (F, X):
            signature = {**_rule_pointers(states), **pool, "T": "i32"}
            yield Variant(f"{name},tokens,{states[1:5]}", *loop, signature, many, options, ANY)


def _convolution(layout, config, ptx, targets):
    near, far = (1, STEP) if layout == "td" else (STEP, 1)
    config = dict(config)
    options = {"num_warps": config.pop("num_warps")}
    signature = {
        "x_ptr": X, "weight_ptr": X, "y_ptr": X, "T": STEP, "D": STEP, "N": "i32", "TILES_T": "i32",
        "STEPS": "i32",
    }  # fmt: skip
    strides = {
        "x_strides": (STEP, far, near),
        "y_strides": (STEP, far, near),
        "initial_strides": (STEP,) * 3,
    }
    for kind in ("plain",) if layout == "quads" else ("plain", "packed", "seq_idx"):
        quads = layout == "quads"
        constexprs = {
            "W": 4, "SILU": True, "PTX": ptx, "bias_ptr": None, "QUADS": quads, **config
        }  # fmt: skip
        more = {}
        if kind == "packed":
            more = {"cu_ptr": "*i32:16", "initial_ptr": X, "final_ptr": X}
        if kind == "seq_idx":
            more = {"seq_ptr": "*i32:16"}
        absent = {"seq_ptr", "cu_ptr", "initial_ptr", "final_ptr"} - set(more)
        constexprs.update(dict.fromkeys(absent))
        name = f"portable_causal_conv1d_{layout}_fwd,{kind},PTX={ptx}"
        where = ("gdn_layer.portable.causal_conv1d", "_causal_conv1d_fwd_kernel")
        yield Variant(name, *where, {**signature, **strides, **more}, constexprs, options, targets)


def _prologue(packed, ptx, targets):
    config = _config("portable_causal_conv1d_td_fwd")["default"]
    signature = {
        "q_ptr": X, "k_ptr": X, "v_ptr": X, "weight_ptr": X, "y_ptr": X, "final_ptr": X,
        "strides": (STEP,) * 9, "initial_strides": (STEP,) * 3, "T": STEP, "N": "i32",
        "TILES_T": "i32",
    }  # fmt: skip
    constexprs = {
        "bias_ptr": None, "HK": 2048, "K": 128, "V": 128, "D": 8192, "W": 4, "S": 4, "SILU": True,
        "PTX": ptx, "BLOCK_S": 4, "BLOCK_T": config["BLOCK_T"], "RUN": config["RUN"],
        "BLOCK_D": 128,
    }  # fmt: skip
    more = {"cu_ptr": "*i32:16", "initial_ptr": X}
    (signature if packed else constexprs).update(more if packed else dict.fromkeys(more))
    where = ("gdn_layer.portable.prologue", "_gdn_layer_prologue_kernel")
    name = f"portable_gdn_layer_prologue,{'packed' if packed else 'plain'},PTX={ptx}"
    return Variant(name, *where, signature, constexprs, {"num_warps": 1}, targets)


def _layer(pdl, targets):
    where = "gdn_layer.portable.decode_kernels"
    held = {"held_ptr": X, "held_strides": (STEP, "i32", 1)}
    parts = {"q_ptr": X, "k_ptr": X, "v_ptr": X}
    sizes = {"H": 16, "HV": 32, "K": 128, "V": 128, "S": 4, "SILU": True, "PDL": pdl}
    config = _config("portable_gdn_recurrent_kv_fwd")["tuned"][0]["config"]
    rule = {
        **parts, **held, "a_ptr": X, "b_ptr": X, "weight_ptr": X, "A_log_ptr": F, "dt_bias_ptr": F,
        "state_ptr": F, "o_ptr": F, "state_row": STEP, "scale": "fp32",
        "strides": (STEP,) * 7 + (STEP, "i32") * 2,
    }  # fmt: skip
    own = {"W": 4, "BETA_SCALE": 1.0, "BLOCK_K": 128, "BLOCK_V": config["BLOCK_V"]}
    constexprs, options = {**sizes, **own, "bias_ptr": None}, {"num_warps": config["num_warps"]}
    name = f"portable_gdn_layer_decode,rule,PDL={pdl}"
    yield Variant(name, where, "layer_step_kernel", rule, constexprs, options, targets)
    finish = {
        **parts, **held, "o_ptr": F, "z_ptr": X, "norm_ptr": F, "y_ptr": X, "heads": STEP,
        "eps": "fp32", "z_strides": (STEP,) * 3, "strides": (STEP,) * 9,
    }  # fmt: skip
    own = {"HK": 2048, "WIDE": 128, "D": 8192, "BLOCK_V": 128, "BLOCK_S": 4, "BLOCK_D": 128}
    name = f"portable_gdn_layer_decode,finish,PDL={pdl}"
    options = {"num_warps": 1}
    yield Variant(name, where, "layer_finish_kernel", finish, {**sizes, **own}, options, targets)


def _norm(config, D):
    config = dict(config)
    options = {"num_warps": config.pop("num_warps")}
    signature = {
        "x_ptr": X, "gate_ptr": X, "weight_ptr": F, "y_ptr": X, "x_strides": (STEP, STEP),
        "gate_strides": (STEP, STEP), "M": "i32", "R": "i32", "eps": "fp32",
    }  # fmt: skip
    constexprs = {"D": D, "SILU": True, "BLOCK_D": D, **config}
    where = ("gdn_layer.portable.rms_norm_gated", "_rms_norm_gated_fwd_kernel")
    return Variant(f"portable_rms_norm_gated_fwd,{D}", *where, signature, constexprs, options, ANY)


def _all():
    for layout in ("vk", "kv"):
        for entry in _config(f"portable_gdn_recurrent_{layout}_fwd")["tuned"]:
            config, state = entry["config"], F if entry["sizes"]["STATE_BYTES"] == 4 else X
            sizes = ",".join(f"{n}={v}" for n, v in config.items())
            name = f"portable_gdn_recurrent_{layout}_fwd,{state[1:5]},{sizes}"
            yield from _rule(name, layout, config, state)
    for ptx, targets in ((True, ANY[:4]), (False, ANY[4:])):
        for layout in ("td", "dt", "quads"):
            for config in _configs(f"portable_causal_conv1d_{layout}_fwd"):
                yield from _convolution(layout, config, ptx, targets)
        yield _prologue(False, ptx, targets)
        yield _prologue(True, ptx, targets)
    yield from _layer(False, ANY)
    yield from _layer(True, ("sm_90", "sm_100", "sm_120"))
    for entry in _config("portable_rms_norm_gated_fwd")["tuned"]:
        yield _norm(entry["config"], entry["sizes"]["D"])


VARIANTS = list(_all())
