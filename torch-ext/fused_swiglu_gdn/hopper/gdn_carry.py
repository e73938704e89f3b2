"""The states at the cuts of a long sequence, for heads that do not forget (docs/gdn_hopper.md).

The scan's transition launch leaves of every segment whose end asks for it either the state itself,
where it knew the state before, or N and M of S -> M S + N. This kernel puts them together.

Sizes: HV value heads, K = V = 128, slots of segments as in gdn_place.py.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "HV", "N", "split", "slots"])
def gdn_carry_kernel(
    cu_ptr,  # [N + 1] int32 | int64 or None
    warm_ptr,  # [slots, HV] fp32; negative: the state before that segment is to be found
    carry_ptr,  # [slots, HV, V + K, K] fp32: N^T and M^T; N becomes the state after the segment
    T,
    HV,
    N,
    split,  # the most segments of a sequence
    slots,
    SPAN: tl.constexpr,  # tokens of the shortest segment
    MOST: tl.constexpr,  # no less than split
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of M at a time: little shared memory, so that the scan fits beside it
    PREC: tl.constexpr,
):
    """S <- M S + N from cut to cut, for BLOCK_V columns of one head of one sequence."""
    D: tl.constexpr = 128
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    n = tl.program_id(1)
    head = tl.program_id(0) // (D // BLOCK_V)
    slot = n * split
    tokens = T
    if cu_ptr is not None:
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), T).to(tl.int32)
        tokens = tl.minimum(tl.load(cu_ptr + n + 1), T).to(tl.int32) - start
        if slots != N * split:
            slot = start // SPAN + n
    # as in gdn_place.py
    total = (tokens + 63) // 64
    segments = tl.maximum(tl.minimum(split, tokens // SPAN), 1)
    length = (total + segments - 1) // segments
    cuts = (total - 1) // tl.maximum(length, 1)  # cut j is at the end of segment j
    each = tl.arange(0, MOST)
    warm_ptr += (slot + 1) * HV + head
    warm = tl.load(warm_ptr + each * HV, mask=each < cuts, other=0.0)
    if tl.min(warm, 0) < 0.0:
        e = (tl.program_id(0) % (D // BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)
        d = tl.arange(0, D)
        known = True  # the state before segment j
        for j in range(cuts):
            asked = tl.load(warm_ptr + j * HV) < 0.0
            if asked & (known == 0):
                at = carry_ptr + ((slot + j) * HV + head).to(tl.int64) * (2 * D * D)
                before = at - HV * (2 * D * D)
                s = tl.load(before + e[:, None] * D + d[None, :])  # [V, K]
                for k0 in tl.static_range(0, D, BLOCK_K):
                    c = k0 + tl.arange(0, BLOCK_K)
                    m = tl.load(at + D * D + d[:, None] * D + c[None, :])  # M^T [K, BLOCK_K]
                    own = at + e[:, None] * D + c[None, :]  # [V, BLOCK_K]
                    tl.store(own, tl.dot(s, m, tl.load(own), input_precision=PREC))
                tl.debug_barrier()  # the next step reads what other threads wrote
            known = asked == 0
