"""Decoding with deferred state write-back: the definition.

    S_t = exp(g_t) S_{t-1} + u_t k_t^T    u_t = beta_t (v_t - exp(g_t) S_{t-1} k^_t) / |k_t|
    o_t = scale * S_t q^_t                k^ = k / |k|, q^ = q / |q|; without l2norm, |x| is 1

which is the gated delta rule for states [V, K]. A ring holds k, u and g of the latest tokens, from
which the state is rebuilt, starting with that of the last flush:

    S = exp(g_1 + .. + g_m) S_0 + sum_j exp(g_{j+1} + .. + g_m) u_j k_j^T

Decays are sums of later gates, never differences of two sums, so that a gate of -inf zeroes earlier
tokens without making NaN.

Sizes: N sequences, T tokens, H and HV heads, K and V head dims, P rows of states and of the ring, R
rows of tokens in a ring, m of them in use.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.dtypes import at_least_fp32
from ..call import ReplayCall, RingAdvance, RingMaterialise
from .common import negative, prepare_inputs, without_autocast, write_pool


class _Held(NamedTuple):
    """The contents of the sequences' rows."""

    rows: Tensor  # [N], of the pool; negative: none
    first: Tensor  # [N], the ring's first row
    count: Tensor  # [N]: m
    state: Tensor  # [N, HV, V, K], all tokens of the ring in it


def is_full(count: Tensor, R: int, max_tokens: int) -> Tensor:
    """True if the tokens of this call are the last that fit: the ring is flushed."""
    return count + 2 * max_tokens > R


def _in_ring(cursor: Tensor, j: Tensor, R: int) -> Tensor:
    """Rows of the ring [N, ..] that hold its j-th tokens."""
    return (cursor[:, :1].long() + j) % R


def _held(state, ring_k, ring_u, ring_g, cursor, indices, dtype) -> _Held:
    N, R, (H, HV) = cursor.shape[0], ring_k.shape[2], (ring_k.shape[1], ring_u.shape[1])
    rows = torch.arange(N, device=cursor.device) if indices is None else indices.long()
    mine, count = rows.clamp(min=0), torch.where(rows < 0, 0, cursor[:, 1])
    j = torch.arange(R, device=cursor.device)
    at, there = _in_ring(cursor, j, R), j < count[:, None]  # [N, R]

    def tokens(x):
        """The ring's rows of x in their order, [N, R, ..]; zeros where there is no token."""
        x = x[mine[:, None], :, at].to(dtype)
        return x.masked_fill(~there.view(N, R, *[1] * (x.ndim - 2)), 0.0)

    k, u, g = tokens(ring_k), tokens(ring_u), tokens(ring_g)
    later = torch.cat([g[:, 1:], torch.zeros_like(g[:, :1])], 1)  # the gate after each token
    weight = later.flip(1).cumsum(1).flip(1).exp()  # [N, R, HV]
    k = k.repeat_interleave(HV // H, 2)
    start = state[mine].to(dtype).masked_fill((rows < 0).view(N, 1, 1, 1), 0.0)
    decay = g.sum(1).exp()[..., None, None]  # [N, HV, 1, 1]
    now = decay * start + torch.einsum("nrhv,nrhk->nhvk", weight[..., None] * u, k)
    return _Held(rows, cursor[:, 0], count, now)


@without_autocast
def gdn_replay_fwd(call: ReplayCall) -> Tensor:
    """o [N, T, HV, V]. Adds the tokens to the ring, or the ring to the states."""
    rows = negative(call.state_indices, call.options.null_index)
    x = prepare_inputs(call)
    k_raw = call.k.to(x.v.dtype)
    rstd = k_raw.new_ones(call.k.shape[:-1])  # [N, T, H]
    if call.options.use_qk_l2norm:
        rstd = torch.rsqrt(k_raw.square().sum(-1) + 1e-6)
    repeats, dtype = call.HV // call.H, x.v.dtype
    rstd, k_raw = (y.repeat_interleave(repeats, 2) for y in (rstd, k_raw))  # [N, T, HV, ..]
    q = x.q.squeeze(2).transpose(1, 2).repeat_interleave(repeats, 2)
    v, g, beta = (y.flatten(1, 2).transpose(1, 2) for y in (x.v, x.g, x.beta))
    ring = (call.ring_k, call.ring_u, call.ring_g)
    held = _held(call.initial_state, *ring, call.cursor, rows, dtype)
    alive, single = held.rows >= 0, call.options.max_tokens == 1
    flush = is_full(held.count, call.R, call.options.max_tokens)
    if call.force_flush is not None:
        flush = flush | call.force_flush
    flushed = torch.where(flush & alive, held.rows, -1)
    S, outputs = held.state, []
    if not single:
        write_pool(call.initial_state, flushed, S)
    for t in range(call.T):
        S = S * g[:, t].exp()[..., None, None]
        seen, asked = (torch.einsum("nhvk,nhk->nhv", S, y[:, t]) for y in (k_raw, q))
        r = rstd[:, t, :, None]
        u = beta[:, t, :, None] * r * (v[:, t] - r * seen)  # [N, HV, V]
        outputs.append(asked + (k_raw[:, t] * q[:, t]).sum(-1, keepdim=True) * u)
        if not single:
            u = u.to(call.ring_u.dtype).to(dtype)  # as later tokens see it
        S = S + u[..., None] * k_raw[:, t, :, None]
        kept = alive & ~flush if single else alive
        at = _in_ring(call.cursor, held.count[:, None].long() + t, call.R)[:, 0]
        row, at = held.rows[kept], at[kept]
        call.ring_k[row, :, at] = call.k[kept, t]
        call.ring_u[row, :, at] = u[kept].to(call.ring_u.dtype)
        call.ring_g[row, :, at] = g[kept, t].to(call.ring_g.dtype)
    if single:
        write_pool(call.initial_state, flushed, S)
    o = torch.stack(outputs, 1) if outputs else v
    o = o.to(call.q.dtype).masked_fill(~alive.view(-1, 1, 1, 1), 0.0)
    return o.contiguous() if call.out is None else call.out.copy_(o)


def gdn_ring_advance(call: RingAdvance) -> None:
    """Updates the cursor after a call, in place."""
    cursor, accepted, force_flush, state_indices, *_, (max_tokens, null_index) = call
    R, (first, count) = call.ring_g.shape[2], cursor.unbind(1)
    flush = is_full(count, R, max_tokens)
    if force_flush is not None:
        flush = flush | force_flush
    if accepted is None:
        new = torch.stack([first, torch.where(flush, 0, count + 1)], 1)
    else:
        added = accepted.clamp(0, max_tokens).to(cursor.dtype)
        new = torch.stack(
            [torch.where(flush, (first + count) % R, first), torch.where(flush, 0, count) + added],
            1,
        )
    if state_indices is not None:
        new = torch.where((state_indices > max(null_index, -1))[:, None], new, cursor)
    cursor.copy_(new)


@without_autocast
def gdn_ring_materialise(call: RingMaterialise) -> Tensor:
    """The states with all tokens of the ring: [N, HV, V, K], or their rows of `state`, in place."""
    state, *ring, cursor, state_indices, (_, null_index, inplace) = call
    wide = at_least_fp32(state[:0]).dtype
    held = _held(state, *ring, cursor, negative(state_indices, null_index), wide)
    return write_pool(state, held.rows, held.state) if inplace else held.state.contiguous()
