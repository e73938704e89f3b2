"""Attention of one token a row over the filled slots of a static cache.

A program takes up to BLOCK_G of the query heads that share a key head, and one of SPLITS parts of
the filled slots (parts.py): keys and values are read once, with online softmax (arXiv:1805.02867).
A second launch combines the parts, unless there is only one.

Sizes: B rows, HQ and HK heads, G = HQ / HK, S slots, D head dim.
"""

import functools
from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...fp8.call import BLOCK, MOST, Quantised, padded
from ...fp8.portable.quantise import making, quantiser
from ...runtime import device, tuning
from ...runtime.cache import keep
from ...runtime.copies import contiguous_like, on_copies
from ...runtime.dtypes import HALF
from ...runtime.launch import Launch, kind_of
from ...runtime.ops import dense
from ...runtime.sizes import next_power_of_2
from ..call import KvCacheAttention
from .parts import combine_kernel, combine_quantise_kernel, parts_of

MAX_HEAD, MAX_SPLITS = 256, 64  # channels; parts of a cache
WAVES = 2  # programs for each multiprocessor, at most
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["B", "S"])
def _kvcache_attention_kernel(
    q_ptr,  # [B, 1, HQ, D]
    k_ptr,  # [B, HK, S, D]
    v_ptr,  # [B, HK, S, D]
    len_ptr,  # [B], [] or None: all slots are filled
    mask_ptr,  # [B or 1, 1, 1, S] or None
    y_ptr,  # [B, HQ, D], or fp32 [B, HQ, SPLITS, D] and [2, B, HQ, SPLITS] where they are many
    q_strides,  # of B, heads
    k_strides,  # of B, heads, S
    v_strides,
    mask_strides,  # of B, S
    len_step,
    B, S, scale,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_G heads over one part of the slots.

    For the product with V, P is split into a high and a low half-precision part, so that only the
    result is rounded.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    G: tl.constexpr = HQ // HK
    TILES: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    pid = tl.program_id(0)
    split = pid % SPLITS
    pid = pid // SPLITS
    member = (pid % TILES) * BLOCK_G + tl.arange(0, BLOCK_G)
    hk = (pid // TILES) % HK
    b = (pid // (TILES * HK)).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    inside = (member < G)[:, None] & (offs_d < D)[None, :]
    length, size = parts_of(len_ptr, b, len_step, S, SPLITS, BLOCK_N, 0)
    start = split * size
    stop = tl.minimum(start + size, length)
    heads = hk * G + member
    q_ptrs = q_ptr + b * q_strides[0] + heads[:, None] * q_strides[1] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=inside, other=0.0)  # [BLOCK_G, BLOCK_D]
    k_row = k_ptr + b * k_strides[0] + hk.to(tl.int64) * k_strides[1]
    v_row = v_ptr + b * v_strides[0] + hk.to(tl.int64) * v_strides[1]
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for n in range(start, stop, BLOCK_N):
        seen = n + offs_n < stop
        slots = (n + offs_n).to(tl.int64)
        bias = tl.zeros((BLOCK_N,), tl.float32)
        if mask_ptr is not None:
            m = tl.load(mask_ptr + b * mask_strides[0] + slots * mask_strides[1], seen, other=0)
            if mask_ptr.dtype.element_ty == tl.int1:
                seen &= m != 0
            else:
                bias = m.to(tl.float32)
                seen &= bias != float("-inf")
        # slots that are not attended cost nothing, whatever they hold
        k = tl.load(
            k_row + slots[None, :] * k_strides[2] + offs_d[:, None],
            mask=seen[None, :] & (offs_d < D)[:, None], other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_row + slots[:, None] * v_strides[2] + offs_d[None, :],
            mask=seen[:, None] & (offs_d < D)[None, :], other=0.0,
        )  # fmt: skip
        s = tl.dot(q, k) * scale + bias[None, :]  # [BLOCK_G, BLOCK_N]
        s = tl.where(seen[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2((s - base[:, None]) * LOG2E)
        shrink = tl.exp2((top - base) * LOG2E)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        high = p.to(v.dtype)
        low = (p - high.to(tl.float32)).to(v.dtype)
        acc = tl.dot(high, v, acc)
        acc = tl.dot(low, v, acc)
        top = new
    row = b * HQ + heads
    if SPLITS == 1:
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        y_ptrs = y_ptr + row[:, None] * D + offs_d[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside)
    elif start < length:
        rows = B.to(tl.int64) * (HQ * SPLITS)
        row = row * SPLITS + split
        tl.store(y_ptr + row[:, None] * D + offs_d[None, :], acc, mask=inside)
        tl.store(y_ptr + rows * D + row, top * LOG2E, mask=member < G)
        tl.store(y_ptr + rows * (D + 1) + row, total, mask=member < G)


def count_parts(where: torch.device, programs: int, blocks: int) -> int:
    """Number of parts that fill the device with `programs` programs a part, at most one a block.

    It is a power of two, so that caches of other lengths find their kernels compiled.
    """
    most = WAVES * device.multiprocessor_count(where.index) // max(programs, 1)
    return max(1, min(most, next_power_of_2(blocks), MAX_SPLITS))


def prepare_kvcache_attention_quantise(call: KvCacheAttention) -> Optional[Callable]:
    """prepare_kvcache_attention, whose y [B, HQ * D] is in FP8, Quantised: two launches, of which
    the second quantises. For heads as wide as a block of scales, and few rows."""
    q = call.q
    if q.dtype is not torch.bfloat16 or q.shape[3] != BLOCK or not 0 < q.shape[0] <= MOST:
        return None
    return prepare_kvcache_attention(call, True) if device.has_e4m3(q.device) else None


def prepare_kvcache_attention(call: KvCacheAttention, quantises=False) -> Optional[Callable]:
    """(q, k_cache, v_cache, cache_seqlens, mask) -> y [B, 1, HQ, D]: one launch if one part fills
    the device, else two.

    For fp16 and bf16, head dims up to 256 and caches with a contiguous last dimension.
    """
    q, k_cache, v_cache, cache_seqlens, mask, _ = call
    B, _, HQ, D = q.shape
    if q.dtype not in HALF or HQ == 0 or not 0 < D <= MAX_HEAD:
        return None
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        return None
    if mask is not None and mask.dtype == torch.float64:
        return None
    if dense(q) is not q:
        prepare = functools.partial(prepare_kvcache_attention, quantises=quantises)
        return on_copies(prepare, call, lambda q, *more: (dense(q), *more))
    make, launches = contiguous_like(q), _Launches(call, quantises)
    if quantises:
        quantise = quantiser(q.view(B, HQ * D))
        make_codes, scales_of = making(q.device, B, HQ * D)

    def resized(q, k_cache, v_cache, cache_seqlens, mask):
        split, combine, size = launches.at(k_cache, v_cache, mask)

        def run(q, k_cache, v_cache, cache_seqlens, mask):
            if combine is None:
                y = make(q)  # [B, 1, HQ, D]
                split(q, k_cache, v_cache, cache_seqlens, mask, y)
                return quantise(y.view(B, HQ * D)) if quantises else y
            parts = q.new_empty(size, dtype=torch.float32)
            split(q, k_cache, v_cache, cache_seqlens, mask, parts)
            if quantises:
                codes = make_codes()
                combine(parts, cache_seqlens, codes, scales_of(codes))
                return Quantised(codes, None)
            y = make(q)
            combine(parts, cache_seqlens, y)
            return y

        run.resized = resized
        return run

    return resized(*call.tensors)


class _Launches:
    """The launches of calls that differ in S and in strides of rows and heads."""

    def __init__(self, call: KvCacheAttention, quantises: bool):
        q, k_cache, _, cache_seqlens, _, (scale,) = call
        (B, _, HQ, D), HK = q.shape, k_cache.shape[1]
        config = tuning.lookup("portable_kvcache_attention", q.device, D=D)
        BLOCK_G, self.block = 16 if HQ // HK <= 16 else 32, config["BLOCK_N"]
        self.programs = B * HK * -(-HQ // (HK * BLOCK_G))
        self.device, self.q_steps, self.scale = q.device, (q.stride(0), q.stride(2)), scale
        self.rows, self.heads, self.B = B * HQ, (HQ, HK, D, BLOCK_G), B
        many = cache_seqlens is not None and cache_seqlens.ndim > 0
        self.step = cache_seqlens.stride(0) if many else 0
        self.warps, self.stages = config["num_warps"], config["num_stages"]
        self.padded = (padded(B),) if quantises else ()
        self.made: dict = {}  # by the number of parts and the kinds of what varies

    def at(self, k_cache, v_cache, mask: Optional[torch.Tensor]) -> tuple:
        """(launch over the parts, launch that combines them or None, elements of the parts)."""
        S, mask_steps = k_cache.shape[2], (0, 0)
        if mask is not None:
            mask_steps = (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(3))
        varies = (*k_cache.stride()[:3], *v_cache.stride()[:3], *mask_steps)
        splits = count_parts(self.device, self.programs, -(-S // self.block))
        numbers = (
            self.q_steps, varies[:3], varies[3:6], varies[6:], self.step, self.B, S, self.scale
        )  # fmt: skip
        key = (splits, kind_of(S), *map(kind_of, varies))
        known = self.made.get(key)
        if known is None:
            found = self._make(splits, numbers)
        else:
            split, combine, size = known
            combine = combine and combine.at((self.step, self.B, S, splits, *self.padded))
            found = (split.at(numbers), combine, size)
        return keep(self.made, key, found)

    def _make(self, splits: int, numbers: tuple) -> tuple:
        HQ, HK, D, BLOCK_G = self.heads
        pdl = device.overlaps_launches(self.device) and splits > 1
        block = next_power_of_2(D)
        split = Launch(
            _kvcache_attention_kernel, self.programs * splits, self.device, numbers=numbers,
            guarded=True, HQ=HQ, HK=HK, D=D, SPLITS=splits, BLOCK_G=BLOCK_G, BLOCK_N=self.block,
            BLOCK_D=block, PDL=pdl, num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip
        if splits == 1:
            return split, None, 0
        width = {} if self.padded else {"D": D, "BLOCK_D": block}
        kernel = combine_quantise_kernel if self.padded else combine_kernel
        combine = Launch(
            kernel, self.rows, self.device,
            numbers=(self.step, self.B, numbers[6], splits, *self.padded), guarded=True, early=pdl,
            ROWS=HQ, NEW=0, PARTS=next_power_of_2(splits), BLOCK_N=self.block, PDL=pdl,
            num_warps=8 if D > 128 else 4, **width,
        )  # fmt: skip
        return split, combine, self.rows * splits * (D + 2)
