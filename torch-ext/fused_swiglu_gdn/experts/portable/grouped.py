"""Top-k routing among the experts of a few groups: one program, of one warp, for one token.

Expert e = g SIZE + j of group g is at place g SIZE_PADDED + j of the program's vectors.
"""

import triton
import triton.language as tl

from ...runtime.primitives import after_predecessor
from .ranks import _LEAST_KEY, _ranked, _store_best


@triton.jit
def _group_scores(choice, keys, BY_TWO: tl.constexpr):
    """[GROUPS_PADDED]: the sum of the two largest of each row, or the largest."""
    first = keys == tl.max(keys, 1)[:, None]
    best = tl.sum(tl.where(first, choice, 0.0), 1)
    if BY_TWO:
        rest = tl.where(first, _LEAST_KEY, keys)
        best += tl.sum(tl.where(rest == tl.max(rest, 1)[:, None], choice, 0.0), 1)
    return best


@triton.jit
def _grouped_topk_kernel(
    logits_ptr,  # [T, GROUPS SIZE]
    bias_ptr,  # [GROUPS SIZE], or None
    weights_ptr,  # [T, K]
    ids_ptr,  # [T, K] int64
    scale,
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # K, rounded up to a power of two
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, EPS: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,  # groups of a token
    BY_TWO: tl.constexpr, GROUPS_PADDED: tl.constexpr, SIZE_PADDED: tl.constexpr,
    PDL: tl.constexpr,  # the next launch may begin before this one has ended
):  # fmt: skip
    after_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)
    e = place // SIZE_PADDED * SIZE + place % SIZE_PADDED
    there = (place % SIZE_PADDED < SIZE) & (place // SIZE_PADDED < GROUPS)
    row = logits_ptr + token * (GROUPS * SIZE)
    logits = tl.load(row + e, mask=there, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice, of_groups = logits, scores
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + e, mask=there, other=0.0).to(tl.float32)
        of_groups = choice
    keys = tl.where(there, _ranked(choice, place, GROUPS_PADDED * SIZE_PADDED), _LEAST_KEY)

    ranks = tl.where(there, _ranked(of_groups, place, GROUPS_PADDED * SIZE_PADDED), _LEAST_KEY)
    ranks = tl.reshape(ranks, (GROUPS_PADDED, SIZE_PADDED))
    best = _group_scores(tl.reshape(of_groups, (GROUPS_PADDED, SIZE_PADDED)), ranks, BY_TWO)
    g = tl.arange(0, GROUPS_PADDED)
    groups = tl.where(g < GROUPS, _ranked(best, g, GROUPS_PADDED), _LEAST_KEY)
    inside = tl.zeros((GROUPS_PADDED,), tl.int32)
    for _ in tl.static_range(CHOSEN):
        first = groups == tl.max(groups, 0)
        inside = tl.where(first, 1, inside)
        groups = tl.where(first, _LEAST_KEY, groups)
    inside = tl.broadcast_to(inside[:, None], (GROUPS_PADDED, SIZE_PADDED))
    inside = tl.reshape(inside, (GROUPS_PADDED * SIZE_PADDED,))
    keys = tl.where(inside != 0, keys, _LEAST_KEY)

    out = (weights_ptr, ids_ptr)
    _store_best(out, token, keys, e, scores, scale, K, SLOTS, RENORMALIZE, EPS, None)
