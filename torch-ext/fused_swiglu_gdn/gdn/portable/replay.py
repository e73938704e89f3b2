"""Decoding that reads a state at every token and writes it once in many: gdn/reference/replay.py.

    S = exp(c) S_0 + sum_j w_j u_j k_j^T    c = g_1 + .. + g_now    w_j = exp(g_{j+1} + .. + g_now)
    S k = exp(c) S_0 k + sum_j w_j (k_j . k) u_j                    S q likewise

so a token takes two dot products with each row of the ring, and not the state rebuilt from it.

Sizes: N sequences, T tokens of each, H and HV heads, K and V head dims, P rows of states and ring,
R tokens that a ring has room for, m of them there from row `first` on, around its end.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime import tuning
from ...runtime.cache import CallCache
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ..call import ReplayCall
from .delta import add_pairs, key_norms, load, state_tile, store
from .gates import log_decay, write_strength
from .recurrent_step import is_dense

MOST_TOKENS = 8  # of a call: the kernel is unrolled over them
ADVANCED = 128  # sequences a program


@triton.jit
def _ring_row(first, j, R: tl.constexpr):
    """Where the j-th token of a ring is, whose first row may be known to be row 0 (None)."""
    if first is not None:
        j += first
        j = tl.where(j >= R, j - R, j)
    return j


@triton.jit
def _first(n, cursor_ptr, R: tl.constexpr):
    """The first row of a sequence's ring: within it, whatever the cursor says, for nobody on the
    host has seen its values."""
    return tl.minimum(tl.maximum(tl.load(cursor_ptr + 2 * n), 0), R - 1)


@triton.jit
def _count(row, n, cursor_ptr, MOST: tl.constexpr):
    """The tokens in its ring, likewise; none where the sequence has no row of the pool."""
    m = tl.minimum(tl.maximum(tl.load(cursor_ptr + 2 * n + 1), 0), MOST)
    return tl.where(row >= 0, m, 0)


@triton.jit
def _read_ring(
    ring_k, ring_u, ring_g, first, m, k, q, past, offs_k, offs_v, mask_k, mask_v,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What m tokens add to S k and S q [V], and the decay of S_0; `past`: the gates since then.

    The latest tokens come first, ROWS at a time, so that decays are sums of later gates.
    """
    add_k = tl.zeros(offs_v.shape, tl.float32)
    add_q = tl.zeros(offs_v.shape, tl.float32)
    start = ring_g if first is None else ring_g + first
    oldest = tl.load(start, mask=m > 0, other=0.0)
    chunks = (m + ROWS - 1) // ROWS
    for i in range(0, chunks):
        j = (chunks - 1 - i) * ROWS + tl.arange(0, ROWS)
        there = j < m
        at = _ring_row(first, j, R)
        mask_rk = there[:, None] if mask_k is None else there[:, None] & mask_k[None, :]
        mask_rv = there[:, None] if mask_v is None else there[:, None] & mask_v[None, :]
        keys = load(ring_k + at[:, None] * K + offs_k[None, :], mask_rk)  # [ROWS, BLOCK_K]
        u = load(ring_u + at[:, None] * V + offs_v[None, :], mask_rv)  # [ROWS, BLOCK_V]
        later = load(ring_g + _ring_row(first, j + 1, R), j + 1 < m)  # the gate after token j
        w = tl.where(there, tl.exp(past + tl.cumsum(later, 0, reverse=True)), 0.0)
        past += tl.sum(later, 0)
        a, b = tl.reduce((keys * k[None, :], keys * q[None, :]), 1, add_pairs)  # [ROWS]
        x, y = tl.reduce(((w * a)[:, None] * u, (w * b)[:, None] * u), 0, add_pairs)
        add_k += x
        add_q += y
    return add_k, add_q, tl.exp(past + oldest)


