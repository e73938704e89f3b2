"""Latent attention of a few tokens over a cache: plain torch against keys and values that are made,
kernels against plain torch in fp64, arguments, and both processors."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import captured, load_package, prepared, relative_error, submodule
from fp8_problems import quantised_weight
from interpreter import (  # noqa: F401
    DEVICE,
    INTERPRETING,
    both_ways,
    compiled,
    test_in_the_interpreter,
)

kernel = load_package()
reference, calls = submodule("attention.reference"), submodule("attention.call")
HALF = torch.float16 if INTERPRETING else torch.bfloat16
ERROR = {torch.float16: 6e-4, torch.bfloat16: 5e-3}  # relative: two roundings
# B, T, H, N, R, C, V
SIZES = [(2, 1, 3, 16, 16, 32, 16), (2, 4, 5, 16, 16, 32, 48), (1, 1, 6, 16, 16, 32, 24),
         (1, 8, 2, 48, 32, 64, 40)]  # fmt: skip
GPU_SIZES = [
    (2, 1, 20, 192, 64, 512, 256), (2, 4, 20, 192, 64, 512, 256), (3, 1, 16, 128, 64, 512, 128),
    (1, 2, 128, 128, 64, 512, 128), (2, 1, 40, 64, 32, 256, 64), (70, 1, 5, 48, 16, 128, 48),
    (1, 1, 128, 128, 64, 512, 128), (3, 4, 32, 64, 64, 256, 128),
]  # fmt: skip
NAMES = ("q", "latents", "rotated", "weight", "weight_scale", "cache_seqlens", "attention_mask")
ROTARY = ("halves", "pairs", "pairs_to_halves", None)


def folders() -> tuple:
    """Those of the implementations that are there."""
    hopper = not INTERPRETING and torch.cuda.get_device_capability() == (9, 0)
    return ("portable", "hopper") if hopper else ("portable",)


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def problem(
    sizes, S=50, dtype=torch.float32, device="cpu", mask=None, filled=None, scales=None
) -> dict:
    """Arguments; NaN in the slots that are not filled; scales: of a weight in FP8, their dtype."""
    B, T, H, N, R, C, V = sizes
    x = {
        "q": 2 * normal(B, T, H, N + R, seed=1), "latents": normal(B, 1, S, C, seed=2),
        "rotated": normal(B, 1, S, R, seed=3), "weight": normal(H * (N + V), C, seed=4) * C**-0.5,
    }  # fmt: skip
    x = {name: tensor.to(device, dtype) for name, tensor in x.items()}
    if scales is not None:
        x["weight"], x["weight_scale"] = quantised_weight(x["weight"], scales == "e8m0")
    if filled is not None:
        x["cache_seqlens"] = torch.tensor(filled, device=device)
        for b in range(B):
            end = filled if isinstance(filled, int) else filled[b]
            x["latents"][b, :, end:] = x["rotated"][b, :, end:] = float("nan")
    if mask is not None:
        seen = normal(B, 1, T, S, seed=5) > -0.5
        seen[0, :, 0] = False  # a token that attends to nothing
        added = normal(B, 1, T, S, seed=6).masked_fill(~seen, -torch.inf)
        x["attention_mask"] = (seen if mask == "bool" else added).to(device)
    return {**x, "qk_nope_head_dim": N}


def by_definition(q, latents, rotated, weight, cache_seqlens=None, *, qk_nope_head_dim,
                  attention_mask=None, softmax_scale=None):  # fmt: skip
    """In fp64, of keys and values that are made for one row and head after the other."""
    (B, T, H, D), S, N = q.shape, latents.shape[2], qk_nope_head_dim
    y = torch.zeros(B, T, H, weight.shape[0] // H - N, dtype=torch.float64)
    lengths = torch.full((B,), S) if cache_seqlens is None else cache_seqlens.expand(B)
    for b, t, h in itertools.product(range(B), range(T), range(H)):
        n = int(lengths[b])
        w = weight.view(H, -1, weight.shape[1])[h].double()
        kv = latents[b, 0, :n].double() @ w.T
        k = torch.cat([kv[:, :N], rotated[b, 0, :n].double()], -1)
        s = k @ q[b, t, h].double() * (D**-0.5 if softmax_scale is None else softmax_scale)
        if attention_mask is None:
            s[max(n - T + t + 1, 0) :] = -torch.inf
        elif attention_mask.dtype == torch.bool:
            s[~attention_mask[b, 0, t, :n]] = -torch.inf
        else:
            s = s + attention_mask[b, 0, t, :n]
        if s.isfinite().any():
            y[b, t, h] = s.softmax(-1) @ kv[:, N:]
    return y


def wide(x: dict) -> dict:
    """In fp64, but for a weight in FP8 and its scales."""
    kept = () if x.get("weight_scale") is None else ("weight", "weight_scale")
    return {n: v.double() if torch.is_tensor(v) and v.is_floating_point() and n not in kept else v
            for n, v in x.items()}  # fmt: skip


@contextlib.contextmanager
def memory_of_nan():
    """Memory that is allocated inside holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CASES = [("bool", 37), ("float", None), (None, 41), (None, "each")]


