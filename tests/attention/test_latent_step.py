"""A step of latent attention over a static cache: what norm, rotary embedding, cache write and
attention give in turn, bit for bit, and in plain torch."""

import itertools

import pytest
import torch
from conftest import load_package, prepared, relative_error, submodule
from fp8_problems import quantised_weight
from interpreter import DEVICE, INTERPRETING, both_ways, test_in_the_interpreter  # noqa: F401
from test_latent import (
    ERROR,
    FP8_SIZES,
    GPU_SIZES,
    HALF,
    ROTARY,
    SIZES,
    folders,
    memory_of_nan,
    normal,
    wide,
)

kernel = load_package()
calls, operation = submodule("attention.call"), submodule("attention.ops").LATENT_STEP
TENSORS = calls.LatentStep._fields[:-1]


def problem(
    sizes, rotary, mask=None, S=150, filled=129, dtype=HALF, device="cpu", scales=None
) -> dict:
    """Arguments; NaN in the slots from `filled` on, which are written or not attended to."""
    (B, T, H, N, R, C, V), P = sizes, sizes[4] if rotary == "halves" else sizes[4] // 2
    x = {
        "q": 2 * normal(B, T, H, N + R, seed=1), "kv": normal(B, T, C + R + 8, seed=2)[..., 8:],
        "norm": normal(C, seed=3), "cos": normal(1, T, P, seed=4).cos(),
        "sin": normal(1, T, P, seed=4).sin(), "latents": normal(B, 1, S, C, seed=5),
        "rotated": normal(B, 1, S, R, seed=6), "weight": normal(H * (N + V), C, seed=7) * C**-0.5,
    }  # fmt: skip
    x = {name: tensor.to(device, dtype) for name, tensor in x.items()}
    if rotary is None:
        x["cos"] = x["sin"] = None
    x["latents"][:, :, filled:] = x["rotated"][:, :, filled:] = float("nan")
    x["length"] = torch.tensor(filled, device=device)
    x["mask"] = x["weight_scale"] = None
    if scales is not None:
        x["weight"], x["weight_scale"] = quantised_weight(x["weight"], scales == "e8m0")
    if mask is not None:
        seen = (normal(B, 1, T, S, seed=8) > -0.5).to(device)
        seen[..., filled + T :] = False
        seen[0, :, 0] = False  # a token that attends to nothing
        x["mask"] = (
            seen
            if mask == "bool"
            else torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
        )
    return x


def copied(x: dict) -> dict:
    return {name: None if tensor is None else tensor.clone() for name, tensor in x.items()}


def in_turn(x: dict, N: int, rotary, folder=None) -> torch.Tensor:
    """folder: that of the attention's kernels. The norm has portable ones alone, and plain torch
    would round a value near a tie the other way."""
    q, force = x["q"].clone(), submodule("runtime.dispatch").force
    tables = {} if rotary is None else {"cos": x["cos"], "sin": x["sin"], "rotary": rotary}
    with force(folder and "portable"):
        kernel.fused_latent_norm_rope(
            q, x["kv"], x["norm"], **tables, latent_cache=x["latents"], rotated_cache=x["rotated"],
            cache_position=x["length"],
        )  # fmt: skip
    x["length"].add_(q.shape[1])
    with force(folder):
        return kernel.latent_attention_with_kvcache(
            q, x["latents"], x["rotated"], x["weight"], x["length"], qk_nope_head_dim=N,
            attention_mask=x["mask"], weight_scale=x["weight_scale"],
        )  # fmt: skip


def options(sizes, rotary) -> tuple:
    _, _, _, N, R, _, _ = sizes
    return N, (N + R) ** -0.5, 1e-6, rotary or "halves"


@pytest.mark.parametrize("mask", ["bool", "float", None])
@pytest.mark.parametrize("rotary", ROTARY)
def test_reference(rotary, mask):
    sizes = SIZES[1]
    x = problem(sizes, rotary, mask, dtype=torch.float32)
    other, before = copied(x), x["q"].clone()
    found = operation(tuple(map(x.get, TENSORS)), options(sizes, rotary))
    assert torch.equal(found, in_turn(other, sizes[3], rotary))
    assert torch.equal(x["q"], before) and int(x["length"]) == 129 + sizes[1]
    for name in ("latents", "rotated"):
        assert torch.equal(x[name].nan_to_num(7), other[name].nan_to_num(7))


@both_ways
@pytest.mark.parametrize("filled", [0, 61, 129])
@pytest.mark.parametrize("mask", ["bool", None] if INTERPRETING else ["bool", "float", None])
@pytest.mark.parametrize(
    "sizes, rotary, scales",
    [
        *zip(SIZES[:3] if INTERPRETING else GPU_SIZES, itertools.cycle(ROTARY), [None] * 9),
        *zip(FP8_SIZES, itertools.cycle(ROTARY), itertools.cycle(["fp32", "e8m0"])),
    ],
    ids=str,
)
def test_kernels(sizes, rotary, scales, mask, filled, monkeypatch):
    """q is a part of a larger tensor; the second of two calls meets what the first has written."""
    x = problem(sizes, rotary, mask, filled=filled, device=DEVICE, scales=scales)
    monkeypatch.setattr(submodule("runtime.device"), "multiprocessor_count", lambda _: 7)
    T, N = sizes[1], sizes[3]
    right = in_turn(copied(wide(x)), N, rotary)
    joined = torch.cat([x["q"].flatten(2), x["kv"]], -1)
    x["q"] = joined[..., : x["q"][0, 0].numel()].unflatten(-1, x["q"].shape[2:])
    for folder in folders():
        fields = {**copied(x), "q": x["q"]}
        module, given = f"attention.{folder}.latent_step", (*options(sizes, rotary),)
        arguments = (*map(fields.get, TENSORS), *given)
        with memory_of_nan():
            found = prepared(module, "latent_step", calls.LatentStep, *arguments)
        if found is None:  # heads of several rows and tokens that have not one stride
            assert sizes[0] > 1 and T > 1
            continue
        assert relative_error(found, right) < ERROR[HALF]
        assert mask is None or not found[0, 0].any()
        assert int(fields["length"]) == filled + T
        written = fields["latents"][:, :, filled : filled + T]
        assert written.isfinite().all() and fields["latents"][:, :, filled + T :].isnan().all()
        if not INTERPRETING:
            other = copied(x)
            assert torch.equal(found, in_turn(other, N, rotary, folder))
            for name in ("latents", "rotated", "length"):
                assert torch.equal(fields[name].nan_to_num(7), other[name].nan_to_num(7))
    fields["length"].fill_(149)  # tokens after the first have no slot: nothing is written for them
    given = (*map(fields.get, TENSORS), *options(sizes, rotary))
    assert prepared(
        "attention.portable.latent_step", "latent_step", calls.LatentStep, *given
    ) is None or (fields["latents"][:, :, 149].isfinite().all())
