"""The Hopper kernels of Gated DeltaNet as their launchers compile them: tools/compile_all.py."""

from compile_all import Variant, load
from triton.experimental.gluon import language as gl

TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}


def _box(*shape: int, dtype: str) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), TYPES[dtype])
    return f"tensordesc<{dtype}[{', '.join(map(str, shape))}],{layout!r}>"


def _scan(
    W: int,
    dtype: str = "bf16",
    state: str = "fp32",
    v_first: bool = False,
    packed: str = "i32",
    pool: str = "",
    in_place: bool = False,
    checkpoints: bool = False,
    states: bool = True,
) -> Variant:
    """W state warpgroups; packed and pool: types of cu_seqlens and state_indices, "" for none."""
    launcher = load("gdn.hopper.plan")
    registers = launcher.REGISTERS[W]
    token = {"q": 128, "k": 128, "v": 64, "o": 64}
    signature = {
        **{f"{x}_desc": _box(1, 1, 64, 1, columns, dtype=dtype) for x, columns in token.items()},
        "t_desc": _box(64, 64, dtype=dtype),
        "p_desc": _box(64, 64, dtype=dtype),
        "f_desc": _box(256, dtype="fp32"),
        **dict.fromkeys(("decay_ptr", "warm_ptr"), "*fp32:16"),
        "o_ptr": f"*{dtype}:16",
        **dict.fromkeys(("T", "HV", "H", "N", "every", "split", "pool_step", "transition"), "i32"),
    }
    pointers = {
        "h0_ptr": state if states else "",
        "hT_ptr": state if states else "",
        "ck_ptr": state if checkpoints else "",
        "index_ptr": pool,
        "cu_ptr": packed,
    }
    signature.update({name: f"*{kind}:16" for name, kind in pointers.items() if kind})
    constexprs = {name: None for name, kind in pointers.items() if not kind}
    constexprs.update(IN_PLACE=in_place, W=W, V_FIRST=v_first)
    constexprs.update(STATE_REGISTERS=registers[0], LOAD_REGISTERS=registers[1])
    said = [dtype, f"state={state if states else None}", f"packed={packed or None}"]
    said += [f"pool={pool}"] if pool else []
    flags = {"v_first": v_first, "in_place": in_place, "checkpoints": checkpoints}
    name = ",".join([f"hopper_gdn_scan_fwd,W={W}", *said, *(k for k, v in flags.items() if v)])
    options = {"num_warps": 4, "maxnreg": launcher.CAP[W]}
    kernel = "gdn_scan_fwd_kernel"
    return Variant(name, "gdn.hopper.scan", kernel, signature, constexprs, options, ("sm_90",))


def _carry(packed: str, pool: str = "") -> Variant:
    """pool: the type of its states [K, V], "" for none."""
    pointers = {"pool_ptr": pool, "index_ptr": pool and "i64", "cu_ptr": packed}
    signature = {
        **{name: f"*{kind}:16" for name, kind in pointers.items() if kind},
        "warm_ptr": "*fp32:16",
        "o_ptr": "*bf16:16",
        **dict.fromkeys(("T", "HV", "N", "split", "slots", "pool_step"), "i32"),
    }
    constexprs = {"SPAN": 2048, "MOST": 8, "BLOCK_V": 16, "BLOCK_K": 32, "PREC": "tf32x3"}
    constexprs.update({name: None for name, kind in pointers.items() if not kind}, V_FIRST=False)
    name = f"hopper_gdn_carry,packed={packed or None},pool={pool or None}"
    options = {"num_warps": 4, "launch_pdl": True}
    return Variant(
        name, "gdn.hopper.carry", "gdn_carry_kernel", signature, constexprs, options, ("sm_90",)
    )


def _prepare(W: int, R: int, dtype: str = "bf16", packed: str = "", raw: str = "") -> Variant:
    """W warps and as many heads; packed and raw: types of cu_seqlens and of the raw gates."""
    signature = {
        "q_desc": _box(1, 1, 64, 1, 128, dtype=dtype),
        "k_desc": _box(1, 1, 64, 1, 128, dtype=dtype),
        "t_desc": _box(64, 64, dtype=dtype),
        "p_desc": _box(64, 64, dtype=dtype),
        "g_ptr": f"*{raw or 'fp32'}:16",
        "beta_ptr": f"*{raw or 'fp32'}:16",
        **dict.fromkeys(("f_ptr", "decay_ptr"), "*fp32:16"),
        "g_strides": ("i32:16", "i32:16", 1),
        "beta_strides": ("i32:16", "i32:16", 1),
        **dict.fromkeys(("T", "N", "NT"), "i32"),
        "scale": "fp32",
    }
    pointers = {"A_log_ptr": raw and "fp32", "dt_bias_ptr": raw and "fp32", "cu_ptr": packed}
    signature.update({name: f"*{kind}:16" for name, kind in pointers.items() if kind})
    constexprs = {name: None for name, kind in pointers.items() if not kind}
    constexprs.update(HV=16 * R, R=R, W=W, BETA_MAX=1.0 if raw else 0.0)
    name = f"hopper_gdn_prepare_fwd,W={W},R={R},{dtype},packed={packed or None},raw={raw or None}"
    options = {"num_warps": W, "maxnreg": load("gdn.hopper.plan").PREPARE_CAP[W]}
    kernel = "gdn_prepare_fwd_kernel"
    return Variant(name, "gdn.hopper.prepare", kernel, signature, constexprs, options, ("sm_90",))


