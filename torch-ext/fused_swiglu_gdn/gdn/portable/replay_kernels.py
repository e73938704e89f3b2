"""Kernels of replay.py.

Sizes: N sequences, T tokens of each, H and HV heads, K and V head dims, P rows of states and ring,
R rows of tokens in a ring, m of them in use from row `first` on, cyclically. A tile of a state is
[BLOCK_V, C, K_PART] with C = BLOCK_K / K_PART: most of a sum over K is then within a thread, and
little of it by shuffles, which are slow.
"""

import triton
import triton.language as tl

from .delta import add_pairs, key_norms, load, store
from .gates import log_decay, write_strength
from .replay_write import STRIP, fold, ring_row, write_by_products


@triton.jit
def _first(n, cursor_ptr, R: tl.constexpr):
    """The first row of a sequence's ring, clamped, for the host has not checked the cursor's
    values."""
    return tl.minimum(tl.maximum(tl.load(cursor_ptr + 2 * n), 0), R - 1)


@triton.jit
def _count(alive, n, cursor_ptr, MOST: tl.constexpr):
    """The number of tokens in a sequence's ring, clamped; 0 if the sequence has no row of the
    pool."""
    m = tl.minimum(tl.maximum(tl.load(cursor_ptr + 2 * n + 1), 0), MOST)
    return tl.where(alive, m, 0)


