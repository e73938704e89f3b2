"""The kernels of the routed experts as their launchers compile them, for tools/compile_all.py."""

import json

from compile_all import PACKAGE, Variant

CONFIGS = PACKAGE / "configs"
ANY = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
H, I, E, K = 2048, 512, 256, 8  # Qwen3.5-35B-A3B
SHARED = {"H": H, "I": I, "TOP_K": K}
GATE = {"ACTIVATION": "silu", "LIMIT": None}


def _config(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def _box(*block: int, dtype: str = "bf16") -> str:
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}]>"


def _variant(name, module, kernel, operands, numbers, constexprs, config, targets) -> Variant:
    """operands by name; None: absent, which is a constexpr."""
    signature = {k: kind for k, kind in operands.items() if kind is not None}
    signature.update(dict.fromkeys(numbers, "i32"))
    absent = {k: None for k, kind in operands.items() if kind is None}
    options = {k: config[k] for k in ("num_warps", "num_stages", "launch_pdl") if k in config}
    module = f"experts.portable.{module}"
    return Variant(name, module, kernel, signature, {**absent, **constexprs}, options, targets)


def _tile(config: dict, height: int, *names: str) -> dict:
    found = {name: config[name] for name in ("BLOCK_N", "BLOCK_K", "GROUP", "FLAT")}
    return {**found, **{name: config[name] for name in names}, "BLOCK_M": height}


def _up(name, height, config, targets, saving=False, dtype="bf16", **gate) -> Variant:
    pointer = f"*{dtype}:16"
    block = (2, config["BLOCK_N"], config["BLOCK_K"])
    operands = {
        "w_desc": _box(*block, dtype=dtype),
        "x_ptr": pointer, "z_ptr": pointer,
        "gate_up_ptr": pointer if saving else None, "routing_ptr": "*i32:16",
    }  # fmt: skip
    constexprs = {**SHARED, **GATE, **gate, **_tile(config, height)}
    return _variant(
        f"experts_up {name}" + (" saving" if saving else ""), "products", "_up_kernel", operands,
        "SE", constexprs, config, targets,
    )  # fmt: skip


