"""The calls whose kernels tools/compile_all.py compiles and tests/runtime/test_compile.py looks at.

A call is made on tensors without memory, on a chip that is only pretended: what it launches is
recorded, not run (runtime/recording.py). `CALLS` names each; those of an operation begin with its
room's name."""

import contextlib
import functools
import itertools
from typing import Callable, Dict, List, Tuple
from unittest import mock

import torch
from in_tree import load_package, submodule

# name, CUDA capability, multiprocessors
CHIPS = {
    "sm_80": ("NVIDIA_A100-SXM4-80GB", (8, 0), 108),
    "sm_90": ("NVIDIA_H200", (9, 0), 132),
    "sm_90, 114": ("NVIDIA_H100_PCIe", (9, 0), 114),
    "sm_100": ("NVIDIA_B200", (10, 0), 148),
    "sm_120": ("NVIDIA_RTX_PRO_6000_Blackwell", (12, 0), 188),
    "gfx942": ("gfx942", None, 304),
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn


# name: a function of the package, and of sizes in place of its own, that makes the tensors and
# returns the call
CALLS: Dict[str, Callable] = {}


def calls(function: Callable, kind: str, table: Dict[str, dict], **options) -> None:
    """Adds calls of a function below, "kind, name", with these options and those of the table."""
    CALLS.update(named_calls(function, kind, table, **options))


def named_calls(function: Callable, kind: str, table: Dict[str, dict], **options) -> dict:
    """The same calls by their names."""
    return {
        f"{kind}, {name}" if name else kind: functools.partial(function, **{**options, **more})
        for name, more in table.items()
    }


def launches(chip: str, *match: str) -> List[Tuple[str, object]]:
    """(call, record of runtime/recording.py) of each launch on a chip.

    match: only of calls whose name holds one of these.
    """
    named = {n: make for n, make in CALLS.items() if not match or any(w in n for w in match)}
    return launches_on(CHIPS[chip], named)


def launches_on(chip: tuple, table: Dict[str, Callable]) -> List[Tuple[str, object]]:
    """The same of the calls of a table, on a chip that is described as in CHIPS."""
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    kernel = load_package()
    found: List[Tuple[str, object]] = []
    with recording.recorded(device.Chip(*chip)) as records, free_products():
        for name, make in table.items():
            make(kernel)()
            found += [(name, record) for record in records[len(found) :]]
    return found


@contextlib.contextmanager
def free_products():
    """Products of cuBLAS are memory that nobody has written: no launch is by their values."""

    def product(a, b, out=None):
        return a.new_empty(a.shape[0], b.shape[1]) if out is None else out

    def sum_of(bias, a, b, out=None, **options):
        return product(a, b, out)

    loss = submodule("loss.portable.linear")
    with mock.patch.multiple(torch, mm=product, addmm=sum_of):
        with mock.patch.object(loss, "add_product", lambda total, a, b: None):
            yield


# On the CPU an operator's body runs (on meta tensors its fake would), and memory that nobody
# touches costs nothing. tools/tune.py has values on a GPU.
DEVICE = "cpu"


def values(*shape: int, dtype=BF16, grad=False, device=None) -> torch.Tensor:
    if DEVICE != "cpu":
        x = torch.randn(*shape, device=DEVICE).mul_(0.3).to(dtype)
    else:
        x = torch.empty(*shape, dtype=dtype, device=device)
    return x.requires_grad_(grad)


def offsets(sizes: Tuple[int, ...], dtype=torch.int64) -> torch.Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=dtype, device=DEVICE)


def rows(count: int, dtype) -> torch.Tensor:
    return torch.arange(count, dtype=dtype, device=DEVICE)


def with_gradients(forward: Callable, *leaves: torch.Tensor) -> Callable:
    def step():
        y = forward()
        dy = torch.empty_like(y) if DEVICE == "cpu" else torch.ones_like(y)
        return torch.autograd.grad(y, leaves, dy)

    return step


# --- SwiGLU


def _swiglu(kernel, M, K=4096, N=14336, dtype=BF16, bias=False, wf=False, up_first=False, **more):
    # the weights in one memory: Hopper's kernel is compiled for which of the two lies first
    x = values(M, K, dtype=dtype)
    w = values(K, 2 * N, dtype=dtype).T if wf else values(2 * N, K, dtype=dtype)
    weights = w.chunk(2)[::-1] if up_first else w.chunk(2)
    biases = (values(N, dtype=dtype), values(N, dtype=dtype)) if bias else ()
    return lambda: kernel.fused_swiglu(x, *weights, *biases, **more)


for M in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384):
    calls(_swiglu, f"swiglu forward, M {M}", {"": {}, "small": dict(K=1024, N=3072)}, M=M)
for M in (1, 64, 512, 4096):
    table = {"Wf": dict(wf=True), "fp16, bias": dict(dtype=FP16, bias=True, activation="gelu_tanh")}
    calls(_swiglu, f"swiglu forward, M {M}", table, M=M)
calls(_swiglu, "swiglu forward", {
    "M 512, small, up first": dict(M=512, K=1024, N=3072, up_first=True),
    "M 4096, up first": dict(M=4096, up_first=True),
    "odd sizes": dict(M=33, K=1000, N=3001),
    "three quarters": dict(M=4096, N=14336 - 64),
})  # fmt: skip


def _swiglu_training(kernel, activation="silu", dtype=BF16, M=8192, K=4096, N=14336, **options):
    # on the meta device, where the products of cuBLAS cost nothing
    meta = {"dtype": dtype, "device": "meta", "grad": True}
    x, w, w_down = values(M, K, **meta), values(2 * N, K, **meta), values(K, N, **meta)
    w_gate, w_up = (part.detach().requires_grad_() for part in w.chunk(2))
    tensors = (x, w_gate, w_up, w_down)
    mlp = functools.partial(kernel.fused_swiglu_mlp, *tensors, activation=activation, **options)
    return with_gradients(mlp, *tensors)


calls(_swiglu_training, "swiglu training", {
    "": {},
    "recompute": dict(recompute=True),
    "fp16": dict(dtype=FP16, activation="gelu_tanh"),
    "small": dict(K=1024, N=3072),
    "odd sizes": dict(M=100, K=1000, N=3001),
})  # fmt: skip


# --- routed experts