@triton.jit
def _place(
    n, cursor_ptr, force_ptr, rows_ptr, R: tl.constexpr, MAX_TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """(row of the pool, whether there is one, tokens in the ring, whether the state is written).

    A row below FIRST is a null slot.
    """
    row = n if rows_ptr is None else tl.load(rows_ptr + n).to(tl.int64)
    alive = row >= (0 if rows_ptr is None else FIRST)
    m = _count(alive, n, cursor_ptr, R - MAX_TOKENS)
    flush = m + 2 * MAX_TOKENS > R
    if force_ptr is not None:
        flush = flush | (tl.load(force_ptr + n) != 0)
    return row, alive, m, flush


@triton.jit
def replay_tile(
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, K_PART: tl.constexpr,
):  # fmt: skip
    """(sequence, head, columns [C, K_PART] and rows [BLOCK_V] of the state, offsets) of a program.

    The offsets are within the states of the sequence.
    """
    PARTS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    n = (pid // (PARTS * HV)).to(tl.int64)
    hv = (pid // PARTS) % HV
    offs_v = (pid % PARTS) * BLOCK_V + tl.arange(0, BLOCK_V)
    parts = tl.arange(0, BLOCK_K // K_PART) * K_PART
    offs_k = parts[:, None] + tl.arange(0, K_PART)[None, :]
    offs_s = hv * (K * V) + offs_v[:, None, None] * K + offs_k[None, :, :]
    return n, hv, offs_k, offs_v, offs_s


@triton.jit
def replay_products_kernel(
    q_ptr,  # [N, T, H, K]
    k_ptr,  # [N, T, H, K]
    g_ptr,  # [N, T, HV]
    beta_ptr,  # [N, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    ring_k_ptr,  # [P, H, R, K]
    ring_g_ptr,  # [P, HV, R] fp32
    cursor_ptr,  # [N, 2]
    force_ptr,  # [N] or None
    rows_ptr,  # [N] or None
    factors_ptr,  # [N, HV, T, 2, R + T + 2]
    strides,  # of a sequence, token and head in q, k, v; a sequence and token in g, beta; of rows
    scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    MAX_TOKENS: tl.constexpr, FIRST: tl.constexpr, L2NORM: tl.constexpr, BETA_MAX: tl.constexpr,
    PDL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A program takes one value head: the factors of its tokens for the ring's rows and their own.

        u_t = b v - (f S_0 k_t + sum_j f_j u_j)    o_t = F S_0 q_t + sum_j F_j u_j

    j: the tokens of the ring, then those of the call. Factors of a token are f_j, f, b; F_j, F, g.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    COLUMNS: tl.constexpr = R + T + 2
    pid = tl.program_id(0)
    n = (pid // HV).to(tl.int64)
    hv = pid % HV
    h = hv // (HV // H)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = None if BLOCK_K == K else offs_k < K
    row, alive, m, flush = _place(n, cursor_ptr, force_ptr, rows_ptr, R, MAX_TOKENS, FIRST)
    # without drafts a ring always begins with its row 0
    first = _first(n, cursor_ptr, R) if MAX_TOKENS > 1 else None
    ring_k = ring_k_ptr + row * strides[14] + h * (R * K)
    ring_g = ring_g_ptr + row * strides[16] + hv * R
    j = tl.arange(0, BLOCK_R)
    there = j < m
    at = ring_row(first, j, R)
    mask_rk = there[:, None] if mask_k is None else there[:, None] & mask_k[None, :]
    keys = load(ring_k + at[:, None] * K + offs_k[None, :], mask_rk)  # [BLOCK_R, BLOCK_K]
    later = load(ring_g + ring_row(first, j + 1, R), j + 1 < m)  # the gate after token j
    oldest = tl.load(ring_g if first is None else ring_g + first, mask=m > 0, other=0.0)
    # sums of later gates, never differences: one gate may be minus infinity
    after = tl.cumsum(later, 0, reverse=True)
    whole = oldest + tl.sum(later, 0)
    past = tl.zeros((), tl.float32)  # the gates of the call's tokens so far
    gates = ()  # for each of them the gates after it
    kept = alive & (flush == 0) if MAX_TOKENS == 1 else alive
    for t in tl.static_range(T):
        q = load(q_ptr + n * strides[0] + t * strides[1] + h * strides[2] + offs_k, mask_k)
        k_rows = k_ptr + n * strides[3] + h * strides[5] + offs_k
        k = load(k_rows + t * strides[4], mask_k)
        g = log_decay(
            tl.load(g_ptr + n * strides[9] + t * strides[10] + hv), A_log_ptr, dt_bias_ptr, hv
        )
        beta = tl.load(beta_ptr + n * strides[11] + t * strides[12] + hv)
        rstd, scale_q, kq = key_norms(q, k, scale, L2NORM)
        strength = write_strength(beta, BETA_MAX) * rstd
        gain = strength * rstd
        past += g
        factors = factors_ptr + ((n * HV + hv) * T + t) * (2 * COLUMNS)
        of_q = factors + COLUMNS
        a, b = tl.reduce((keys * k[None, :], keys * q[None, :]), 1, add_pairs)  # [BLOCK_R]
        w = tl.where(there, tl.exp(past + after), 0.0)
        tl.store(factors + j, gain * w * a, mask=j < R)
        tl.store(of_q + j, scale_q * w * b, mask=j < R)
        since = ()
        for i in tl.static_range(t):  # earlier tokens of this call
            gone = gates[i] + g
            key = load(k_rows + i * strides[4], mask_k)
            a, b = tl.reduce((key * k, key * q), 0, add_pairs)
            tl.store(factors + R + i, gain * tl.exp(gone) * a)
            tl.store(of_q + R + i, scale_q * tl.exp(gone) * b)
            since += (gone,)
        gates = since + (tl.zeros((), tl.float32),)
        decay = tl.exp(past + whole)
        tl.store(factors + R + T, gain * decay)
        tl.store(factors + R + T + 1, strength)
        tl.store(of_q + R + t, scale_q * kq)
        tl.store(of_q + R + T, scale_q * decay)
        tl.store(of_q + R + T + 1, g)
        at = ring_row(first, m + t, R)
        tl.store(ring_g + at, g, mask=kept)
        store(ring_k + at * K + offs_k, k, mask_k, kept & (hv % (HV // H) == 0))


@triton.jit
def replay_kernel(
    q_ptr,  # [N, T, H, K]
    k_ptr,  # [N, T, H, K]
    v_ptr,  # [N, T, HV, V]
    state_ptr,  # [P, HV, V, K]
    ring_k_ptr,  # [P, H, R, K]
    ring_u_ptr,  # [P, HV, R, V]
    ring_g_ptr,  # [P, HV, R] fp32
    cursor_ptr,  # [N, 2]
    force_ptr,  # [N] or None
    rows_ptr,  # [N] or None
    factors_ptr,  # [N, HV, T, 2, R + T + 2], of replay_products_kernel
    o_ptr,  # [N, T, HV, V]
    strides,  # of a sequence, token and head in q, k, v; a sequence and token in g, beta; of rows
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr,
    R: tl.constexpr, MAX_TOKENS: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, K_PART: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """A program takes T tokens and BLOCK_V rows of one state."""
    COLUMNS: tl.constexpr = R + T + 2
    n, hv, offs_k, offs_v, offs_s = replay_tile(HV, K, V, BLOCK_K, BLOCK_V, K_PART)
    h = hv // (HV // H)
    mask_k = None if BLOCK_K == K else offs_k < K
    mask_v = None if V % BLOCK_V == 0 else offs_v < V
    mask = None
    if BLOCK_K != K or V % BLOCK_V != 0:
        mask = (offs_k < K)[None, :, :] & (offs_v < V)[:, None, None]
    row, alive, m, flush = _place(n, cursor_ptr, force_ptr, rows_ptr, R, MAX_TOKENS, FIRST)
    # without drafts a ring always begins with its row 0
    first = _first(n, cursor_ptr, R) if MAX_TOKENS > 1 else None
    state_ptrs = state_ptr + row * strides[13] + offs_s
    # under way while all else is read, and as it lies in memory, in half of the registers
    S = tl.load(state_ptrs, mask=alive if mask is None else mask & alive, other=0.0)
    ring_u = ring_u_ptr + row * strides[15] + hv * (R * V)
    j = tl.arange(0, BLOCK_R)
    there = (j < m)[:, None] if mask_v is None else (j < m)[:, None] & mask_v[None, :]
    held_u = load(ring_u + ring_row(first, j, R)[:, None] * V + offs_v[None, :], there)
    new_u = ()
    if PDL:
        tl.extra.cuda.gdc_wait()
    for t in tl.static_range(T):
        factors = factors_ptr + ((n * HV + hv) * T + t) * (2 * COLUMNS)
        of_q = factors + COLUMNS
        f = load(factors + j, None if BLOCK_R == R else j < R)
        F = load(of_q + j, None if BLOCK_R == R else j < R)
        q = load(q_ptr + n * strides[0] + t * strides[1] + h * strides[2] + offs_k, mask_k)
        k = load(k_ptr + n * strides[3] + t * strides[4] + h * strides[5] + offs_k, mask_k)
        v = load(v_ptr + n * strides[6] + t * strides[7] + hv * strides[8] + offs_v, mask_v)
        wide = S.to(tl.float32)
        x, y = tl.reduce((wide * k[None, :, :], wide * q[None, :, :]), 1, add_pairs)
        x, y = tl.reduce((x, y), 1, add_pairs)  # [BLOCK_V]
        seen, asked = tl.reduce((f[:, None] * held_u, F[:, None] * held_u), 0, add_pairs)
        seen += tl.load(factors + R + T) * x
        asked += tl.load(of_q + R + T) * y
        for i in tl.static_range(t):  # earlier tokens of this call
            seen += tl.load(factors + R + i) * new_u[i]
            asked += tl.load(of_q + R + i) * new_u[i]
        u = tl.load(factors + R + T + 1) * v - seen
        o = tl.where(alive, asked + tl.load(of_q + R + t) * u, 0.0)
        store(o_ptr + ((n * T + t) * HV + hv) * V + offs_v, o, mask_v)
        kept = alive if MAX_TOKENS > 1 else alive & (flush == 0)
        store(ring_u + ring_row(first, m + t, R) * V + offs_v, u, mask_v, kept)
        new_u += (u.to(ring_u_ptr.dtype.element_ty).to(tl.float32),)  # as later calls see it
    if flush & alive:  # the tile is read again, from the cache: so it takes no registers till now
        ring_k = ring_k_ptr + row * strides[14] + h * (R * K)
        ring_g = ring_g_ptr + row * strides[16] + hv * R
        SERVED: tl.constexpr = BLOCK_R >= 16 and BLOCK_K >= STRIP  # sizes of the products
        if MAX_TOKENS == 1 and SERVED and ring_k_ptr.dtype.element_ty == tl.bfloat16:
            write_by_products(
                state_ptr + row * strides[13] + hv * (K * V), ring_k, ring_u, ring_g,
                k_ptr + n * strides[3] + h * strides[5], u, tl.load(of_q + R + T + 1), m, offs_v,
                mask_v, K, V, BLOCK_K, BLOCK_R, EVICT,
            )  # fmt: skip
        else:
            past = tl.zeros((), tl.float32)
            if MAX_TOKENS == 1:  # the call's token is no draft
                past += tl.load(of_q + R + T + 1)
            new = fold(
                state_ptrs, ring_k, ring_u, ring_g, first, m, past, mask, offs_k, offs_v, mask_k,
                mask_v, K, V, R, BLOCK_R,
            )  # fmt: skip
            if MAX_TOKENS == 1:
                new += u[:, None, None] * k[None, :, :]
            store(state_ptrs, new, mask, None, EVICT)


@triton.jit
def advance_kernel(
    cursor_ptr,  # [N, 2]
    accepted_ptr,  # [N] or None
    force_ptr,  # [N] or None
    rows_ptr,  # [N] or None
    N,
    R: tl.constexpr, MAX_TOKENS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = n < N
    first = tl.load(cursor_ptr + 2 * n, mask=there, other=0)
    m = tl.load(cursor_ptr + 2 * n + 1, mask=there, other=0)
    flush = m + 2 * MAX_TOKENS > R
    if force_ptr is not None:
        flush = flush | (tl.load(force_ptr + n, mask=there, other=0) != 0)
    if rows_ptr is not None:
        there = there & (tl.load(rows_ptr + n, mask=there, other=-1) >= FIRST)
    if accepted_ptr is None:
        m = tl.where(flush, 0, m + 1)
    else:
        added = tl.load(accepted_ptr + n, mask=there, other=0).to(tl.int32)
        added = tl.minimum(tl.maximum(added, 0), MAX_TOKENS)
        first = tl.where(flush, ring_row(first, m, R), first)
        m = tl.where(flush, 0, m) + added
    tl.store(cursor_ptr + 2 * n, first, mask=there)
    tl.store(cursor_ptr + 2 * n + 1, m, mask=there)


@triton.jit
def materialise_kernel(
    state_ptr,  # [P, HV, V, K]
    ring_k_ptr,  # [P, H, R, K]
    ring_u_ptr,  # [P, HV, R, V]
    ring_g_ptr,  # [P, HV, R]
    cursor_ptr,  # [N, 2]
    rows_ptr,  # [N] or None
    out_ptr,  # [N, HV, V, K], or None: in place
    strides,  # of a row in state, ring_k, ring_u, ring_g
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    FIRST: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    K_PART: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_V rows of one state."""
    n, hv, offs_k, offs_v, offs_s = replay_tile(HV, K, V, BLOCK_K, BLOCK_V, K_PART)
    mask = (offs_k < K)[None, :, :] & (offs_v < V)[:, None, None]
    row = n if rows_ptr is None else tl.load(rows_ptr + n).to(tl.int64)
    alive = row >= (0 if rows_ptr is None else FIRST)
    first, m = _first(n, cursor_ptr, R), _count(alive, n, cursor_ptr, R)
    state_ptrs = state_ptr + row * strides[0] + offs_s
    mask_s = mask & alive
    ring_k = ring_k_ptr + row * strides[1] + hv // (HV // H) * (R * K)
    ring_u = ring_u_ptr + row * strides[2] + hv * (R * V)
    ring_g = ring_g_ptr + row * strides[3] + hv * R
    if m > 0 or out_ptr is not None:
        S = fold(
            state_ptrs, ring_k, ring_u, ring_g, first, m, tl.zeros((), tl.float32), mask_s, offs_k,
            offs_v, offs_k < K, offs_v < V, K, V, R, BLOCK_R,
        )  # fmt: skip
        if out_ptr is None:
            store(state_ptrs, S, mask_s)
        else:
            store(out_ptr + n * (HV * K * V) + offs_s, S, mask)
