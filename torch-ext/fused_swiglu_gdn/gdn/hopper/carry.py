"""The states at the cuts of a long sequence, for heads that do not forget (docs/gdn_hopper.md).

The scan's transition launch stores in o, for every segment whose end state is needed, either that
state, if it knew the one before, or N and M of S -> M S + N (gdn/portable/cuts.py). This kernel
chains them.

Sizes: HV value heads, K = V = 128, slots of segments as in scheduler.py.
"""

import triton
import triton.language as tl

from ...runtime.primitives import sequence_bounds
from ..portable.cuts import FEWEST, chunk_at_cut, count_segments, word_at_cut

_FEWEST = tl.constexpr(FEWEST)


@triton.jit
def _word(x, k, HV):
    """Offset of N^T[x, k], or M^T[x - V, k], from the first of a segment's words."""
    return word_at_cut(x, k, HV * 64, 128, 128, 64, 32)


@triton.jit
def _keep_start(
    at, pool_ptr, index_ptr,
    pool_step,
    n, head, e, HV,
    V_FIRST: tl.constexpr,
):  # fmt: skip
    """Copies columns e of the state before sequence n to `at`.

    The sequence's last segment may overwrite that row of the pool.
    """
    D: tl.constexpr = 128
    d = tl.arange(0, D)[None, :]
    slot = tl.load(index_ptr + n).to(tl.int64)
    if slot >= 0:
        pool_ptr += slot * pool_step + head * (D * D)
        own = e[:, None] * D + d if V_FIRST else d * D + e[:, None]
        tl.store(at + _word(e[:, None], d, HV), tl.load(pool_ptr + own).to(tl.float32))


@triton.jit
def _long_sequence(cu_ptr, k, N, SPAN: tl.constexpr):
    """scheduler.py's function of this name."""
    n, before = k * 0, k * 0
    i = tl.arange(0, 128)
    for j in range(0, N, 128):
        ok = j + i < N
        start = tl.load(cu_ptr + j + i, mask=ok, other=0)
        stop = tl.load(cu_ptr + j + i + 1, mask=ok, other=0)
        is_long = (stop - start >= _FEWEST * SPAN).to(tl.int32)
        n += tl.sum(((before + tl.cumsum(is_long, 0) <= k) & ok).to(tl.int32), 0)
        before += tl.sum(is_long, 0)
    return n


@triton.jit(do_not_specialize=["T", "HV", "N", "split", "slots", "pool_step"])
def gdn_carry_kernel(
    pool_ptr,  # [pool, HV, K, V] fp32 or 16 bits with rows pool_step apart, or None
    index_ptr,  # [N] int32 | int64: rows of the pool, or None
    cu_ptr,  # [N + 1] int32 | int64 or None
    warm_ptr,  # [slots, HV] fp32; negative: the state before that segment is to be found
    o_ptr,  # [B, T, HV, V] 16 bits: N and M of a segment behind it; N becomes the state
    T, HV, N,
    split,  # the most segments of a sequence
    slots, pool_step,
    V_FIRST: tl.constexpr,  # the pool's states are [V, K]
    SPAN: tl.constexpr,  # tokens of the shortest segment
    SLOT: tl.constexpr,  # tokens that have a slot
    MOST: tl.constexpr,  # no less than split
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of M at a time: little shared memory, so that the scan fits beside it
    PREC: tl.constexpr,
):  # fmt: skip
    """S <- M S + N from cut to cut, for BLOCK_V columns of one head of one sequence."""
    D: tl.constexpr = 128
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    n = tl.program_id(1)  # of the long ones, if packed
    if cu_ptr is not None:
        n = _long_sequence(cu_ptr, n, N, SPAN)
        if n >= N:
            return
    head = tl.program_id(0) // (D // BLOCK_V)
    slot = n * split
    start = n * T
    tokens = T
    if cu_ptr is not None:
        start, stop = sequence_bounds(cu_ptr, n, T)
        start = start.to(tl.int32)
        tokens = stop.to(tl.int32) - start
        if slots != N * split:
            slot = start // SLOT + n
    # as in scheduler.py
    total = (tokens + 63) // 64
    segments = count_segments(tokens, split, SPAN)
    e = (tl.program_id(0) % (D // BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, D)
    first = o_ptr.to(tl.pointer_type(tl.float32)) + (start.to(tl.int64) * HV + head) * 64
    if pool_ptr is not None:
        if segments > 1:
            _keep_start(first, pool_ptr, index_ptr, pool_step, n, head, e, HV, V_FIRST)
    each = tl.arange(1, MOST + 1)
    warm_ptr += slot * HV + head
    warm = tl.load(warm_ptr + each * HV, mask=each < segments, other=0.0)
    if tl.min(warm, 0) < 0.0:
        before = first
        known = True  # the state before segment j
        for j in range(1, segments):
            needed = tl.load(warm_ptr + j * HV) < 0.0
            at = first + chunk_at_cut(j, total, segments).to(tl.int64) * HV * (64 * 64)
            if needed & (known == 0):
                s = tl.load(before + _word(e[:, None], d[None, :], HV))  # [V, K]
                for k0 in tl.static_range(0, D, BLOCK_K):
                    c = k0 + tl.arange(0, BLOCK_K)[None, :]
                    m = tl.load(at + _word(D + d[:, None], c, HV))  # M^T [K, BLOCK_K]
                    own = at + _word(e[:, None], c, HV)  # [V, BLOCK_K]
                    tl.store(own, tl.dot(s, m, tl.load(own), input_precision=PREC))
                tl.debug_barrier()  # the next step reads what other threads wrote
            known = needed == 0
            before = at
