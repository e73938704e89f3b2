"""The choice of a token: the largest scores of each part of a row, of these the largest, and the
draw among them.

A score and its place are one key of 64 bits: larger for a larger score. Among equal ones it is
larger for the lower place, as in argmax, and in a list for the higher place, as in an ascending
sort, of which top-p drops the first. Sizes: B sequences, V words, parts of PART words, of which TOP
keys are kept.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import Choose

PART = 1024  # keys that a program sorts, twice as many as it keeps at least
WARPS = 4
MOST = 256  # of top_k: a longer list takes longer than torch's sort
SPARE = 14  # keys of a list above top_k, for scores equal to the last one


@triton.jit
def _score(
    logits_ptr, seen_ptr, ends_ptr, length_ptr, row, place, V, stride, temperature, penalty, least,
    ENDS: tl.constexpr,
):  # fmt: skip
    """Scores fp32 of words of a row; -inf past the vocabulary."""
    inside = place < V
    x = tl.load(logits_ptr + row * stride + place, inside, other=float("-inf")).to(tl.float32)
    if seen_ptr is not None:
        met = tl.load(seen_ptr + row * (V + 1) + place, inside, other=0) != 0
        x = tl.where(met, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)), x)
    if ends_ptr is not None:
        early = tl.load(length_ptr) < least
        for i in tl.static_range(ENDS):
            x = tl.where(early & (place == tl.load(ends_ptr + i)), float("-inf"), x)
    return tl.div_rn(x, temperature)


@triton.jit
def _key(x, place, HIGHER: tl.constexpr):
    """Keys of scores, NaN above all. HIGHER: the higher place counts for more."""
    x = tl.where(x == 0.0, 0.0, x)  # -0 is no less than 0
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return bits.to(tl.int64) * 4294967296 + (place if HIGHER else 0x7FFFFFFF - place)


@triton.jit
def _score_in(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _place_in(key, HIGHER: tl.constexpr):
    place = (key & 0xFFFFFFFF).to(tl.int32)
    return place if HIGHER else 0x7FFFFFFF - place


@triton.jit(do_not_specialize=["V", "least"])
def _candidates_kernel(
    logits_ptr,  # [B, V]
    seen_ptr,  # [B, V + 1], or None
    ends_ptr,  # [ENDS], or None
    length_ptr,  # []
    found_ptr,  # [B, parts, TOP] int64
    V,
    stride,
    temperature, penalty, least,
    ENDS: tl.constexpr, TOP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The TOP largest keys of a part, in descending order."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = part * PART + tl.arange(0, PART)
    x = _score(
        logits_ptr, seen_ptr, ends_ptr, length_ptr, row, place, V, stride, temperature, penalty,
        least, ENDS,
    )  # fmt: skip
    key = tl.where(place < V, _key(x, place, TOP > 1), -0x7FFFFFFFFFFFFFFF)
    to = found_ptr + (row * tl.num_programs(0) + part) * TOP
    if TOP == 1:
        tl.store(to, tl.max(key, 0))
    else:
        tl.store(to + tl.arange(0, TOP), tl.topk(key, TOP))


@triton.jit(do_not_specialize=["N"])
def _merge_kernel(
    found_ptr,  # [B, N] int64
    fewer_ptr,  # [B, parts, TOP] int64
    N,
    TOP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The TOP largest of PART keys."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    key = tl.load(found_ptr + row * N + at, at < N, other=-0x7FFFFFFFFFFFFFFF)
    to = fewer_ptr + (row * tl.num_programs(0) + part) * TOP
    tl.store(to + tl.arange(0, TOP), tl.topk(key, TOP))


@triton.jit(do_not_specialize=["N"])
def _best_kernel(
    found_ptr,  # [B, N] int64
    token_ptr,  # [B] int64
    right_ptr,  # [B] bool
    N,
    PART: tl.constexpr,
):
    """Index of the largest of N keys."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PART)
    best = tl.full((PART,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for first in range(0, N, PART):
        here = tl.load(found_ptr + row * N + first + at, first + at < N, other=-0x7FFFFFFFFFFFFFFF)
        best = tl.maximum(best, here)
    key = tl.max(best, 0)
    tl.store(token_ptr + row, _place_in(key, False).to(tl.int64))
    tl.store(right_ptr + row, tl.abs(_score_in(key)) < float("inf"))


@triton.jit(do_not_specialize=["N", "V", "least"])
def _draw_kernel(
    found_ptr,  # [B, N] int64
    q_ptr,  # [B, V]
    logits_ptr,  # [B, V]; this and the next ones for equal scores that no list holds
    seen_ptr, ends_ptr, length_ptr,
    token_ptr,  # [B] int64
    right_ptr,  # [B] bool
    N, V,
    stride,
    temperature, penalty, least,
    drop,  # 1 - top_p
    min_p,
    K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, ENDS: tl.constexpr,
    TOP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, slot = tl.arange(0, PART), tl.arange(0, TOP)
    key = tl.load(found_ptr + row * N + at, at < N, other=-0x7FFFFFFFFFFFFFFF)
    key = tl.topk(key, TOP)
    listed = key > -0x7FFFFFFFFFFFFFFF
    x, place = tl.where(listed, _score_in(key), float("-inf")), _place_in(key, True)
    best = tl.max(tl.where(slot == 0, x, float("-inf")), 0)
    kth = tl.max(tl.where(slot == K - 1, x, float("-inf")), 0)
    last = tl.max(tl.where(slot == TOP - 1, x, float("-inf")), 0)
    more = (last == kth) & (kth > float("-inf"))  # equal scores may be in no list
    ties = tl.program_id(0) * 0
    if more:
        for first in range(0, V, PART):
            score = _score(
                logits_ptr, seen_ptr, ends_ptr, length_ptr, row, first + at, V, stride,
                temperature, penalty, least, ENDS,
            )  # fmt: skip
            ties += tl.sum((score == kth).to(tl.int32), 0)
    kept = listed & (x > float("-inf")) & tl.where(more, x > kth, x >= kth)
    p = tl.where(kept, tl.exp(x - best), 0.0)
    each = tl.where(more, tl.exp(kth - best), 0.0)  # of the equal scores
    total = tl.sum(p, 0) + ties * each
    rest = ties  # of them, those with the highest places
    if TOP_P:  # what is at most 1 - top_p together with all that is smaller goes
        if more:
            rest = ties - tl.minimum(tl.floor(drop * total / each), ties * 1.0).to(tl.int32)
        share = p / total
        smaller = ties * each / total + tl.sum(share, 0) - (tl.cumsum(share, 0) - share)
        kept = kept & ((smaller > drop) | (slot == 0))
    if MIN_P:
        kept = kept & ((p >= min_p) | (slot == 0))
        rest = tl.where(each >= min_p, rest, 0)
    if more & (best == kth):
        rest = tl.maximum(rest, 1)
    race = tl.where(kept, p / tl.load(q_ptr + row * V + place, kept, other=1.0), -1.0)
    won = tl.max(race, 0)
    token = tl.min(tl.where((race == won) & kept, place, 0x7FFFFFFF), 0)
    if more:
        met = tl.program_id(0) * 0
        for first in range(0, V, PART):
            score = _score(
                logits_ptr, seen_ptr, ends_ptr, length_ptr, row, first + at, V, stride,
                temperature, penalty, least, ENDS,
            )  # fmt: skip
            equal = (score == kth).to(tl.int32)
            among = (equal != 0) & (met + tl.cumsum(equal, 0) > ties - rest)
            met += tl.sum(equal, 0)
            q = tl.load(q_ptr + row * V + first + at, among, other=1.0)
            races = tl.where(among, each / q, -1.0)
            highest = tl.max(races, 0)
            where = tl.min(tl.where(among & (races == highest), first + at, 0x7FFFFFFF), 0)
            token = tl.where(highest > won, where, token)
            won = tl.maximum(won, highest)
    tl.store(token_ptr + row, tl.minimum(token, V - 1).to(tl.int64))
    tl.store(right_ptr + row, tl.abs(best) < float("inf"))


def prepare_choose_fwd(call: Choose) -> Optional[Callable]:
    """(logits, q, seen, ends, length) -> (tokens [B] int64, right [B] bool)."""
    logits, _, _, ends, _, (top_k, top_p, min_p, temperature, penalty, least) = call
    (B, V), device = logits.shape, call.device
    if not (served(logits) and logits.stride(1) == 1 and 0 < V < 2**31 and B < 2**16):
        return None
    if top_k > MOST:
        return None
    top_k = min(top_k, V)
    top = next_power_of_2(top_k + SPARE) if top_k else 1
    of_scores = (V, logits.stride(0), temperature, penalty, least)
    number = 0 if ends is None else ends.numel()
    n = cdiv(V, PART)
    words = (("num_warps", WARPS),)
    first = Launch(
        _candidates_kernel, (n, B), device, numbers=of_scores,
        constexprs=(number, top, PART), options=words, guarded=True,
    )  # fmt: skip
    merges, n = [], n * top
    while top_k and n > PART:
        parts = cdiv(n, PART)
        merges.append(Launch(
            _merge_kernel, (parts, B), device, numbers=(n,), constexprs=(top, PART), options=words,
            guarded=True,
        ))  # fmt: skip
        n = parts * top
    if top_k:
        last = Launch(
            _draw_kernel, B, device, numbers=(n, *of_scores, 1 - top_p, min_p),
            constexprs=(top_k, top_p < 1.0, min_p > 0.0, number, top, PART), options=words,
            guarded=True,
        )  # fmt: skip
    else:
        last = Launch(
            _best_kernel, B, device, numbers=(n,), constexprs=(PART,), options=words, guarded=True
        )

    def run(logits, q, seen, ends, length):
        new = logits.new_empty
        found = new((B, first.grid[0] * top), dtype=torch.int64)
        first(logits, seen, ends, length, found)
        for merge in merges:
            fewer = new((B, merge.grid[0] * top), dtype=torch.int64)
            merge(found, fewer)
            found = fewer
        token, right = new(B, dtype=torch.int64), new(B, dtype=torch.bool)
        if top_k:
            last(found, q, logits, seen, ends, length, token, right)
        else:
            last(found, token, right)
        return token, right

    return run