@pytest.mark.parametrize("mask, filled", CASES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_definition(sizes, mask, filled):
    filled = [29 + 9 * b for b in range(sizes[0])] if filled == "each" else filled
    x = problem(sizes, mask=mask, filled=filled)
    found = kernel.latent_attention_with_kvcache(**x)
    assert found.is_contiguous() and relative_error(found, by_definition(**x)) < 2e-6


@both_ways
@pytest.mark.parametrize("mask, filled", CASES)
@pytest.mark.parametrize("parts", [7, 30] if INTERPRETING else [1, 7, 132])
@pytest.mark.parametrize("sizes", SIZES[:3] if INTERPRETING else GPU_SIZES, ids=str)
def test_kernels(sizes, parts, mask, filled, monkeypatch):
    """The portable kernels, and Hopper's where there are some; results repeat bit for bit."""
    monkeypatch.setattr(submodule("runtime.device"), "multiprocessor_count", lambda _: parts)
    B = sizes[0]
    filled = [29 + 9 * (b % 2) for b in range(B)] if filled == "each" else filled
    S = 50 if INTERPRETING else 300
    x = problem(sizes, S=S, mask=mask, filled=filled, dtype=HALF, device=DEVICE)
    right = kernel.latent_attention_with_kvcache(**wide(x))
    scale = x["q"].shape[-1] ** -0.5
    if filled == 41:  # queries that are a part of a larger tensor
        joined = torch.cat([x["q"].flatten(2), x["q"].flatten(2)[..., :8]], -1)
        x["q"] = joined[..., :-8].unflatten(-1, x["q"].shape[2:])
    fields = (*map(x.get, NAMES), x["qk_nope_head_dim"], scale)
    for folder in folders():
        module = f"attention.{folder}.latent"
        with memory_of_nan():
            found = prepared(module, "latent_attention", calls.LatentAttention, *fields)
        assert relative_error(found, right) < ERROR[HALF]
        assert mask is None or not found[0, 0].any()
        if not INTERPRETING:
            again = prepared(module, "latent_attention", calls.LatentAttention, *fields)
            assert torch.equal(found, again)


# heads that begin within blocks of scales; all forms of `finish`
FP8_SIZES = [(1, 1, 6, 48, 16, 256, 80), (2, 4, 3, 16, 16, 256, 32)] if INTERPRETING else [
    *GPU_SIZES[:2], GPU_SIZES[6], (1, 1, 128, 64, 64, 512, 96), (3, 3, 5, 48, 16, 128, 80)
]  # fmt: skip


@pytest.mark.parametrize("scales", ["fp32", "e8m0"])
def test_weight_in_fp8(scales):
    x = problem(FP8_SIZES[1], scales=scales, filled=41)
    weight = submodule("fp8.reference").dequantised(x["weight"], x["weight_scale"])
    same = {**x, "weight": weight, "weight_scale": None}
    found = kernel.latent_attention_with_kvcache(**x)
    assert torch.equal(found, kernel.latent_attention_with_kvcache(**same))
    with pytest.raises(TypeError, match="weight must be of dtype float8_e4m3fn, got torch.float32"):
        kernel.latent_attention_with_kvcache(**{**x, "weight": weight})


@both_ways
@pytest.mark.parametrize("scales", ["fp32", "e8m0"])
@pytest.mark.parametrize("sizes", FP8_SIZES, ids=str)
def test_kernels_with_a_weight_in_fp8(sizes, scales, monkeypatch):
    """Which is not rounded: errors are below those of the same weight in 16 bits."""
    monkeypatch.setattr(submodule("runtime.device"), "multiprocessor_count", lambda _: 7)
    S = 50 if INTERPRETING else 300
    x = problem(sizes, S=S, filled=41, dtype=HALF, device=DEVICE, scales=scales)
    right = kernel.latent_attention_with_kvcache(**wide(x))
    more = x["qk_nope_head_dim"], x["q"].shape[-1] ** -0.5
    rounded = submodule("fp8.reference").dequantised(x["weight"], x["weight_scale"]).to(HALF)
    for folder in folders():
        place = f"attention.{folder}.latent", "latent_attention", calls.LatentAttention
        found, other = (
            prepared(*place, *map(y.get, NAMES), *more)
            for y in (x, {**x, "weight": rounded, "weight_scale": None})
        )
        assert relative_error(found, right) < ERROR[HALF]
        assert relative_error(found, right) <= 1.02 * relative_error(other, right)


def expanded(q, latents, rotated, weight, *, qk_nope_head_dim: int, **_) -> torch.Tensor:
    """As transformers computes it: keys and values of all slots, rounded, and SDPA."""
    (B, _, H, _), S = q.shape, latents.shape[2]
    kv = F.linear(latents, weight).view(B, S, H, -1).transpose(1, 2)
    k = torch.cat([kv[..., :qk_nope_head_dim], rotated.expand(-1, H, -1, -1)], -1)
    v = kv[..., qk_nope_head_dim:]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)


