"""Attention of a token over a cache that grows: one plan for all lengths."""

import functools
import itertools

import pytest
import torch
from conftest import assert_close, prepared, submodule
from interpreter import INTERPRETING, compiled, interpreted, test_in_the_interpreter  # noqa: F401
from test_attention import wide

calls, reference = submodule("attention.call"), submodule("attention.reference")
MODULE, NAME = "attention.portable.attention", "kvcache_attention"
HALF = torch.float16 if INTERPRETING else torch.bfloat16
MOST = 300  # slots
MASKS = {
    "none": None,
    "bool": lambda m, S: m[..., :S].contiguous(),  # as transformers makes it
    "of one row": lambda m, S: m[:1, ..., :S].contiguous(),
    "of one row, expanded": lambda m, S: m[:1, ..., :S].contiguous().expand_as(m[..., :S]),
    "a part of a longer one": lambda m, S: m[..., :S],
    "each other slot": lambda m, S: m[..., : 2 * S : 2],
    "added": lambda m, S: torch.where(m[..., :S], 0.5, -torch.inf),
    "added, in half precision": lambda m, S: torch.where(m[..., :S], 0.5, -torch.inf).to(HALF),
}


def problem(B, HQ, HK, D, device="cpu"):
    """q, keys and values of the longest cache, and a mask of it."""
    g = torch.Generator(device).manual_seed(B)
    normal = functools.partial(torch.randn, generator=g, device=device)
    q = normal(B, 1, HQ, D).to(HALF)
    k, v = (normal(B, HK, MOST, D).to(HALF) for _ in "kv")
    return q, k, v, normal(B, 1, 1, 2 * MOST) > -1


def grown(S, q, k, v, mask, layout, form="bool"):
    """A call at a length, as a cache by torch.cat has it, or by a view of what has room."""
    k, v = (x[:, :, :S] for x in (k, v))
    if layout == "cat":
        k, v = k.contiguous(), v.contiguous()
    elif layout == "tokens first":  # [B, S, HK, D] in memory
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    change = MASKS[form]
    return q, k, v, None, None if change is None else change(mask, S)


# around borders of blocks, at which the number of parts changes, too
LENGTHS = [1, 2, 64, 65, 129, 160]
LENGTHS += [] if INTERPRETING else [3, 16, 63, 127, 128]
HEADS = (2 if INTERPRETING else 4, 6, 2, 24)  # B, HQ, HK, D
CASES = [
    *itertools.product([HEADS], ["cat"], MASKS),
    *itertools.product([HEADS], ["room", "tokens first"], ["none", "bool"]),
    *itertools.product([(1, 4, 2, 16)] * INTERPRETING, ["cat"], ["none", "of one row"]),
]


class Lengths:
    device = "cpu"

    @pytest.mark.parametrize("heads, layout, form", CASES)
    def test_one_plan(self, heads, layout, form, monkeypatch):
        """The values of fp64, and the bits of a plan that was made for this length."""
        B, _, _, D = heads
        where = submodule("runtime.device")
        monkeypatch.setattr(where, "multiprocessor_count", lambda _: 8 * B)
        tensors, scale = problem(*heads, self.device), D**-0.5
        first = grown(40, *tensors, layout, form)
        prepare = getattr(submodule(MODULE), f"prepare_{NAME}")
        run = prepare(calls.KvCacheAttention.of((*first, scale)))
        for S in LENGTHS:
            call = grown(S, *tensors, layout, form)
            found = run.resized(*call)(*call)
            assert_close(found, reference.kvcache_attention(*map(wide, (*call, scale))))
            alone = prepared(MODULE, NAME, calls.KvCacheAttention, *call, scale)
            assert torch.equal(found, alone)


@interpreted
class TestInterpreted(Lengths):
    pass


@compiled
@pytest.mark.gpu
class TestCompiled(Lengths):
    device = "cuda"

    @pytest.mark.parametrize("form", ["none", "bool", "added"])
    def test_of_the_public_function(self, kernel, form):
        """All lengths one by one, and back again; each launch is the one that Triton binds."""
        tensors = problem(2, 8, 2, 64, "cuda")
        known = submodule("attention.ops").KVCACHE_ATTENTION
        known.cache_clear()
        every = [*range(2, MOST - 1), *range(MOST - 2, 2, -7)]
        with torch.no_grad(), submodule("runtime.launch").paranoid():
            for S in every:
                q, k, v, _, mask = grown(S, *tensors, "cat", form)
                found = kernel.attention_with_kvcache(q, k, v, attention_mask=mask)
                args = (q, k, v, None, mask, 64**-0.5)
                assert_close(found, reference.kvcache_attention(*map(wide, args)))
        assert len(known.sizes) == 1
