"""Adds tokens of a ring to a state: in fp32 arithmetic, or by products of 16-bit parts.

Sizes: K and V head dims, R rows of tokens in a ring, m of them in use.
"""

import triton
import triton.language as tl

from .delta import load, store

STRIP = tl.constexpr(32)  # of a state at a time in products


@triton.jit
def ring_row(first, j, R: tl.constexpr):
    """The row of the j-th token of a ring; `first` is its first row, None for row 0."""
    if first is not None:
        j += first
        j = tl.where(j >= R, j - R, j)
    return j


@triton.jit
def fold(
    state_ptrs, ring_k, ring_u, ring_g, first, m, past, mask, offs_k, offs_v, mask_k, mask_v,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of the state with m tokens of the ring added, in fp32 throughout.

    past: the sum of the gates after them.
    """
    j = tl.arange(0, BLOCK_R)
    gates = load(ring_g + ring_row(first, j, R), j < m)
    S = tl.exp(past + tl.sum(gates, 0)) * load(state_ptrs, mask)
    for i in range(0, m):  # the latest first: decays are sums of later gates
        at = ring_row(first, m - 1 - i, R)
        u = load(ring_u + at * V + offs_v, mask_v) * tl.exp(past)
        S += u[:, None, None] * load(ring_k + at * K + offs_k, mask_k)[None, :, :]
        past += tl.load(ring_g + at)
    return S


@triton.jit
def write_by_products(
    state, ring_k, ring_u, ring_g, k_row, u, g, m, offs_v, mask_v, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Writes rows offs_v of a head's state with the ring's tokens and one more (k_row, u, g) added.

    The ring has m < BLOCK_R tokens from its row 0 on, and keys are bf16. A weighted u is the sum of
    three bf16 numbers, exact except for its last bit, so that tensor cores compute exact products
    and add them in fp32.
    """
    j = tl.arange(0, BLOCK_R)
    later = load(ring_g + j + 1, j + 1 < m)
    oldest = tl.load(ring_g, mask=m > 0, other=0.0)
    w = tl.exp(g + tl.cumsum(later, 0, reverse=True))
    decay = tl.exp(g + (oldest + tl.sum(later, 0)))
    there = (j < m)[None, :] if mask_v is None else (j < m)[None, :] & mask_v[:, None]
    held = load(ring_u + j[None, :] * V + offs_v[:, None], there) * w[None, :]
    held = tl.where((j == m)[None, :], u[:, None], tl.where((j < m)[None, :], held, 0.0))
    high = held.to(tl.bfloat16)
    rest = held - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    for c in tl.range(0, BLOCK_K // STRIP, num_stages=1):  # in few registers
        offs_c = c * STRIP + tl.arange(0, STRIP)
        mask_c = None if BLOCK_K == K else offs_c < K
        mask_rk = (j < m)[:, None] if mask_c is None else (j < m)[:, None] & mask_c[None, :]
        keys = tl.load(ring_k + j[:, None] * K + offs_c[None, :], mask=mask_rk, other=0.0)
        key = load(k_row + offs_c, mask_c).to(keys.dtype)
        keys = tl.where((j == m)[:, None], key[None, :], keys)
        mask = None
        if BLOCK_K != K or mask_v is not None:
            mask = (offs_c < K)[None, :] & (offs_v < V)[:, None]
        ptrs = state + offs_v[:, None] * K + offs_c[None, :]
        S = tl.dot(low, keys, decay * load(ptrs, mask))
        S = tl.dot(high, keys, tl.dot(middle, keys, S))
        store(ptrs, S, mask, None, EVICT)