@both_ways
@pytest.mark.parametrize(
    "sizes", [SIZES[0]] if INTERPRETING else [s for s in GPU_SIZES if s[1] == 1], ids=str
)
def test_error_beside_the_expanded_form(sizes, monkeypatch):
    """No larger than that of keys and values that are made and rounded, both against fp64."""
    monkeypatch.setattr(submodule("runtime.device"), "multiprocessor_count", lambda _: 7)
    x = problem(sizes, S=300, dtype=HALF, device=DEVICE)
    x["q"] *= 2
    right = kernel.latent_attention_with_kvcache(**wide(x))
    fields = (*map(x.get, NAMES), sizes[3], x["q"].shape[-1] ** -0.5)
    for folder in folders():
        module = f"attention.{folder}.latent"
        mine = prepared(module, "latent_attention", calls.LatentAttention, *fields)
        assert relative_error(mine, right) <= 1.1 * relative_error(expanded(**x), right)


# folder, sizes: those whose absorbed queries are two halves
HALVES = [("portable", (1, 1, 2, 16, 16, 64, 32))] if INTERPRETING else [
    ("hopper", GPU_SIZES[0]), ("hopper", GPU_SIZES[2]), ("portable", GPU_SIZES[2]),
    ("portable", GPU_SIZES[4]), ("hopper", (1, 1, 32, 128, 64, 512, 128)),
]  # fmt: skip


@both_ways
@pytest.mark.parametrize("folder, sizes", HALVES, ids=str)
def test_error_over_many_slots(folder, sizes, monkeypatch):
    """What one rounding of the absorbed queries adds is the same for all slots, and would be the
    larger part of the error."""
    if folder not in folders():
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(submodule("runtime.device"), "multiprocessor_count", lambda _: 7)
    x = problem((1, *sizes[1:]), S=4096 if INTERPRETING else 32768, dtype=HALF, device=DEVICE)
    x["q"] /= 2
    right = kernel.latent_attention_with_kvcache(**wide(x))
    fields = (*map(x.get, NAMES), sizes[3], x["q"].shape[-1] ** -0.5)
    mine = prepared(
        f"attention.{folder}.latent", "latent_attention", calls.LatentAttention, *fields
    )
    assert relative_error(mine, right) <= 1.1 * relative_error(expanded(**x), right)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("sizes", [GPU_SIZES[6], GPU_SIZES[1]], ids=str)