@triton.jit
def _fold(
    S, ring_k, ring_u, ring_g, first, m, past, state_ptrs, mask, offs_k, offs_v, mask_k, mask_v,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """S and the m tokens of the ring and the state behind them, `past` being the gates of S; fp32
    throughout, and the latest tokens first."""
    for i in range(0, m):
        at = _ring_row(first, m - 1 - i, R)
        u = load(ring_u + at * V + offs_v, mask_v) * tl.exp(past)
        S += u[:, None] * load(ring_k + at * K + offs_k, mask_k)[None, :]
        past += tl.load(ring_g + at)
    return S + tl.exp(past) * load(state_ptrs, mask)


@triton.jit
def _gdn_replay_kernel(
    q_ptr,  # [N, T, H, K]
    k_ptr,  # [N, T, H, K]
    v_ptr,  # [N, T, HV, V]
    g_ptr,  # [N, T, HV]
    beta_ptr,  # [N, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    state_ptr,  # [P, HV, V, K]
    ring_k_ptr,  # [P, H, R, K]
    ring_u_ptr,  # [P, HV, R, V]
    ring_g_ptr,  # [P, HV, R] fp32
    cursor_ptr,  # [N, 2]
    force_ptr,  # [N] or None
    rows_ptr,  # [N] or None
    o_ptr,  # [N, T, HV, V]
    strides,  # of a sequence, token and head in q, k, v; a sequence and token in g, beta; of rows
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_MAX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    EVICT: tl.constexpr,
):
    """A program takes T tokens and BLOCK_V rows of one state.

    Other programs of the head read k and g of the ring's m tokens meanwhile. What is written to the
    ring goes to the rows behind these, which the cursor's bounds keep apart from them.
    """
    pid = tl.program_id(0)
    n, hv, offs_k, offs_v, offs_s = state_tile(pid, HV, K, V, True, BLOCK_K, BLOCK_V)
    h = hv // (HV // H)
    mask_k = None if BLOCK_K == K else offs_k < K
    mask_v = None if V % BLOCK_V == 0 else offs_v < V
    mask = None
    if BLOCK_K != K or V % BLOCK_V != 0:  # [BLOCK_V, BLOCK_K]
        mask = (offs_k < K)[None, :] & (offs_v < V)[:, None]
    row = n if rows_ptr is None else tl.load(rows_ptr + n).to(tl.int64)
    alive = row >= 0
    # without drafts a ring always begins with its row 0
    first = _first(n, cursor_ptr, R) if MAX_TOKENS > 1 else None
    m = _count(row, n, cursor_ptr, R - MAX_TOKENS)
    state_ptrs = state_ptr + row * strides[13] + offs_s
    # under way while the ring is read, and as it lies in memory, in half of the registers
    S = tl.load(state_ptrs, mask=alive if mask is None else mask & alive, other=0.0)
    ring_k = ring_k_ptr + row * strides[14] + h * (R * K)
    ring_u = ring_u_ptr + row * strides[15] + hv * (R * V)
    ring_g = ring_g_ptr + row * strides[16] + hv * R
    flush = m + 2 * MAX_TOKENS > R
    if force_ptr is not None:
        flush = flush | (tl.load(force_ptr + n) != 0)
    past = tl.zeros((), tl.float32)  # the gates of the call's tokens so far
    gates, new_u = (), ()  # of each of them the gates after it, and its u
    for t in tl.static_range(T):
        q = load(q_ptr + n * strides[0] + t * strides[1] + h * strides[2] + offs_k, mask_k)
        raw_k = k_ptr + n * strides[3] + t * strides[4] + h * strides[5] + offs_k
        k = load(raw_k, mask_k)
        v = load(v_ptr + n * strides[6] + t * strides[7] + hv * strides[8] + offs_v, mask_v)
        g = tl.load(g_ptr + n * strides[9] + t * strides[10] + hv)
        g = log_decay(g, A_log_ptr, dt_bias_ptr, hv)
        beta = tl.load(beta_ptr + n * strides[11] + t * strides[12] + hv)
        beta = write_strength(beta, BETA_MAX)
        past += g
        seen, asked, decay = _read_ring(
            ring_k, ring_u, ring_g, first, m, k, q, past, offs_k, offs_v, mask_k, mask_v, K, V, R,
            ROWS,
        )  # fmt: skip
        wide = S.to(tl.float32)
        x, y = tl.reduce((wide * k[None, :], wide * q[None, :]), 1, add_pairs)  # [BLOCK_V]
        seen += decay * x
        asked += decay * y
        after = ()
        for i in tl.static_range(t):  # earlier tokens of this call
            later = gates[i] + g
            key = load(k_ptr + n * strides[3] + i * strides[4] + h * strides[5] + offs_k, mask_k)
            a, b = tl.reduce((key * k, key * q), 0, add_pairs)
            w = tl.exp(later)
            seen += (w * a) * new_u[i]
            asked += (w * b) * new_u[i]
            after += (later,)
        gates = after + (tl.zeros((), tl.float32),)
        rstd, scale_q, kq = key_norms(q, k, scale, L2NORM)
        u = (beta * rstd) * (v - rstd * seen)
        o = tl.where(alive, scale_q * (asked + kq * u), 0.0)
        store(o_ptr + ((n * T + t) * HV + hv) * V + offs_v, o, mask_v)
        kept = alive if MAX_TOKENS > 1 else alive & (flush == 0)
        at = _ring_row(first, m + t, R)
        store(ring_u + at * V + offs_v, u, mask_v, kept)
        own = kept & (pid % tl.cdiv(V, BLOCK_V) == 0)  # one program of a head
        tl.store(ring_g + at, g, mask=own)
        own = own & (hv % (HV // H) == 0)  # one of a key head
        store(ring_k + at * K + offs_k, k, mask_k, own)
        new_u += (u.to(ring_u_ptr.dtype.element_ty).to(tl.float32),)  # as later calls see it
    if flush & alive:  # the tile is read again, from the cache: so it takes no registers till now
        new = tl.zeros(offs_s.shape, tl.float32)
        if MAX_TOKENS == 1:  # the call's token is no draft
            new += u[:, None] * k[None, :]
        else:
            past = tl.zeros((), tl.float32)
        new = _fold(
            new, ring_k, ring_u, ring_g, first, m, past, state_ptrs, mask, offs_k, offs_v, mask_k,
            mask_v, K, V, R,
        )  # fmt: skip
        store(state_ptrs, new, mask, None, EVICT)


@triton.jit
def _advance_kernel(
    cursor_ptr,  # [N, 2]
    accepted_ptr,  # [N] or None
    force_ptr,  # [N] or None
    rows_ptr,  # [N] or None
    N,
    R: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = n < N
    first = tl.load(cursor_ptr + 2 * n, mask=there, other=0)
    m = tl.load(cursor_ptr + 2 * n + 1, mask=there, other=0)
    flush = m + 2 * MAX_TOKENS > R
    if force_ptr is not None:
        flush = flush | (tl.load(force_ptr + n, mask=there, other=0) != 0)
    if rows_ptr is not None:
        there = there & (tl.load(rows_ptr + n, mask=there, other=-1) >= 0)
    if accepted_ptr is None:
        m = tl.where(flush, 0, m + 1)
    else:
        added = tl.load(accepted_ptr + n, mask=there, other=0).to(tl.int32)
        added = tl.minimum(tl.maximum(added, 0), MAX_TOKENS)
        first = tl.where(flush, _ring_row(first, m, R), first)
        m = tl.where(flush, 0, m) + added
    tl.store(cursor_ptr + 2 * n, first, mask=there)
    tl.store(cursor_ptr + 2 * n + 1, m, mask=there)


@triton.jit
def _materialise_kernel(
    state_ptr,  # [P, HV, V, K]
    ring_k_ptr,  # [P, H, R, K]
    ring_u_ptr,  # [P, HV, R, V]
    ring_g_ptr,  # [P, HV, R]
    cursor_ptr,  # [N, 2]
    rows_ptr,  # [N] or None
    out_ptr,  # [N, HV, V, K], or None: in place
    strides,  # of a row in state, ring_k, ring_u, ring_g
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program takes BLOCK_V rows of one state."""
    pid = tl.program_id(0)
    n, hv, offs_k, offs_v, offs_s = state_tile(pid, HV, K, V, True, BLOCK_K, BLOCK_V)
    mask_k = offs_k < K
    mask_v = offs_v < V
    mask = mask_k[None, :] & mask_v[:, None]
    row = n if rows_ptr is None else tl.load(rows_ptr + n).to(tl.int64)
    first, m = _first(n, cursor_ptr, R), _count(row, n, cursor_ptr, R)
    state_ptrs = state_ptr + row * strides[0] + offs_s
    mask_s = mask & (row >= 0)
    ring_k = ring_k_ptr + row * strides[1] + hv // (HV // H) * (R * K)
    ring_u = ring_u_ptr + row * strides[2] + hv * (R * V)
    ring_g = ring_g_ptr + row * strides[3] + hv * R
    S = _fold(
        tl.zeros(offs_s.shape, tl.float32), ring_k, ring_u, ring_g, first, m,
        tl.zeros((), tl.float32), state_ptrs, mask_s, offs_k, offs_v, mask_k, mask_v, K, V, R,
    )  # fmt: skip
    if out_ptr is None:
        store(state_ptrs, S, mask_s)
    else:
        store(out_ptr + n * (HV * K * V) + offs_s, S, mask)


def _rows_are_dense(*tensors: torch.Tensor) -> bool:
    """The states and the ring's k and u [P, .., .., ..], and its g [P, HV, R]: each row is."""
    *wide, g = tensors
    return all(map(is_dense, wide)) and is_dense(g.unsqueeze(2))


def _tile(device, K: int, state: torch.Tensor) -> dict:
    size = state.element_size()
    return tuning.lookup("portable_gdn_replay_fwd", device, K=K, STATE_BYTES=size)


class Replay:
    """T tokens a sequence, for all calls of a kind: shapes, strides, dtypes and options."""

    __slots__ = ("kernel",)

    def __init__(self, call: ReplayCall):
        q, k, v, g, beta, options = call.q, call.k, call.v, call.g, call.beta, call.options
        state, HV, K, V = call.initial_state, call.HV, call.K, call.V
        config = _tile(q.device, K, state)
        held = (state, call.ring_k, call.ring_u, call.ring_g)
        strides = (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:2], *beta.stride()[:2],
            *(x.stride(0) for x in held),
        )  # fmt: skip
        constexprs = (
            call.H, HV, K, V, call.T, call.R, options.max_tokens, options.use_qk_l2norm,
            options.beta_max, triton.next_power_of_2(K), config["BLOCK_V"], config["ROWS"],
            config["EVICT"],
        )  # fmt: skip
        self.kernel = Launch(
            _gdn_replay_kernel, call.N * HV * triton.cdiv(V, config["BLOCK_V"]), q.device,
            numbers=(strides, options.scale), constexprs=constexprs,
            options=(("num_warps", config["num_warps"]),), guarded=True,
        )  # fmt: skip

    def __call__(self, q, k, v, *rest) -> torch.Tensor:
        """o [N, T, HV, V]."""
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        self.kernel(q, k, v, *rest, o)
        return o


_replays = CallCache()


def supports_gdn_replay_fwd(call: ReplayCall) -> bool:
    """fp16, bf16 and fp32, in memory that the kernel can write; g of the ring is in fp32."""
    held = (call.initial_state, call.ring_k, call.ring_u, call.ring_g)
    dense = _rows_are_dense(*held)
    return served(call.q, call.g, call.beta, *held) and dense and call.T <= MOST_TOKENS


def plan_gdn_replay_fwd(call: ReplayCall) -> Replay:
    """What serves all calls like this one, from the tensors alone."""
    key = (call.tensors, call.options)
    return _replays.find(*key) or _replays.keep(*key, Replay(call))


def gdn_replay_fwd(call: ReplayCall) -> torch.Tensor:
    """One launch: o; the ring, or the states, are written."""
    return plan_gdn_replay_fwd(call)(*call.tensors)


def supports_gdn_ring_advance(
    cursor, accepted, force_flush, state_indices, R: int, max_tokens: int
) -> bool:  # fmt: skip
    return True


def gdn_ring_advance(
    cursor: torch.Tensor, accepted: Optional[torch.Tensor], force_flush: Optional[torch.Tensor],
    state_indices: Optional[torch.Tensor], R: int, max_tokens: int,
) -> torch.Tensor:  # fmt: skip
    """The cursor, moved."""
    N = cursor.shape[0]
    kernel = Launch(
        _advance_kernel, triton.cdiv(N, ADVANCED), cursor.device, numbers=(N,),
        constexprs=(R, max_tokens, ADVANCED),
    )  # fmt: skip
    kernel(cursor, accepted, force_flush, state_indices)
    return cursor


def supports_gdn_ring_materialise(
    state, ring_k, ring_u, ring_g, cursor, state_indices, inplace: bool
) -> bool:  # fmt: skip
    held = (state, ring_k, ring_u, ring_g)
    return served(*held) and _rows_are_dense(*held)


def gdn_ring_materialise(
    state: torch.Tensor, ring_k: torch.Tensor, ring_u: torch.Tensor, ring_g: torch.Tensor,
    cursor: torch.Tensor, state_indices: Optional[torch.Tensor], inplace: bool,
) -> torch.Tensor:  # fmt: skip
    """The states with all of the ring."""
    (_, HV, V, K), (_, H, R, _), N = state.shape, ring_k.shape, cursor.shape[0]
    config = _tile(state.device, K, state)
    out = None
    if not inplace:
        out = torch.empty(N, HV, V, K, dtype=torch.float32, device=state.device)
    kernel = Launch(
        _materialise_kernel, N * HV * triton.cdiv(V, config["BLOCK_V"]), state.device,
        numbers=(tuple(x.stride(0) for x in (state, ring_k, ring_u, ring_g)),),
        constexprs=(H, HV, K, V, R, triton.next_power_of_2(K), config["BLOCK_V"]),
        options=(("num_warps", config["num_warps"]),),
    )  # fmt: skip
    kernel(state, ring_k, ring_u, ring_g, cursor, state_indices, out)
    return state if inplace else out
