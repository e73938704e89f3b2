"""A GDN layer's input projections as their launcher compiles them, for tools/compile_all.py."""

import json

from compile_all import PACKAGE, Variant

CONFIG = json.loads((PACKAGE / "configs" / "portable_gdn_project_fwd.json").read_text())


def _project(tokens: int, config: dict, dtype: str = "bf16") -> Variant:
    config = {"BLOCK_M": max(16, tokens), **config}
    options = {k: config.pop(k) for k in ("num_warps", "num_stages")}
    pointers = ("x", *(f"w{i}" for i in range(6)), "y")
    signature = {f"{name}_ptr": f"*{dtype}:16" for name in pointers}
    signature.update(M="i32", **dict.fromkeys(("N", "K", "stride_x"), "i32:16"))
    signature.update({f"rows{i}": "i32:16" for i in range(6)})
    tile = "x".join(map(str, config.values()))
    return Variant(
        f"project {tile} {dtype}",
        "gdn_layer.portable.project",
        "_gdn_project_fwd_kernel",
        signature,
        {**config, "PDL": False},
        options,
    )


VARIANTS = [_project(entry["sizes"]["M"], entry["config"]) for entry in CONFIG["tuned"]] + [
    _project(64, CONFIG["default"], "fp16")
]