def test_a_cache_that_grows(sizes, monkeypatch):
    """Many rows are in tiles of 32 over few slots, of 64 over many, in parts."""
    monkeypatch.setattr(submodule("runtime.device"), "multiprocessor_count", lambda _: 33)
    for S in (900, 4000, 901, 4001):
        x = problem(sizes, S=S, dtype=HALF, device=DEVICE)
        found = kernel.latent_attention_with_kvcache(**x)
        right = kernel.latent_attention_with_kvcache(**wide(x))
        assert relative_error(found, right) < ERROR[HALF]


@pytest.mark.gpu
@compiled
def test_memory_of_a_batch():
    """16 sequences of 32768 slots: what is held beside the result, of 13.7 GiB of keys and values
    that the expanded form makes."""
    B, S, (_, T, H, N, R, C, V) = 16, 32768, GPU_SIZES[0]
    make = functools.partial(torch.randn, device="cuda", dtype=HALF)
    q, latents, rotated = make(B, T, H, N + R), make(B, 1, S, C), make(B, 1, S, R)
    weight = make(H * (N + V), C) * C**-0.5
    call = functools.partial(kernel.latent_attention_with_kvcache, qk_nope_head_dim=N)
    call(q, latents, rotated, weight, torch.tensor(S, device="cuda"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(q, latents, rotated, weight, torch.tensor(S, device="cuda"))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20


def rope_problem(rotary, cached, dtype=torch.float32, device="cpu", T=3, R=16, N=32, C=64) -> dict:
    P = R if rotary == "halves" else R // 2
    x = {"q": normal(2, T, 5, N + R, seed=1), "kv": normal(2, T, C + R, seed=2),
         "weight": normal(C, seed=3)}  # fmt: skip
    if cached:
        x["latent_cache"], x["rotated_cache"] = normal(2, 1, 9, C), normal(2, 1, 9, R)
    x = {name: tensor.to(device, dtype) for name, tensor in x.items()}
    if rotary is not None:
        angle = normal(1, T, P, seed=4).double()
        turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex64).to(device)
        x.update(cos=turn.real, sin=turn.imag, rotary=rotary)
    if cached:
        x["cache_position"] = torch.tensor(5, device=device)
    return x


def rope_by_definition(q, kv, weight, cos=None, sin=None, *, rotary="halves", **_):
    """Latents, rotated and q in fp64, one channel after the other."""
    C, R = len(weight), kv.shape[-1] - len(weight)
    c, r, q = kv[..., :C].double(), kv[..., None, C:].double(), q.double().clone()
    c = c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    for x in (r, q[..., q.shape[-1] - R :]) if cos is not None else ():
        before = x.clone()
        for i in range(R // 2):
            a, b = (i, i + R // 2) if rotary == "halves" else (2 * i, 2 * i + 1)
            to = (2 * i, 2 * i + 1) if rotary == "pairs" else (i, i + R // 2)
            one = [table.double()[..., i, None] for table in (cos, sin)]
            two = [t.double()[..., b, None] for t in (cos, sin)] if rotary == "halves" else one
            x[..., to[0]] = before[..., a] * one[0] - before[..., b] * one[1]
            x[..., to[1]] = before[..., b] * two[0] + before[..., a] * two[1]
    return c.unsqueeze(1), r.transpose(1, 2), q


def check_rope(x, found, limit) -> None:
    """found: latents and rotated; q and caches of x have been written. x["before"]: q as it was."""
    c, r, q = rope_by_definition(**{**x, "q": x["before"]})
    pairs = [(found[0], c), (found[1], r), (x["q"], q)]
    if "latent_cache" in x:
        T = c.shape[2]
        pairs += [(x["latent_cache"][:, :, 5 : 5 + T], c), (x["rotated_cache"][:, :, 5 : 5 + T], r)]
    for mine, right in pairs:
        assert mine.shape == right.shape and relative_error(mine, right) < limit


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("rotary", ROTARY)
def test_norm_and_rotary(rotary, cached):
    x = rope_problem(rotary, cached)
    x["before"] = x["q"].clone()
    given = {name: value for name, value in x.items() if name != "before"}
    found = kernel.fused_latent_norm_rope(**given)
    check_rope(x, found, 1e-6)
    assert not cached or torch.equal(x["latent_cache"][:, :, :5], normal(2, 1, 9, 64)[:, :, :5])


@both_ways
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norm_and_rotary_kernel(dtype, rotary, cached):
    """Queries that are a part of a larger tensor; slots that are not written stay."""
    x = rope_problem(rotary, cached, dtype, DEVICE)
    x["q"] = torch.cat([x["q"].flatten(2), x["kv"]], -1)[..., : x["q"][0, 0].numel()].unflatten(
        -1, x["q"].shape[2:]
    )
    x["before"] = x["q"].clone()
    kept = x["latent_cache"].clone() if cached else None
    names = calls.LatentNormRope._fields[:-1]
    fields = (*map(x.get, names), 1e-6, rotary or "halves")
    found = prepared("attention.portable.latent", "latent_norm_rope", calls.LatentNormRope, *fields)
    check_rope(x, found, 1e-6 if dtype == torch.float32 else ERROR[HALF])
    if cached:
        assert torch.equal(x["latent_cache"][:, :, :5], kept[:, :, :5])
        x["cache_position"].fill_(8)  # two of three tokens have no slot
        found = prepared(
            "attention.portable.latent", "latent_norm_rope", calls.LatentNormRope, *fields
        )
        assert found[0][:, :, 1:].isnan().all() and not found[0][:, :, :1].isnan().any()


def test_lengths_that_are_new():
    """A cache that grows finds what calls of other lengths have prepared, and the reference where
    its latents do not begin at a multiple of 16 bytes."""
    operation = submodule("attention.ops").LATENT_ATTENTION

    def launch(*tensors):
        return "kernel"

    launch.resized = lambda *tensors: lambda *tensors: "kernel of this length"
    run = operation._if_aligned(launch, lambda *tensors: "reference")
    x = problem(SIZES[0])
    tensors = [x.get(name) for name in calls.LatentAttention._fields[:-1]]
    assert run(*tensors) == "kernel"
    assert run.resized(*tensors)(*tensors) == "kernel of this length"
    odd = torch.empty(x["latents"].numel() + 1)[1:].view_as(x["latents"])
    assert run.resized(*tensors)(tensors[0], odd, *tensors[2:]) == "reference"


@pytest.mark.gpu
@compiled
@torch.no_grad()
def test_captured_in_a_graph():
    """What a graph holds follows the position and the length that lie on the device."""
    B, T, H, N, R, C, V = GPU_SIZES[0]
    q, kv = normal(B, T, H, N + R, device="cuda", dtype=HALF), normal(B, T, C + R, device="cuda")
    q0, kv, weight = q.clone(), kv.to(HALF), normal(C, device="cuda", dtype=HALF)
    expand = (normal(H * (N + V), C, device="cuda") * C**-0.5).to(HALF)
    caches = [torch.zeros(B, 1, 300, D, device="cuda", dtype=HALF) for D in (C, R)]
    position, length = (torch.tensor(n, device="cuda") for n in (0, 1))

    def step():
        q.copy_(q0)
        kernel.fused_latent_norm_rope(
            q, kv, weight, latent_cache=caches[0], rotated_cache=caches[1], cache_position=position
        )
        return kernel.latent_attention_with_kvcache(q, *caches, expand, length, qk_nope_head_dim=N)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph, y = captured(step)
    for n in range(280):
        position.fill_(n)
        length.fill_(n + 1)
        kv.normal_()
        graph.replay()
    torch.cuda.synchronize()
    assert not caches[0][:, :, 280:].any() and caches[0][:, :, :280].any(-1).all()
    given = [x.double() for x in (q, *caches, expand)]
    right = kernel.latent_attention_with_kvcache(*given, length, qk_nope_head_dim=N)
    assert relative_error(y, right) < ERROR[HALF]