def _experts(
    kernel, T, E=256, K=8, H=2048, N=512, dtype=BF16, index=torch.int64, top=FP32, grad=False,
    turned=False, biased=False, **options,
):  # fmt: skip
    x, weights = values(T, H, dtype=dtype, grad=grad), values(T, K, dtype=top, grad=grad)
    w_gate_up, w_down = values(E, 2 * N, H, dtype=dtype, grad=grad), values(E, H, N, dtype=dtype)
    ids = torch.arange(T * K, dtype=index, device=DEVICE).remainder_(E).view(T, K)
    leaves = [w_gate_up, w_down.requires_grad_(grad)]
    if turned:
        leaves = [values(*w.mT.shape, dtype=dtype, grad=grad) for w in leaves]
    if biased:
        leaves += [values(E, n, dtype=dtype, grad=grad) for n in (2 * N, H)]
        options |= dict(zip(("b_gate_up", "b_down"), leaves[2:]))
    both = [w.mT for w in leaves[:2]] if turned else leaves[:2]
    forward = functools.partial(kernel.fused_experts, x, *both, ids, weights, **options)
    return with_gradients(forward, x, *leaves, weights) if grad else forward


small = dict(E=20, K=6, H=200, N=136, dtype=FP16)
calls(_experts, "experts forward", {
    # from a row an expert to a thousand
    **{f"T {T}": dict(T=T) for T in (1, 16, 64, 512, 1024, 4096, 8192, 32768)},
    **{f"T {T}, fp16, clamped": dict(T=T, index=torch.int32, top=FP16, activation="gelu_tanh",
                                     limit=7.0, **small) for T in (1, 40, 4096)},
})  # fmt: skip
tokens = (40, 512, 1024, 4096, 8192, 32768, 65536)
calls(_experts, "experts training", {f"T {T}": dict(T=T) for T in tokens}, grad=True)
oai = {f"T {T}": dict(T=T, grad=T > 1) for T in (1, 40, 8192)}
calls(_experts, "experts, swigluoai", oai, activation="swigluoai", limit=7.0)
oss = dict(E=32, K=4, H=2880, N=2880, turned=True, activation="swigluoai", limit=7.0)
calls(_experts, "experts, gpt-oss", {
    **{f"T {T}": dict(T=T, grad=T > 1, biased=True, interleaved=True) for T in (1, 300, 8192)},
    "T 8192, halves": dict(T=8192, grad=True),
}, **oss)  # fmt: skip
calls(_experts, "experts training", {
    "recompute": dict(T=8192, recompute=True), "odd sizes": dict(T=1000, **small),
}, grad=True)  # fmt: skip


# --- around attention


