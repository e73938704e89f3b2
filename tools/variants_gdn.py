"""The GDN prefill kernels as their launchers compile them, for tools/compile_all.py."""

import dataclasses
import json

import torch
from compile_all import PACKAGE, Variant, load

ANY = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
H200 = ("sm_90",)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STRIDES = ("i32:16",) * 3


def _config(name: str) -> dict:
    return json.loads((PACKAGE / "configs" / f"{name}.json").read_text())


def _pointers(dtype: str, *names: str) -> dict:
    return {f"{name}_ptr": f"*{dtype}:16" for name in names}


def _integers(*names: str) -> dict:
    return dict.fromkeys(names, "i32")


def _packed(packed: bool):
    """(signature, constexprs) of cu_seqlens."""
    return ({"cu_ptr": "*i64"}, {}) if packed else ({}, {"cu_ptr": None})


def _named(kernel, signature: dict, constexprs: dict, values: tuple) -> dict:
    """constexprs, and `values` for the kernel's other parameters in their order."""
    rest = [name for name in kernel.arg_names if name not in {**signature, **constexprs}]
    assert len(rest) == len(values), (rest, values)
    return {**constexprs, **dict(zip(rest, values))}


def _prepare(name, targets, config, dtype="bf16", K=128, R=4, l2norm=True, packed=False, raw=False):
    module = load("gdn.portable.prepare")
    cu, constexprs = _packed(packed)
    signature = {
        **_pointers(dtype, "q", "k", "tb", "p"),
        **_pointers("fp32", "g", "beta", "f", "gates", "decay"),
        **cu,
        **{f"{x}_strides": STRIDES for x in "qk"},
        **{f"{x}_strides": ("i32", "i32", "i32") for x in ("g", "beta")},
        **_integers("T", "N", "NT"),
        "scale": "fp32",
    }
    gate = ("A_log_ptr", "dt_bias_ptr")
    if raw:
        signature.update(dict.fromkeys(gate, "*fp32:16"))
    else:
        constexprs.update(dict.fromkeys(gate))
    values = module.constexprs(dtype == "fp32", 16, R, K, l2norm, raw, False)
    constexprs = _named(module._prepare_kernel, signature, constexprs, values)
    where = ("gdn.portable.prepare", "_prepare_kernel")
    return Variant(name, *where, signature, constexprs, dict(config), targets)


def _options(config: dict) -> dict:
    cap = {"maxnreg": config["maxnreg"]} if "maxnreg" in config else {}
    return {"num_warps": config["num_warps"], "num_stages": config["STAGES"], **cap}


def _scan(name, targets, config, dtype="bf16", D=128, packed=False, cut=False, pool=False):
    """pool: with indices of rows and with checkpoints, and rows of q, k and v that lie anyhow."""
    module = load("gdn.portable.scan")
    cu, constexprs = _packed(packed)
    optional = {"index": "i64", "mid": "fp32"} if pool else {}
    if dtype == "fp32":
        optional["s"] = "fp32"
    signature = {
        **_pointers(dtype, "q", "k", "v", "o", "tb", "p"),
        **_pointers("fp32", "f", "s0", "s1"),
        **{f"{x}_ptr": f"*{kind}:16" for x, kind in optional.items()},
        **cu,
        **{f"{x}_strides": ("i32",) * 3 if pool else STRIDES for x in "qkv"},
        **{f"{x}_strides": (*STRIDES, 1) for x in ("s0", "s1")},
        **_integers("T", "N", "NS", "ROW", "E"),
    }
    absent = [f"{x}_ptr" for x in ("index", "mid", "s") if x not in optional]
    constexprs.update(dict.fromkeys(absent))
    block_k = min(module.triton.next_power_of_2(D), config["BLOCK_K"])
    exactness = module.precision(DTYPES[dtype])
    width, size = config["BLOCK_V"], DTYPES[dtype].itemsize
    places = (
        load("gdn.portable.cuts").tokens_at_cut(D, D, size) if cut else 0,
        module.words(width, size),
    )
    values = (16, 4, D, D, False, block_k, width, 32, *places, config["STAGES"], exactness)
    constexprs = _named(module._scan_kernel, signature, constexprs, values)
    where = ("gdn.portable.scan", "_scan_kernel")
    return Variant(name, *where, signature, constexprs, _options(config), targets)


def _exact_scans(name, targets, config):
    for D in (64, 128, 256):
        yield _scan(f"{name} D={D}", targets, config, "fp32", D=D)
        yield _scan(
            f"{name} D={D} packed pool", targets, config, "fp32", D=D, packed=True, pool=True
        )
    yield _scan(f"{name} segments", targets, config, "fp32", cut=True)


def _places(dtype: str, across: int) -> tuple:
    """Of the states at the cuts: BEHIND, SLICE and WORDS, for a scan of `across` columns."""
    cuts, size = load("gdn.portable.cuts"), DTYPES[dtype].itemsize
    return (cuts.tokens_at_cut(128, 128, size), across, cuts.words(across, size))