def _gradient(R: int, norm: bool = True, dtype: str = "bf16", packed: str = "", raw: str = ""):
    """R value heads a key head; packed and raw: types of cu_seqlens and of the raw gates."""
    token = {"q": 128, "k": 128, "do": 64, "vt": 64, "dv": 64}
    signature = {
        **{f"{x}_desc": _box(1, 1, 64, 1, columns, dtype=dtype) for x, columns in token.items()},
        "s_desc": _box(128, 64, dtype=dtype),
        "ds_desc": _box(128, 64, dtype=dtype),
        "g_ptr": f"*{raw or 'fp32'}:16",
        **dict.fromkeys(("dq_ptr", "dk_ptr"), f"*{dtype}:16"),
        **dict.fromkeys(
            ("f_ptr", "G_ptr", "by_query_ptr", "by_key_ptr", "ends_ptr"), "*fp32:16"
        ),
        "g_strides": ("i32:16", "i32:16", 1),
        **dict.fromkeys(("T", "N", "NT", "count"), "i32"),
        "scale": "fp32",
    }  # fmt: skip
    pointers = {"A_log_ptr": raw and "fp32", "dt_bias_ptr": raw and "fp32", "cu_ptr": packed}
    signature.update({name: f"*{kind}:16" for name, kind in pointers.items() if kind})
    constexprs = {name: None for name, kind in pointers.items() if not kind}
    constexprs.update(H=16, R=R, NORM=norm, KEY_REGISTERS=232, FEW_REGISTERS=40)
    name = (
        f"hopper_gdn_gradient,R={R},{dtype},norm={norm},packed={packed or None},raw={raw or None}"
    )
    options = {"num_warps": 4, "maxnreg": 168}
    kernel = "gdn_gradient_kernel"
    return Variant(name, "gdn.hopper.gradient", kernel, signature, constexprs, options, ("sm_90",))


def _states(reverse: bool, state: str = "fp32", dtype: str = "bf16", packed: str = "") -> Variant:
    token = {"k": 128, "q": 128, "in": 64, "out": 64}
    signature = {
        **{f"{x}_desc": _box(1, 1, 64, 1, columns, dtype=dtype) for x, columns in token.items()},
        "state_desc": _box(128, 64, dtype=dtype),
        "t_desc": _box(64, 64, dtype=dtype),
        "p_desc": _box(64, 64, dtype=dtype),
        "f_desc": _box(256, dtype="fp32"),
        "tb_ptr": f"*{dtype}:16",
        "first_strides": ("i32:16", "i32:16", "i32:16", 1),
        "last_strides": ("i32:16", "i32:16", "i32:16", 1),
        **dict.fromkeys(("T", "HV", "H"), "i32"),
    }
    pointers = {"first_ptr": state, "last_ptr": reverse and state, "cu_ptr": packed}
    signature.update({name: f"*{kind}:16" for name, kind in pointers.items() if kind})
    constexprs = {name: None for name, kind in pointers.items() if not kind}
    constexprs.update(REVERSE=reverse, LOAD_REGISTERS=32)
    name = f"hopper_gdn_states,{dtype},reverse={reverse},state={state},packed={packed or None}"
    options = {"num_warps": 4, "maxnreg": 136, "launch_pdl": not reverse}
    module, kernel = "gdn.hopper.gradient_states", "gdn_states_kernel"
    return Variant(name, module, kernel, signature, constexprs, options, ("sm_90",))


VARIANTS = (
    [
        _states(True),
        _states(False),
        _states(True, "bf16", "fp16", "i32"),
        _states(False, "bf16", "fp16", "i64"),
        _gradient(2),
        _gradient(4, False, "fp16", "i32", "bf16"),
        _gradient(1, packed="i64"),
    ]
    + [
        _scan(W, **options)
        for W in (1, 2)
        for options in (
            {"packed": ""},
            {"packed": "", "states": False},
            {"packed": "", "v_first": True, "dtype": "fp16"},
            {},
            {"v_first": True, "pool": "i32", "in_place": True},
            {"v_first": True, "pool": "i64", "state": "bf16", "packed": "i64"},
            {"checkpoints": True, "v_first": True},
            {
                "checkpoints": True,
                "v_first": True,
                "pool": "i32",
                "in_place": True,
                "state": "bf16",
            },
        )
    ]
    + [_scan(1, checkpoints=True), _carry("i32"), _carry(""), _carry("i32", "bf16")]
)
VARIANTS += [
    _prepare(W, R, **options)
    for W, R in ((4, 4), (2, 6))
    for options in ({}, {"dtype": "fp16", "packed": "i64"}, {"packed": "i32", "raw": "bf16"})
]