def _rotary(
    kernel, B=1, T=1, HQ=32, HK=8, D=128, R=128, norm=None, cache=False, gate=False, dtype=BF16,
    tables=BF16, weights=BF16, grad=False, angles=0,
):  # fmt: skip
    """norm: None, "head" or "all"; gate: heads of q as Qwen3.5's projection has them; angles: of a
    pair of neighbouring channels."""
    q, k, v = (values(B, T, n, D * (1 + far), dtype=dtype, grad=grad)[..., :D]
               for n, far in ((HQ, gate), (HK, False), (HK, False)))  # fmt: skip
    cos, sin = (values(1, T, R, dtype=tables) if R else None for _ in "cs")
    if angles == 1:
        cos, sin = cos[..., : R // 2], sin[..., : R // 2]
    elif angles == 2:
        cos, sin = cos.unflatten(-1, (-1, 2)), sin.unflatten(-1, (-1, 2))
    options, leaves = {"interleaved": angles > 0}, [q, k]
    if norm:
        wide = (D, D) if norm == "head" else (HQ * D, HK * D)
        leaves += [values(n, dtype=weights, grad=grad) for n in wide]
        options.update(norm=norm, offset=1.0, q_weight=leaves[2], k_weight=leaves[3])
    if cache:
        keys, cached = (values(B, HK, 8192, D, dtype=dtype) for _ in "kv")
        options.update(v=v, key_cache=keys, value_cache=cached)
        options["cache_position"] = torch.zeros((), dtype=torch.int64, device=DEVICE)
    forward = functools.partial(kernel.fused_qk_norm_rope, q, k, cos, sin, **options)
    if not grad:
        return forward
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    return lambda: torch.autograd.grad(forward(), leaves, (dq, dk))


for name, options in {
    "Llama": {},
    "Qwen3": dict(norm="head"),
    "Qwen3.5": dict(HQ=16, HK=4, D=256, R=64, norm="head", gate=True),
    "OLMo": dict(HQ=30, HK=30, norm="all"),
    "GLM": dict(HK=2, R=64, angles=1),
    "GLM-4V": dict(angles=2),
}.items():
    table = {
        "one token": dict(cache=True), "prompt": dict(T=8192), "gradient": dict(T=4096, grad=True),
    }  # fmt: skip
    calls(_rotary, f"attention rotary, {name}", table, **options)
calls(_rotary, "attention rotary", {
    "fp32 weights and tables": dict(B=2, T=100, norm="head", dtype=FP16, tables=FP32, weights=FP32,
                                    cache=True),
    "odd sizes": dict(T=77, HQ=9, HK=3, D=80, R=20, norm="head", dtype=FP32, tables=FP32,
                      weights=FP32, grad=True),
    "wide norm": dict(T=77, HQ=64, HK=8, norm="all", grad=True),
})  # fmt: skip


def _gate(kernel, T=1, H=16, D=256, dtype=BF16, grad=False):
    x = values(1, H, T, D, dtype=dtype, grad=grad).transpose(1, 2)
    gate = values(1, T, H, 2 * D, dtype=dtype, grad=grad)[..., D:]
    forward = functools.partial(kernel.sigmoid_gate, x, gate)
    return with_gradients(forward, x, gate) if grad else forward


calls(_gate, "attention gate", {
    **{f"T {T}": dict(T=T) for T in (1, 8192)},
    "gradient": dict(T=4096, grad=True),
    "fp32, odd sizes": dict(T=77, D=100, dtype=FP32, grad=True),
})  # fmt: skip


def _kvcache(kernel, B=1, S=8192, HQ=32, HK=8, D=128, mask=torch.bool, dtype=BF16, grows=False):
    q, length = values(B, 1, HQ, D, dtype=dtype), torch.ones((), dtype=torch.int64, device=DEVICE)
    k, v = (values(B, HK, S, D, dtype=dtype) for _ in "kv")
    if mask is not None:
        mask = torch.zeros(B, 1, 1, S, dtype=mask, device=DEVICE)
    length = None if grows else length
    return functools.partial(kernel.attention_with_kvcache, q, k, v, length, attention_mask=mask)


calls(_kvcache, "attention decode", {
    **{f"batch {B}, {S} slots": dict(B=B, S=S) for B, S in ((1, 640), (64, 8192))},
    **{f"head dim {D}": dict(D=D, mask=None) for D in (64, 80, 256)},
    "Qwen3.5": dict(HQ=16, HK=4, D=256),
    "a cache that grows": dict(S=777, mask=None, grows=True),
    "one key head": dict(HQ=71, HK=1, D=64, mask=FP32, dtype=FP16),
})  # fmt: skip


def _latent(
    kernel, B=1, T=1, S=8192, H=20, C=512, N=192, R=64, V=256, mask=torch.bool, dtype=BF16,
    grows=False, fp8=False,
):  # fmt: skip
    q, (weight, scale) = values(B, T, H, N + R, dtype=dtype), _expanding(H * (N + V), C, dtype, fp8)
    c, r = values(B, 1, S, C, dtype=dtype), values(B, 1, S, R, dtype=dtype)
    length = None if grows else torch.ones((), dtype=torch.int64, device=DEVICE)
    if mask is not None:
        mask = torch.zeros(B, 1, T, S, dtype=mask, device=DEVICE)
    return functools.partial(
        kernel.latent_attention_with_kvcache, q, c, r, weight, length, qk_nope_head_dim=N,
        attention_mask=mask, weight_scale=scale,
    )  # fmt: skip


def _expanding(rows: int, C: int, dtype, fp8: bool) -> tuple:
    """A weight, and its scales if it is in FP8."""
    if not fp8:
        return values(rows, C, dtype=dtype), None
    return values(rows, C, dtype=E4M3), values(-(-rows // 128), -(-C // 128), dtype=FP32)


calls(_latent, "latent attention", {
    "GLM-4.7-Flash": {},
    "GLM-4.7-Flash, 4 tokens, grows": dict(T=4, S=777, grows=True),
    "DeepSeek-V2-Lite, batch 16": dict(B=16, H=16, N=128, V=128),
    "GLM-4.7-Flash, batch 16": dict(B=16),
    "DeepSeek-V3": dict(H=128, N=128, V=128),
    "MiniCPM3": dict(H=40, C=256, N=64, R=32, V=64, mask=None),
    "fp16, a mask that is added": dict(H=32, N=128, V=128, mask=FP32, dtype=FP16),
    "GLM-4.7-Flash, 8 tokens, FP8": dict(T=8, fp8=True),
})  # fmt: skip


def _latent_rope(kernel, T=1, H=20, C=512, N=192, R=64, rotary="pairs_to_halves", cached=True):
    q, kv, weight = values(1, T, H, N + R), values(1, T, C + R), values(C)
    cos, sin = (values(1, T, R if rotary == "halves" else R // 2) for _ in "cs")
    caches = {}
    if cached:
        caches = {
            "latent_cache": values(1, 1, 8192, C), "rotated_cache": values(1, 1, 8192, R),
            "cache_position": torch.zeros((), dtype=torch.int64, device=DEVICE),
        }  # fmt: skip
    return functools.partial(
        kernel.fused_latent_norm_rope, q, kv, weight, cos, sin, rotary=rotary, **caches
    )


calls(_latent_rope, "latent norm and rope", {
    "GLM-4.7-Flash": {},
    "MiniCPM3": dict(H=40, C=256, N=64, R=32, rotary="halves", cached=False),
    "DeepSeek-V2": dict(T=8192, H=128, N=128, rotary="pairs", cached=False),
})  # fmt: skip


def _latent_step(
    kernel, B=1, T=1, S=8192, H=20, C=512, N=192, R=64, V=256, rotary="pairs_to_halves", fp8=False
):
    q, kv, norm = values(B, T, H, N + R), values(B, T, C + R), values(C)
    cos, sin = (None if rotary is None else values(1, T, R // 2) for _ in "cs")
    c, r, weight = values(B, 1, S, C), values(B, 1, S, R), _expanding(H * (N + V), C, BF16, fp8)
    length = torch.zeros((), dtype=torch.int64, device=DEVICE)
    mask = torch.zeros(B, 1, T, S, dtype=torch.bool, device=DEVICE)
    tensors = (q, kv, norm, cos, sin, c, r, *weight, length, mask)
    operation = submodule("attention.ops").LATENT_STEP
    options = (N, (N + R) ** -0.5, 1e-6, rotary or "halves")
    return lambda: operation(tensors, options)


calls(_latent_step, "latent step", {
    "GLM-4.7-Flash": {},
    "GLM-4.7-Flash, FP8": dict(fp8=True),
    "DeepSeek-V3, FP8": dict(H=128, N=128, V=128, fp8=True),
    "Kimi Linear, batch 16": dict(B=16, H=32, N=128, V=128, rotary=None),
    "DeepSeek-V3": dict(H=128, N=128, V=128),
})  # fmt: skip


def _topk(kernel, T, E=256, K=8, dtype=BF16, bias=False, grad=False, kind=None, **options):
    logits, bias = values(T, E, dtype=dtype, grad=grad), values(E, dtype=FP32) if bias else None
    choose = functools.partial(kernel.fused_topk, logits, K, bias=bias, dtype=kind, **options)
    return with_gradients(lambda: choose()[0], logits) if grad else choose


calls(_topk, "router", {
    **{f"T {T}": dict(T=T) for T in (1, 8192)},
    "512 experts": dict(T=64, E=512, K=10),
    "fp16, weights in fp32": dict(T=64, E=8, K=2, dtype=FP16, kind=FP32),
    "sigmoid": dict(T=64, dtype=FP32, bias=True, scoring="sigmoid", scale=2.5),
    "sigmoid, nothing added to the sum": dict(
        T=64, dtype=FP32, bias=True, scoring="sigmoid", eps=0.0),
    "sigmoid, rounded": dict(T=64, E=32, K=4, bias=True, scoring="sigmoid", eps=1e-6, rounds=True),
    "groups, as in DeepSeek-V3": dict(
        T=64, dtype=FP32, bias=True, scoring="sigmoid", scale=2.5, n_group=8, topk_group=4),
    "groups, as in DeepSeek-V2": dict(
        T=64, E=160, K=6, dtype=FP32, renormalize=False, n_group=8, topk_group=3,
        group_score="max"),
    "training": dict(T=8192, grad=True),
})  # fmt: skip


def _shared(kernel, T, H=2048, grad=False):
    tensors = [values(*shape, grad=grad) for shape in ((T, H), (T, H), (T, H), (H,))]
    add = functools.partial(submodule("experts.ops_shared").add_shared, *tensors)
    return with_gradients(add, *tensors) if grad else add


calls(_shared, "shared expert", {"T 1": dict(T=1), "training": dict(T=8192, grad=True)})


# --- the gated delta rule


def raw_gates(HV: int) -> dict:
    """The options by which a rule computes its gates itself."""
    tensors = {"A_log": values(HV, dtype=FP32), "dt_bias": values(HV, dtype=FP32)}
    return {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, **tensors}


def _rule(
    kernel, T=2048, H=16, HV=32, K=128, V=128, dtype=BF16, B=1, packed=None, state=None,
    v_first=False, raw=False, l2norm=True, pool=None, checkpoints=0, padded=False, grad=False,
    index=torch.int32, anew=False,
):  # fmt: skip
    """Packed by lengths, from states of a dtype (in a pool with indices of a dtype)."""
    far = 8 if padded else 0
    q, k = (values(B, T, H, K + far, dtype=dtype)[..., :K] for _ in "qk")
    v = values(B, T, HV, V + far, dtype=dtype)[..., :V]
    gate = dtype if raw else FP32
    tensors = (q, k, v, values(B, T, HV, dtype=gate), values(B, T, HV, dtype=gate))
    options = {"output_final_state": state is not None, "use_qk_l2norm_in_kernel": l2norm}
    if raw:
        options.update(raw_gates(HV))
    N = B
    if packed is not None:
        N, options["cu_seqlens"] = len(packed), offsets(packed, index)
    if state is not None:
        pool_rows = N if pool is None else N + 3
        shape = (pool_rows, HV, V, K) if v_first else (pool_rows, HV, K, V)
        options.update(initial_state=values(*shape, dtype=state), state_v_first=v_first)
    if pool is not None:
        options["state_indices"] = rows(N, pool)
    if anew:
        options["has_initial_state"] = torch.zeros(N, dtype=torch.bool, device=DEVICE)
    if checkpoints:
        options["checkpoint_every"] = checkpoints
    if grad:
        tensors = [x.detach().requires_grad_() for x in tensors]
    rule = functools.partial(kernel.chunk_gated_delta_rule, *tensors, **options)
    return with_gradients(lambda: rule()[0], *tensors) if grad else rule


two, many = (700, 1348), (32,) * 64
pool = dict(pool=torch.int64, checkpoints=64, packed=two, padded=True)
calls(_rule, "gdn prefill", {
    "equal lengths": {},
    "from states": dict(state=FP32),
    "packed": dict(packed=two, state=FP32, raw=True),
    "packed, many sequences": dict(packed=many, state=FP32, v_first=True),
    "fp16": dict(dtype=FP16, state=BF16, v_first=True),
    "fp16, without l2norm": dict(dtype=FP16, l2norm=False),
    "long": dict(T=32768, HV=64, state=FP32),
    "long, packed": dict(T=32768, H=2, HV=8, packed=(1000, 31768), state=FP32),
    "long, packed, bf16 states": dict(T=32768, packed=(768, 32000), index=torch.int64, state=BF16),
    "one long of two, packed": dict(T=8192, HV=64, packed=(1024, 7168), raw=True),
    "batch of 4": dict(B=4, T=8192, HV=64),
    "one value head a key head": dict(H=24, HV=24, raw=True, packed=two),
    "six value heads a key head": dict(H=4, HV=24),
    "pool": dict(packed=two, state=FP32, pool=torch.int32, v_first=True),
    "pool, some anew": dict(packed=two, state=BF16, pool=torch.int32, anew=True),
    "pool, bf16": dict(packed=many, state=BF16, pool=torch.int64, checkpoints=64),
    "checkpoints": dict(state=FP32, checkpoints=64, v_first=True),
})  # fmt: skip
for D in (60, 64, 100, 256):
    calls(_rule, f"gdn prefill, head dim {D}", {"": {}, "pool": pool}, K=D, V=D, state=FP32)
for D in (64, 100, 128, 256):
    fp32 = dict(K=D, V=D, dtype=FP32, state=FP32)
    calls(_rule, f"gdn prefill, fp32, head dim {D}", {"": {}, "pool": pool}, **fp32)
calls(_rule, "gdn prefill", {
    "fp32, long": dict(dtype=FP32, state=FP32), "head dim 64, long": dict(K=64, V=64),
}, T=32768, H=2, HV=4)  # fmt: skip
calls(_rule, "gdn training", {
    "bf16": {},
    "from states, packed": dict(state=FP32, packed=two),
    "fp16": dict(dtype=FP16, state=BF16, packed=(100, 1948), index=torch.int64, l2norm=False),
    "raw gates": dict(raw=True, H=8),
    "one value head a key head": dict(H=24, HV=24),
    "head dim 256": dict(K=256, V=256),
    "fp32": dict(dtype=FP32),
}, grad=True)  # fmt: skip


def _pieces(kernel, T=8192, H=16, HV=64, D=128, slots=1, with_m=False, known=False, grad=""):
    """What a process tells of a sequence that others hold too, and its part of the rule; of the
    gradient what it asks of the state before that sequence."""
    call, ops = submodule("gdn.call"), submodule("gdn.ops_context")
    q, v, g = values(1, T, H, D), values(1, T, HV, D), values(1, T, HV)
    start, lengths = values(slots, HV, D, D, dtype=FP32), offsets((T // slots,) * slots)
    options = call.GdnOptions(D**-0.5, use_qk_l2norm=True, output_final_state=True)
    one = (q, q, v, g, g, None, None, start, lengths)
    if grad:
        last = torch.empty_like(start)
        more = (values(slots, HV, D, D, dtype=FP32),) if grad == "entry" else (None, None, None)
        tensors = (*one, v, last, *more)
        options = call.GradientOptions(True, *options)
        launch = getattr(ops, grad.upper()).serving(tensors, options)
        if grad == "begun":
            return lambda: launch and launch(*tensors)(start)
        return lambda: launch and launch(*tensors)
    told = values(slots, HV, 2 * D if with_m else D, D, dtype=FP32)
    tensors = (*one, rows(slots, torch.int32), told, start if known else None)
    launch = ops.PIECES.serving(tensors, options)
    return lambda: launch and launch(*tensors)(start)


calls(_pieces, "gdn pieces", {
    "neighbour": {}, "from states": dict(known=True), "zigzag": dict(slots=2, with_m=True),
    "gradient": dict(grad="entry"), "gradient begun": dict(grad="begun"),
})  # fmt: skip


def _chain(kernel, P=4, pieces=1, HV=64, D=128, given=False, with_m=True, backward=False):
    """The states that a process computes from what all of them have sent."""
    chain = submodule("gdn.ops_context").CHAIN
    gathered = values(P, 1, HV, 2 * D if with_m else D, D, dtype=FP32)
    links = torch.ones(pieces, P, dtype=torch.int32, device=DEVICE)
    states = values(pieces, HV, D, D, dtype=FP32) if given else None
    tensors = (gathered, links, rows(pieces, torch.int64), states)
    return lambda: chain.launcher((*tensors, D, backward))(*tensors)


calls(_chain, "gdn chain", {
    "": {}, "of two": dict(P=2, with_m=False), "from states": dict(given=True),
    "gradient": dict(given=True, backward=True), "last gradient": dict(backward=True),
})  # fmt: skip


def _step(
    kernel, B=1, T=1, H=16, HV=32, K=128, V=128, state=FP32, v_first=False, inplace=True, pool=None,
    raw=True, every=False, packed=None, drafts=False,
):  # fmt: skip
    q, k, v = values(B, T, H, K), values(B, T, H, K), values(B, T, HV, V)
    a = values(B, T, HV, dtype=BF16 if raw else FP32)
    N = B if packed is None else len(packed)
    pool_rows = N if pool is None else N * (T if drafts else 1) + 3
    options = {} if packed is None else {"cu_seqlens": offsets(packed)}
    options["initial_state"] = values(pool_rows, HV, *((V, K) if v_first else (K, V)), dtype=state)
    if raw:
        options.update(raw_gates(HV))
    if pool is not None:
        options["state_indices"] = rows(N, pool)
    if drafts:
        options["state_indices"] = rows(N * T, pool).view(N, T)
        options.update(num_accepted_tokens=rows(N, pool) * 0 + 1, null_index=0)
    return functools.partial(
        kernel.fused_recurrent_gated_delta_rule, q, k, v, a, a, output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=v_first, inplace_final_state=inplace,
        output_all_states=every, **options,
    )  # fmt: skip


for B, state, v_first in itertools.product((1, 8, 64, 256), (FP32, BF16), (False, True)):
    name = f"gdn decode, batch {B}, {str(state)[6:]} {'[V, K]' if v_first else '[K, V]'}"
    table = {"": {}, "tokens from a pool": dict(T=4, pool=torch.int64)}
    calls(_step, name, table, B=B, state=state, v_first=v_first)
calls(_step, "gdn decode", {
    "not in place": dict(inplace=False, raw=False),
    "every state": dict(T=4, inplace=False, every=True),
    "packed": dict(T=9, inplace=False, packed=(4, 5)),
    "drafts": dict(B=8, T=4, v_first=True, pool=torch.int32, drafts=True),
})  # fmt: skip


def _replay(
    kernel, B=64, T=1, H=16, HV=32, K=128, V=128, state=FP32, pool=True, raw=True, force=False,
    R=16, max_tokens=1, dtype=BF16, materialised=(),
):  # fmt: skip
    q, k, v = (values(B, T, heads, D, dtype=dtype) for heads, D in ((H, K), (H, K), (HV, V)))
    a = values(B, T, HV, dtype=BF16 if raw else FP32)
    states = values(B, HV, V, K, dtype=state)
    ring = kernel.make_ring(states, H, dtype, rows=R, max_tokens=max_tokens)
    cursor = torch.zeros(B, 2, dtype=torch.int32, device=DEVICE)
    shared = {"state_indices": rows(B, torch.int32)} if pool else {}
    flush = {"force_flush": torch.zeros(B, dtype=torch.bool, device=DEVICE)} if force else {}
    options = {"use_qk_l2norm_in_kernel": True, **shared, **flush}
    if raw:
        options.update(raw_gates(HV))
    accepted = None if max_tokens == 1 else torch.ones(B, dtype=torch.int32, device=DEVICE)

    def step():
        o = kernel.replay_gated_delta_rule(q, k, v, a, a, states, ring, cursor, **options)
        kernel.advance_ring(cursor, ring, accepted, **shared, **flush)
        for inplace in materialised:
            kernel.materialise_ring(states, ring, cursor, inplace=inplace, **shared)
        return o

    return step


both = dict(materialised=(False, True))
calls(_replay, "gdn replay", {
    "fp32": both,
    "bf16": dict(state=BF16, **both),
    "without a pool, forced": dict(pool=False, force=True, raw=False),
    "fp16": dict(dtype=FP16, state=FP16, R=12),
    "head dim 100, fp32 throughout": dict(K=100, V=100, dtype=FP32, **both),
    "head dim 256": dict(K=256, V=256, **both),
    "head dim 256, bf16": dict(K=256, V=256, state=BF16),
    "4 drafts": dict(T=4, max_tokens=4, R=32),
    "4 drafts, bf16": dict(T=4, max_tokens=4, R=32, state=BF16),
    "8 drafts": dict(T=8, max_tokens=8, R=32),
})  # fmt: skip


# --- Kimi Delta Attention


def _channels(
    kernel, T=2048, H=32, HV=32, K=128, V=128, dtype=BF16, B=1, packed=None, state=None,
    v_first=False, raw=False, bound=None, l2norm=True, pool=None, checkpoints=0, grad=False,
):  # fmt: skip
    q, k, v = (values(B, T, n, D, dtype=dtype) for n, D in ((H, K), (H, K), (HV, V)))
    gate = dtype if raw else FP32
    tensors = (q, k, v, values(B, T, HV, K, dtype=gate), values(B, T, HV, dtype=gate))
    options = {"output_final_state": state is not None, "use_qk_l2norm_in_kernel": l2norm}
    if raw:
        options.update(raw_gates(HV), lower_bound=bound, dt_bias=values(HV * K, dtype=FP32))
    N = B
    if packed is not None:
        N, options["cu_seqlens"] = len(packed), offsets(packed)
    if state is not None:
        shape = (N + 3, HV) if pool is not None else (N, HV)
        shape += (V, K) if v_first else (K, V)
        options.update(initial_state=values(*shape, dtype=state), state_v_first=v_first)
    if pool is not None:
        options["state_indices"] = rows(N, pool)
    if checkpoints:
        options["checkpoint_every"] = checkpoints
    if grad:
        tensors = [x.detach().requires_grad_() for x in tensors]
    rule = functools.partial(kernel.chunk_kda, *tensors, **options)
    return with_gradients(lambda: rule()[0], *tensors) if grad else rule


calls(_channels, "kda prefill", {
    "equal lengths": {},
    "64 heads": dict(T=8192, H=64, HV=64, state=FP32),
    "8 heads": dict(T=8192, H=8, HV=8, state=FP32),
    "packed, softplus": dict(packed=two, state=FP32, raw=True),
    "bounded": dict(raw=True, bound=-5.0, H=16),
    "fp16": dict(dtype=FP16, state=BF16, v_first=True),
    "fp16, without l2norm": dict(dtype=FP16, l2norm=False),
    "pool": dict(packed=two, state=FP32, pool=torch.int64, checkpoints=64),
    "head dim 64": dict(K=64, V=64, H=3, HV=6),
    "head dim 100": dict(K=100, V=100, H=3, HV=3),
    "head dim 256": dict(K=256, V=256, H=4, HV=4),
    "fp32": dict(dtype=FP32, state=FP32, H=4, HV=4),
    "fp32, head dim 256": dict(K=256, V=256, dtype=FP32, H=4, HV=4),
})  # fmt: skip
calls(_channels, "kda training", {
    "bf16": {},
    "from states, packed, softplus": dict(packed=two, state=FP32, raw=True),
    "bounded, grouped heads": dict(raw=True, bound=-5.0, H=16, HV=32),
    "fp16, without l2norm": dict(dtype=FP16, l2norm=False, state=BF16, v_first=True),
    "head dim 64": dict(K=64, V=64, H=3, HV=6),
    "head dim 100": dict(K=100, V=100, H=3, HV=3),
    "head dims 128 and 256": dict(V=256, H=4, HV=4),
    "fp32": dict(dtype=FP32, state=FP32, H=4, HV=4),
}, grad=True)  # fmt: skip


def _channel_step(
    kernel, B=1, T=1, H=32, K=128, V=128, state=FP32, v_first=False, bound=None, raw=True,
    inplace=True, pool=None, dtype=BF16,
):  # fmt: skip
    q, k, v, g = (values(B, T, H, D, dtype=dtype) for D in (K, K, V, K))
    beta, count = values(B, T, H, dtype=dtype), B if pool is None else B + 3
    options = {"initial_state": values(count, H, *((V, K) if v_first else (K, V)), dtype=state)}
    if raw:
        options.update(raw_gates(H), lower_bound=bound, dt_bias=values(H * K, dtype=FP32))
    if pool is not None:
        options.update(state_indices=rows(B, pool), null_index=0)
    return functools.partial(
        kernel.fused_recurrent_kda, q, k, v, g, beta, output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=v_first, inplace_final_state=inplace, **options,
    )  # fmt: skip


for B, state, v_first in itertools.product((1, 64), (FP32, BF16), (False, True)):
    name = f"kda decode, batch {B}, {str(state)[6:]} {'[V, K]' if v_first else '[K, V]'}"
    table = {"": {}, "bounded": dict(bound=-5.0), "tokens from a pool": dict(T=4, pool=torch.int64)}
    calls(_channel_step, name, table, B=B, state=state, v_first=v_first)
calls(_channel_step, "kda decode", {
    "gates given": dict(raw=False, inplace=False), "head dim 100": dict(K=100, V=100),
})  # fmt: skip


# --- what surrounds the rule


def _convolution(
    kernel, apart=False, packed=None, seq_idx=False, T=2048, D=8192, grad=False, states=True
):
    x = values(1, D, T, grad=grad) if apart else values(1, T, D, grad=grad).transpose(1, 2)
    weight, options = values(D, 4, grad=grad), {}
    if packed is not None:
        options["cu_seqlens"] = offsets(packed)
        options["initial_states"] = values(len(packed), D, 3) if states else None
    if seq_idx:
        options["seq_idx"] = torch.zeros(1, T, dtype=torch.int32, device=DEVICE)
    forward = functools.partial(kernel.causal_conv1d_fn, x, weight, None, "silu", **options)
    return with_gradients(forward, x, weight) if grad else forward


def _convolution_update(kernel, B=64, D=8192, T=1, S=3, drafts=False):
    x = values(B, D) if T == 1 else values(B, T, D).mT
    tensors, options = (x, values(B, D, S), values(D, 4)), {}
    if drafts:
        options = {"conv_state_indices": rows(B, torch.int32), "null_index": 0}
        options["num_accepted_tokens"] = rows(B, torch.int32) * 0 + 1
    return lambda: kernel.causal_conv1d_update(*tensors, None, "silu", **options)


def _parts(B, T, H=16, HV=32, D=128):
    qkv = values(B, T, (2 * H + HV) * D).split([H * D, H * D, HV * D], -1)
    return [x.unflatten(-1, (-1, D)) for x in qkv]


def _prologue(kernel, packed=None, T=2048):
    lengths, states, final_width = None, None, 4
    if packed is not None:
        lengths, states, final_width = offsets(packed), values(len(packed), 8192, 3), 0
    convolve = submodule("gdn_layer.ops_fused").PROLOGUE
    tensors = (*_parts(1, T), values(8192, 4), None, lengths, states)
    return lambda: convolve(tensors, ("silu", final_width))


def _layer_decode(kernel, B=1):
    q, k, v = _parts(B, 1)
    z, a = values(B, 1, 32, 128), values(B, 1, 32)
    tensors = (
        q, k, v, z, a, a, values(B, 8192, 4), values(B, 32, 128, 128, dtype=FP32),
        values(8192, 4), None, values(32, dtype=FP32), values(32, dtype=FP32),
        values(128, dtype=FP32),
    )  # fmt: skip
    decode = submodule("gdn_layer.ops_fused").DECODE
    return functools.partial(decode, tensors, ("silu", 1e-6, "silu", False))


def _projections(kernel, B=1, K=2048, rows=(8192, 4096, 32, 32), activation=None):
    # a served model calls this on a GPU; on a CPU its modules, so the operator is called past that
    products = submodule("projection.call").products
    call = products(values(B, K), [values(n, K) for n in rows], activation)
    return lambda: submodule("projection.project").PROJECT.op(*call.tensors, *call.options)


def _norm(kernel, D=128, grad=False):
    x, gate, weight = (values(*s, D, grad=grad) for s in ((4096,), (4096,), ()))
    forward = functools.partial(kernel.rms_norm_gated, x, gate, weight)
    return with_gradients(forward, x, gate, weight) if grad else forward


for grad, kind in ((False, "convolution"), (True, "convolution, gradient")):
    calls(_convolution, f"gdn_layer {kind}", {
        "": {},
        "packed": dict(packed=two),
        "packed, no states": dict(packed=two, states=False),
        "seq_idx": dict(seq_idx=True),
        "tokens side by side": dict(apart=True),
        "odd sizes": dict(T=1001, D=1002, apart=True),
    }, grad=grad)  # fmt: skip
calls(_convolution_update, "gdn_layer convolution update", {
    "": {}, "tokens": dict(T=3), "drafts": dict(T=3, S=5, drafts=True),
})  # fmt: skip
calls(_prologue, "gdn_layer prologue", {"": {}, "packed": dict(packed=two)})
calls(_layer_decode, "gdn_layer decode", {"": {}, "batch 64": dict(B=64)})


def _normed_projection(kernel, K, N):
    tensors = (values(1, 1, K), values(K), values(N, K))
    return lambda: submodule("projection.project").NORMED_PROJECT.op(*tensors, 1e-6)


calls(_normed_projection, "projection of a norm", {"GLM-4.7-Flash": dict(K=768, N=5120)})
calls(_projections, "projection", {
    "1 token": {}, "4 tokens": dict(B=4), "4 tokens, one weight": dict(B=4, rows=(2048,)),
    "64 tokens, one weight": dict(B=64, K=9216, rows=(2560,)),
    "gated": dict(rows=(6144, 6144), activation="silu"),
})  # fmt: skip
for D in (64, 128, 256):
    calls(_norm, f"gdn_layer norm, {D} channels", {"": {}, "gradient": dict(grad=True)}, D=D)


def _fp8(kernel, M, K=4096, gate=False):
    module, x = submodule("fp8.portable.quantise"), values(M, 2 * K if gate else K)

    def run():
        if not module.is_quantised_here(x):
            return None
        if not gate:
            return module.quantiser(x)(x)
        launch = module.gate_launch(x.device, (M, K), (2 * K, 2 * K))
        return module.quantising(launch, x.device, (M, K))(*x.chunk(2, 1))

    return run


calls(_fp8, "fp8 quantise", {"": dict(M=4096), "1 token": dict(M=1), "K 5120": dict(M=33, K=5120)})
calls(_fp8, "fp8 silu_mul_quantise", {
    "": dict(M=4096, K=14336), "16 tokens": dict(M=16, K=17408),
}, gate=True)  # fmt: skip


def _fp8_dequantise(kernel, N, K):
    tensors = values(N, K, dtype=E4M3), values(-(-N // 128), K // 128, dtype=FP32)
    return functools.partial(submodule("fp8.ops").DEQUANTISE, tensors)


calls(_fp8_dequantise, "fp8 dequantise", {"": dict(N=14336, K=4096), "odd": dict(N=400, K=1152)})


def _fp8_few(kernel, M, K=4096, rows=(14336, 14336), down=0, plain=(), known=True, e8m0=False):
    ops = submodule("fp8.ops")
    weights = [values(n, K, dtype=E4M3) for n in rows]
    weights += [values(down, rows[0], dtype=E4M3)] if down else []
    scales = [values(*(-(-n // 128) for n in w.shape), dtype=FP32).abs() for w in weights]
    x = values(M, K)
    plain, biases = tuple(values(n, K) for n in plain), (None,) * len(weights)
    if e8m0:
        scales = [scale.to(torch.float8_e8m0fnu) for scale in scales]

    def run():
        codes = None
        if known:
            module = submodule("fp8.portable.quantise")
            if not module.is_quantised_here(x):
                return None  # on a chip without FP8
            codes = module.quantiser(x)(x)
        if down:
            tensors = (*weights, *scales, *(None,) * 3, x, *(codes or (None, None)), None)
            return ops.MLP(tensors, ((M,), True))
        return ops.products((M,), [*zip(weights, scales, biases)], x, codes, plain)

    return run


def _fp8_norm(kernel, M, K=4096, residual=True, mode="llama"):
    x, weight, added = values(M, K), values(K), values(M, K) if residual else None
    norm, options = submodule("fp8.ops").NORM_QUANTISE, (1e-6, mode, float(mode == "gemma"))
    return functools.partial(norm, (x, weight, added), options)


calls(_fp8_norm, "fp8 norm", {
    "": dict(M=64), "K 5120, gemma": dict(M=33, K=5120, residual=False, mode="gemma"),
    "K 16384": dict(M=8, K=16384),
})  # fmt: skip


for M in (1, 32, 64):
    calls(_fp8_few, f"fp8 few, M {M}", {
        "MLP": dict(down=4096), "qkv": dict(rows=(4096, 1024, 1024)), "one": dict(rows=(2048,)),
        "beside bf16": dict(K=2560, rows=(8192, 4096), plain=(32, 32)),
        "quantised": dict(rows=(2048,), known=False),
    }, M=M)  # fmt: skip
calls(_fp8_few, "fp8 few", {
    "odd blocks": dict(M=17, K=17 * 128, rows=(1040, 272)),
    "odd columns": dict(M=17, K=1344, rows=(1040, 272)),
    "odd MLP, e8m0": dict(M=17, K=1344, rows=(10944, 10944), down=1344, e8m0=True),
})  # fmt: skip


def _fp8_gate(kernel, B=1, T=4096, HQ=16, D=256):
    x, both = values(B, T, HQ, D), values(B, T, HQ, 2 * D)
    gate = submodule("attention.ops_fp8").GATE_QUANTISE
    return lambda: gate((x, both[..., D:]))


def _fp8_attention(kernel, B=1):
    call, attend = _kvcache(kernel, B), submodule("attention.ops_fp8").ATTENTION_QUANTISE
    return lambda: attend((*call.args, call.keywords["attention_mask"]), (128**-0.5,))


def _fp8_gated_norm(kernel, B=1, T=4096, HV=32):
    x, z, weight = values(B, T, HV, 128), values(B, T, HV, 128), values(128, dtype=FP32)
    norm = submodule("gdn_layer.ops_fp8").NORM_QUANTISE
    return lambda: norm((x, z, weight), (1e-6, "silu"))


def _fp8_layer_decode(kernel, B=1):
    decode = submodule("gdn_layer.ops_fp8").DECODE_QUANTISE
    return functools.partial(decode, *_layer_decode(kernel, B).args)


calls(_fp8_gate, "fp8 attention gate", {"": {}, "16 tokens": dict(B=16, T=1)})
calls(_fp8_attention, "fp8 attention decode", {"": {}, "16 rows": dict(B=16)})
calls(_fp8_gated_norm, "fp8 gated norm", {"": {}, "1 token": dict(T=1)})
calls(_fp8_layer_decode, "fp8 gdn_layer decode", {"": {}, "batch 64": dict(B=64)})


def _fp8_experts(kernel, T, E=256, K=8, H=2048, N=512, index=torch.int64):
    w_gate_up, w_down = values(E, 2 * N, H, dtype=E4M3), values(E, H, N, dtype=E4M3)
    scales = [
        values(E, *(n // 128 for n in w.shape[1:]), dtype=FP32).abs() for w in (w_gate_up, w_down)
    ]
    ids = torch.arange(T * K, dtype=index, device=DEVICE).remainder_(E).view(T, K)
    weights = values(T, K, dtype=FP32)
    tensors = (values(T, H), w_gate_up, scales[0], w_down, scales[1], ids, weights)
    return functools.partial(submodule("experts.ops_fp8").fp8_experts, *tensors)


calls(_fp8_experts, "experts fp8", {
    **{f"T {T}": dict(T=T) for T in (1, 16, 64, 512, 2048, 8192)},
    "T 300, wide": dict(T=300, E=128, H=5120, N=1536, index=torch.int32),
    "T 4096, odd blocks": dict(T=4096, E=60, K=4, H=2176, N=1408),
})  # fmt: skip


# --- RMSNorm and the gate of SwiGLU alone


def _rms_norm(kernel, M, D=4096, dtype=BF16, weight=BF16, added=True, grad=False, **options):
    x, residual = values(M, D, dtype=dtype, grad=grad), values(M, D, dtype=dtype)
    tensors = [x] if weight is None else [x, values(D, dtype=weight, grad=grad)]
    residual = residual if added else None

    def forward():
        found = kernel.rms_norm(*tensors, residual=residual, **options)
        return found[0] if isinstance(found, tuple) else found

    return with_gradients(forward, *tensors) if grad else forward


def _silu_mul(kernel, M=4096, N=14336, dtype=BF16, grad=False, **options):
    gate, up = values(M, 2 * N, dtype=dtype, grad=grad).chunk(2, -1)
    forward = functools.partial(kernel.silu_mul, gate, up, **options)
    return with_gradients(forward, gate, up) if grad else forward


fp32, centred = dict(dtype=FP32, weight=FP32), dict(casting_mode="gemma", offset=1.0)
wide = (128, 1024, 2560, 4096, 5120, 8192, 16384, 20000)
for grad, kind in ((False, "forward"), (True, "training")):
    calls(_rms_norm, f"rms_norm {kind}", {
        **{f"{D} columns": dict(D=D) for D in wide},
        "few rows": dict(M=3),
        "odd sizes": dict(M=1001, D=1001, **centred),
        **{f"fp32, {D} columns": dict(D=D, **fp32) for D in (4096, 16384, 20000)},
        "fp16, fp32 weight": dict(dtype=FP16, weight=FP32),
        "12288 columns, fp32 weight": dict(D=12288, weight=FP32, added=False, **centred),
        "alone": dict(D=4096, added=False, **centred),
    }, M=4096, grad=grad)  # fmt: skip
    table = {"": {}, "fp16": dict(dtype=FP16, activation="gelu_tanh")}
    calls(_silu_mul, f"silu_mul {kind}", table, grad=grad)
    after = {"residual after": centred, "residual after, llama": {}}
    calls(_rms_norm, f"rms_norm {kind}", after, M=4096, grad=grad, after=True)
calls(_rms_norm, "rms_norm forward", {"no weight": dict(weight=None, added=False)}, M=4096)


# --- the choice of a token


def _choose(kernel, V, B=1, dtype=BF16, seen=False, ends=0, **options):
    ops, call = submodule("sampling.ops"), submodule("sampling.call")
    options = call.ChooseOptions(**options)
    logits = values(B, V, dtype=dtype)
    q = values(B, V, dtype=FP32) if options.top_k else None
    met = torch.zeros(B, V + 1, dtype=torch.bool, device=DEVICE) if seen else None
    ids = torch.zeros(ends, dtype=torch.int64, device=DEVICE) if ends else None
    length = torch.zeros((), dtype=torch.int64, device=DEVICE)
    return lambda: ops.CHOOSE((logits, q, met, ids, length), options)


calls(_choose, "sampling, choice", {
    "greedy": dict(V=128256, top_k=0),
    "greedy, fp32, penalty, ends": dict(
        V=32768, top_k=0, dtype=FP32, seen=True, ends=2, penalty=1.1, least=9),
    "top-k, top-p": dict(V=248320, B=64, top_k=50, top_p=0.9, temperature=0.8),
    "all": dict(
        V=151936, B=4, top_k=256, top_p=0.9, min_p=0.02, seen=True, ends=1, penalty=1.1, least=9),
})  # fmt: skip


# --- adapters


def _adapters(kernel, M, K, outputs, rank, drop=0.0, dtype=FP32):
    ops = submodule("lora.ops")
    given = (
        values(M, K, grad=True), [values(N, K) for N in outputs], [None] * len(outputs),
        [values(rank, K, dtype=dtype, grad=True) for _ in outputs],
        [values(N, rank, dtype=dtype, grad=True) for N in outputs],
        (2.0,) * len(outputs), (drop,) * len(outputs),
    )  # fmt: skip
    return with_gradients(lambda: sum([y.sum().view(1) for y in ops.adapted(*given)]), given[0])


calls(_adapters, "adapters", {
    "q, k, v": dict(M=4096, K=4096, outputs=(4096, 1024, 1024), rank=16),
    "down": dict(M=4096, K=14336, outputs=(4096,), rank=64),
    "gate, up, with dropout": dict(M=4096, K=576, outputs=(1536, 1536), rank=8, drop=0.05),
    "in bf16": dict(M=4096, K=4096, outputs=(4096, 1024, 1024), rank=16, dtype=BF16),
})  # fmt: skip


# --- the loss of language models


def _cross_entropy(kernel, V, M=4096, dtype=BF16, mean=True):
    ops, logits = submodule("loss.ops"), values(M, V, dtype=dtype, grad=True)
    target = torch.zeros(M, dtype=torch.int64, device=DEVICE)
    return with_gradients(
        lambda: ops.CROSS_ENTROPY((logits, target), (-100, mean))[0].view(1), logits
    )


def _linear_loss(kernel, V, M=4096, H=1024, dtype=BF16, frozen=False, **options):
    hidden = values(M, H, dtype=dtype, grad=True)
    weight = values(V, H, dtype=dtype, grad=not frozen)
    target = torch.zeros(M, dtype=torch.int64, device=DEVICE)
    leaves = [hidden] if frozen else [hidden, weight]
    return with_gradients(
        lambda: kernel.linear_cross_entropy(hidden, weight, target, **options).view(1), *leaves
    )


def _tokens(kernel, V, M=4096, H=1024, dtype=BF16, entropy=True, **options):
    hidden, weight = (values(n, H, dtype=dtype, grad=True) for n in (M, V))
    target = torch.zeros(M, dtype=torch.int64, device=DEVICE)

    def run():
        found = kernel.token_log_probs(hidden, weight, target, entropy=entropy, **options)
        return sum(found) if entropy else found

    return with_gradients(run, hidden, weight)


calls(_linear_loss, "loss, without logits", {
    "logits that are kept": dict(V=128256, M=2048),
    "pieces of rows": dict(V=128256, M=4096),
    "frozen weight": dict(V=151936, frozen=True),
    "odd sizes, all options": dict(
        V=50257, M=33, label_smoothing=0.1, z_loss=1e-4, softcap=30.0, reduction="sum"
    ),
    "fp16": dict(V=32000, dtype=FP16),
    "fp32": dict(V=32000, dtype=FP32),
})  # fmt: skip
calls(_tokens, "log-probabilities of tokens", {
    "with entropy": dict(V=128256),
    "without": dict(V=151936, entropy=False, temperature=0.7),
})  # fmt: skip
calls(_cross_entropy, "loss, cross entropy", {
    **{f"{V} words": dict(V=V) for V in (32768, 128256, 151936, 248320)},
    "odd sizes": dict(V=50257, M=33, mean=False),
    "fp32": dict(V=32000, dtype=FP32),
    "fp16": dict(V=32000, dtype=FP16),
})  # fmt: skip