def _rows(name, height, config, targets, transposed) -> Variant:
    BN, BK = config["BLOCK_N"], config["BLOCK_K"]
    operands = {
        "a_desc": _box(height, BK),
        "w_desc": _box(1, BN, BK) if transposed else _box(1, BK, BN),
        "y_desc": _box(height, BN // 2) if config["STORE"] else None,
        "y_ptr": "*bf16:16", "routing_ptr": "*i32:16",
    }  # fmt: skip
    width = I if transposed else 2 * I
    constexprs = {"N": H, "WIDTH": width, "TRANSPOSED": transposed, **_tile(config, height)}
    name = f"experts_{'down' if transposed else 'dx'} {name}"
    return _variant(name, "products", "_rows_kernel", operands, "SE", constexprs, config, targets)


def _gate_gradient(name, height, config, targets) -> Variant:
    operands = {
        "w_desc": _box(1, config["BLOCK_K"], config["BLOCK_N"]),
        **dict.fromkeys(("dout_ptr", "gate_up_ptr", "weights_ptr", "wz_ptr"), "*bf16:16"),
        "parts_ptr": "*fp32:16", "routing_ptr": "*i32:16",
    }  # fmt: skip
    constexprs = {**SHARED, **GATE, **_tile(config, height)}
    return _variant(
        f"experts_gate_gradient {name}", "gradients", "_gate_gradient_kernel", operands, "SE",
        constexprs, config, targets,
    )  # fmt: skip


def _weight_gradient(name, config, targets, by_token, add=False) -> Variant:
    BM, BN, BK = (config[f"BLOCK_{d}"] for d in "MNK")
    desc = _box(BK, BN if by_token else BM) if config["COPY_ENGINE"] else None
    operands = {
        "rows_desc": desc, "a_ptr": "*bf16:16", "b_ptr": "*bf16:16",
        "out_ptr": "*fp32:16" if add else "*bf16:16", "routing_ptr": "*i32:16",
    }  # fmt: skip
    M, N = (H, I) if by_token else (2 * I, H)
    blocks = {key: config[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP")}
    constexprs = {"M": M, "N": N, "TOP_K": K, "A_BY_TOKEN": by_token, "ADD": add, **blocks}
    name = f"experts_{'dw_down' if by_token else 'dw_gate_up'} {name}" + (" add" if add else "")
    kernel = "_weight_gradient_kernel"
    return _variant(name, "gradients", kernel, operands, "SE", constexprs, config, targets)


def _products(device: str, targets) -> list:
    table = _config(f"portable_experts{device}")
    found = {}
    for config in [table["default"], *(entry["config"] for entry in table["tuned"])]:
        height, mark = config["BLOCK_M"], device[-5:]
        for variant in (
            _up(f"{_name(config['up'], height)}{mark}", height, config["up"], targets),
            _up(f"{_name(config['up'], height)}{mark}", height, config["up"], targets, True),
            _rows(f"{_name(config['down'], height)}{mark}", height, config["down"], targets, True),
            _gate_gradient(
                f"{_name(config['gate'], height)}{mark}", height, config["gate"], targets
            ),
            _rows(f"{_name(config['dx'], height)}{mark}", height, config["dx"], targets, False),
            *(
                _weight_gradient(f"{_name(config['weight'])}{mark}", config["weight"], targets, way)
                for way in (True, False)
            ),
        ):
            found[variant.name] = variant
    return list(found.values())


def _name(config: dict, height: int = 0) -> str:
    blocks = (height or config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"])
    marks = [key for key in ("FLAT", "STORE", "COPY_ENGINE") if config.get(key)]
    return " ".join(["x".join(map(str, blocks)), f"group={config['GROUP']}", *marks])


def _few(targets, pdl) -> list:
    config = _config("portable_experts_few")["default"]
    b = "*bf16:16"
    up = {"x_ptr": b, "w_ptr": b, "ids_ptr": "*i64:16", "z_ptr": b}
    down = {"z_ptr": b, "w_ptr": b, "ids_ptr": "*i64:16", "weights_ptr": b, "out_ptr": b}
    found = []
    for kernel, operands, part, more in (
        ("_few_up_kernel", up, "up", GATE), ("_few_down_kernel", down, "down", {"SLOTS": 8})
    ):  # fmt: skip
        tile = {key: config[part][key] for key in ("BLOCK_N", "BLOCK_K")}
        constexprs = {**SHARED, **more, **tile, "PDL": pdl}
        options = {"num_warps": config[part]["num_warps"]}
        if pdl and part == "down":
            options["launch_pdl"] = True
        name = f"experts{kernel[:-7]}" + (" pdl" if pdl else "")
        found.append(_variant(name, "few", kernel, operands, "E", constexprs, options, targets))
    return found


def _routing(width: int, targets) -> list:
    numbers = {"_count_kernel": "SE", "_scan_kernel": ("blocks",)}
    place = ("S", "E", "blocks", "height")
    i32 = "*i32:16"
    rows = [
        ("_count_kernel", {"ids_ptr": "*i64:16", "counts_ptr": i32}, {"BLOCK": 128}, 4),
        ("_scan_kernel", {"counts_ptr": i32}, {"BLOCK_E": 8, "BLOCK_B": 512}, 8),
    ]
    for counts in (None, i32):
        operands = {"ids_ptr": "*i64:16", "counts_ptr": counts, "routing_ptr": i32}
        rows.append(("_place_kernel", operands, {"BLOCK": 128, "CHUNK": 1024, "STEP": 32}, 4))
    return [
        _variant(
            f"experts{kernel[:-7]} {width}" + (" counted" if operands.get("counts_ptr") else ""),
            "routing", kernel, operands, numbers.get(kernel, place), {"EXPERTS": width, **more},
            {"num_warps": warps}, targets,
        )
        for kernel, operands, more, warps in rows
    ]  # fmt: skip


def _combining(targets) -> list:
    y = {"y_ptr": "*bf16:16", "weights_ptr": "*bf16:16", "out_ptr": "*bf16:16"}
    combine = {**y, "routing_ptr": "*i32:16"}
    parts = {"parts_ptr": "*fp32:16", "out_ptr": "*bf16:16", "routing_ptr": "*i32:16"}
    return [
        _variant(
            "experts_combine", "combine", "_combine_kernel", combine, "SE",
            {"H": H, "TOP_K": K, "BLOCK": 2048}, {"num_warps": 8}, targets,
        ),
        _variant(
            "experts_weights_gradient", "combine", "_weights_gradient_kernel", parts, "SE",
            {"PARTS": 4, "BLOCK": 256}, {"num_warps": 4}, targets,
        ),
    ]  # fmt: skip


VARIANTS = [
    *_products(",device_name=NVIDIA_H200", ("sm_90",)),
    *_products("", ANY),
    *_few(ANY, False),
    *_few(("sm_90",), True),
    *_routing(256, ANY),
    *_routing(512, ("sm_90",)),
    *_combining(ANY),
]
