"""Scores of experts as sort keys, and the choice by them."""

import triton
import triton.language as tl

_LEAST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below the key of every score


@triton.jit
def _ranked(choice, e, EXPERTS: tl.constexpr):
    """Sort keys, int64, the largest for the first choice.

    They order by value with NaN above all; among equal values the lower index comes first; indices
    past the last expert come last.
    """
    choice = tl.where(choice == 0.0, 0.0, choice)  # -0 is no less than 0
    bits = choice.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(choice != choice, 0x7FFFFFFF, bits)
    return bits.to(tl.int64) * 4294967296 + (EXPERTS - 1 - e)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """x in fp32, rounded to DTYPE if that is not None."""
    if DTYPE is not None:
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _store_best(
    out,  # pointers to weights [T, K] and ids [T, K]
    token,
    keys,  # [EXPERTS], as scores and the experts' numbers e
    e, scores, scale,
    K: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr, EPS: tl.constexpr,
    ROUNDED: tl.constexpr,  # the dtype to which each step is rounded, or None
):  # fmt: skip
    """Stores the K experts of a token with the largest keys, the largest first."""
    weights_ptr, ids_ptr = out
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    weights = tl.zeros((SLOTS,), tl.float32)
    for k in tl.static_range(K):
        first = keys == tl.max(keys, 0)  # [EXPERTS], of one
        ids = tl.where(slot == k, tl.sum(tl.where(first, e, 0), 0), ids)
        weights = tl.where(slot == k, tl.sum(tl.where(first, scores, 0.0), 0), weights)
        keys = tl.where(first, _LEAST_KEY, keys)
    if RENORMALIZE:
        total = _rounded(_rounded(tl.sum(weights, 0), ROUNDED) + EPS, ROUNDED)
        weights = _rounded(weights / total, ROUNDED)
    weights = _rounded(weights * scale, ROUNDED).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + token * K + slot, weights, mask=slot < K)
    tl.store(ids_ptr + token * K + slot, ids.to(tl.int64), mask=slot < K)