def _transition(name, targets, config, dtype="bf16", across=16):
    module = load("gdn.portable.context")
    signature = {
        **_pointers(dtype, "k", "v", "tb", "o"),
        **_pointers("fp32", "f", "decay"),
        **{f"{x}_strides": STRIDES for x in "kv"},
        **_integers("T", "N", "NS", "ROW"),
    }
    exactness = module.precision(DTYPES[dtype])
    sizes = (2, 4, 128, 128, 32, 32, config["BLOCK_K"], config["BLOCK_V"])
    values = (*sizes, *_places(dtype, across), config["STAGES"], exactness)
    constexprs = _named(module._transition_kernel, signature, {"cu_ptr": None}, values)
    where = ("gdn.portable.context", "_transition_kernel")
    return Variant(name, *where, signature, constexprs, _options(config), targets)


def _carry(name, targets, config, dtype="bf16", across=16):
    module = load("gdn.portable.context")
    signature = {
        **_pointers(dtype, "o"),
        **_pointers("fp32", "s0"),
        "s0_strides": (*STRIDES, "i32:16"),
        **_integers("T", "SHORTEST"),
    }
    constexprs = dict.fromkeys(("index_ptr", "cu_ptr"))
    places = _places(dtype, across)
    values = (8, 128, 128, 32, 128, config["BLOCK_V"], *places, config["STAGES"], module.EXACT_FP32)
    constexprs = _named(module._carry_kernel, signature, constexprs, values)
    options = _options(config)
    where = ("gdn.portable.context", "_carry_kernel")
    return Variant(name, *where, signature, constexprs, options, targets)


def _all():
    prepare = _config("portable_gdn_prepare")["default"]
    wide = _config("portable_gdn_prepare_wide")["default"]
    yield _prepare("gdn_prepare bf16", ANY, prepare)
    yield _prepare("gdn_prepare bf16 R=1 packed raw", ANY, prepare, R=1, packed=True, raw=True)
    yield _prepare("gdn_prepare fp16 no l2norm", ANY, prepare, "fp16", l2norm=False)
    yield _prepare("gdn_prepare fp32", ANY, wide, "fp32")
    yield _prepare("gdn_prepare bf16 K=256", ANY, wide, K=256)
    scan = _config("portable_gdn_scan")["default"]
    yield _scan("gdn_scan bf16", ANY, scan)
    yield _scan("gdn_scan fp16 packed segments", ANY, scan, "fp16", packed=True, cut=True)
    yield _scan("gdn_scan bf16 D=64", ANY, scan, D=64)
    narrow, wide_state = _config("portable_gdn_scan_plain")["tuned"]
    for D, entry in ((60, narrow), (100, narrow), (128, narrow), (256, wide_state)):
        plain = entry["config"]
        yield _scan(f"gdn_scan bf16 D={D} plain", ANY, plain, D=D)
        yield _scan(f"gdn_scan bf16 D={D} plain pool", ANY, plain, D=D, packed=True, pool=True)
    yield from _exact_scans("gdn_scan fp32", ANY, _config("portable_gdn_scan_fp32")["default"])
    context = _config("portable_gdn_context")["default"]
    yield _transition("gdn_transition bf16", ANY, context["transition"])
    yield _transition("gdn_transition fp32", ANY, context["transition_fp32"], "fp32", across=8)
    yield _carry("gdn_carry", ANY, context["carry"], across=32)
    yield _carry("gdn_carry fp32", ANY, context["carry"], "fp32", across=8)
    tuned = "device_name=NVIDIA_H200"
    prepare = _config(f"portable_gdn_prepare,{tuned}")["default"]
    yield _prepare("gdn_prepare bf16 H200", H200, prepare, packed=True)
    for entry in _config(f"portable_gdn_scan,{tuned}")["tuned"]:
        name = f"gdn_scan bf16 H200 {entry['sizes']['units']} units"
        yield _scan(name, H200, entry["config"], packed=True, cut=True)
        yield _scan(f"{name} uncut", H200, entry["config"])
    exact = _config(f"portable_gdn_scan_fp32,{tuned}")["default"]
    yield from _exact_scans("gdn_scan fp32 H200", H200, exact)
    context = _config(f"portable_gdn_context,{tuned}")["default"]
    yield _transition("gdn_transition bf16 H200", H200, context["transition"])
    yield _transition("gdn_transition fp32 H200", H200, context["transition_fp32"], "fp32")


def _for_amd(variant: Variant) -> Variant:
    """The same on an AMD GPU, where gdn/portable/prepare.py takes fp32 products as they are."""
    exact = {k: "ieee" if v in ("tf32", "tf32x3") else v for k, v in variant.constexprs.items()}
    options = {name: value for name, value in variant.options.items() if name != "maxnreg"}
    return dataclasses.replace(variant, constexprs=exact, options=options, targets=("gfx942",))


def _split(found):
    for variant in found:
        nvidia = tuple(t for t in variant.targets if t != "gfx942")
        yield dataclasses.replace(variant, targets=nvidia)
        if "gfx942" in variant.targets:
            yield _for_amd(variant)


VARIANTS = list(_split(_all()))
