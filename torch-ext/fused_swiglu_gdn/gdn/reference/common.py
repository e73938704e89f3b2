"""Shared parts of the chunked and recurrent forms: gates, inputs in fp32, sequences, state pools.

Sizes: B batch, T tokens, H query/key heads, HV value heads (R = HV / H each), K and V head dims, N
sequences. States are [N, HV, K, V]; [N, HV, V, K] with state_v_first.
"""

import functools
from typing import Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F

from ...runtime.call import device_of
from ...runtime.dtypes import at_least_fp32, in_one_dtype


def without_autocast(function: Callable) -> Callable:
    """Runs a function without autocast, which would round the state and all products with it.

    Inputs are cast before.
    """

    @functools.wraps(function)
    def in_full(q, *args, **options):
        kind = device_of(q).type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return function(q, *args, **options)
        with torch.autocast(kind, enabled=False):
            return function(q, *args, **options)

    return in_full


def gated_delta_gate(
    a: torch.Tensor, A_log: torch.Tensor, dt_bias: Optional[torch.Tensor]
) -> torch.Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias): the natural-log decay, [..., HV], fp32."""
    a = at_least_fp32(a)
    if dt_bias is not None:
        a = a + at_least_fp32(dt_bias)
    return -at_least_fp32(A_log).exp() * F.softplus(a)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Inputs(NamedTuple):
    """One batch of sequences, heads before tokens, in fp32 or fp64; queries and keys per key
    head."""

    q: torch.Tensor  # [B, H, 1, T, K], scaled
    k: torch.Tensor  # [B, H, 1, T, K]
    v: torch.Tensor  # [B, H, R, T, V]
    g: torch.Tensor  # [B, H, R, T], or [B, H, R, T, K]
    beta: torch.Tensor  # [B, H, R, T]


def prepare_inputs(call) -> Inputs:
    """The Inputs of a GdnCall or a RecurrentCall."""
    g, A_log = call.g, call.A_log
    g = g if A_log is None else gated_delta_gate(g, A_log, call.dt_bias)
    q, k, v, g, beta = in_one_dtype(call.q, call.k, call.v, g, call.beta)
    if call.options.use_beta_sigmoid:
        beta = beta.sigmoid() * call.options.beta_max
    if call.options.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    H, HV = call.H, call.HV
    q, k = (x.transpose(1, 2).unsqueeze(2) for x in (q * call.options.scale, k))
    v = v.transpose(1, 2).unflatten(1, (H, HV // H))
    g, beta = (x.transpose(1, 2).unflatten(1, (H, HV // H)) for x in (g, beta))
    return Inputs(q, k, v, g, beta)


def of_sequences(call):
    """The call without tokens behind the last of packed sequences, which are padding."""
    end = call.T if call.cu_seqlens is None else call.cu_seqlens.tolist()[-1]
    if end == call.T:
        return call
    names = ("q", "k", "v", "g", "beta", "do")
    tokens = {name: getattr(call, name)[:, :end] for name in names if name in call._fields}
    return call._replace(**tokens)


def padded(x: torch.Tensor, T: int) -> torch.Tensor:
    """x [B, tokens, ..] of sequences, with zeros for the tokens behind them."""
    missing = T - x.shape[1]
    return F.pad(x, [0, 0] * (x.ndim - 2) + [0, missing]) if missing else x


def spans(B: int, T: int, cu_seqlens: Optional[torch.Tensor]):
    """(batch rows, token range) of each group of equally long sequences that run together."""
    if cu_seqlens is None:
        return [(slice(0, B), slice(0, T))]
    cu = cu_seqlens.tolist()  # a host copy; the kernels read cu_seqlens on the device
    return [(slice(0, 1), slice(a, b)) for a, b in zip(cu, cu[1:])]


def no_tokens(x: Inputs, S: torch.Tensor) -> torch.Tensor:
    """An empty o [B, H, R, T, V] that keeps the autograd graph connected to the inputs."""
    return x.v + sum(y.sum() for y in (x.q, x.k, x.g, x.beta, S))


def run(step, call):
    """Calls step(inputs, S) for each sequence; returns o [B, T, HV, V] and the steps' results."""
    x, state = prepare_inputs(call), _start(call)
    if state is None:
        state = x.v.new_zeros(call.N, call.HV, call.K, call.V)
    elif call.T == 0:
        state = state.clone()  # it is the final state, which is never the caller's tensor
    state = state.to(x.v.dtype).unflatten(1, (call.H, call.HV // call.H))
    outputs, results = [], []
    for n, (rows, tokens) in enumerate(spans(call.B, call.T, call.cu_seqlens)):
        part = Inputs(*(y[rows, :, :, tokens] for y in x))
        o, *rest = step(part, state if call.cu_seqlens is None else state[n : n + 1])
        outputs.append(o)
        results.append(rest)
    o = torch.cat(outputs, 3) if outputs else no_tokens(x, state)
    o = o.flatten(1, 2).transpose(1, 2).to(call.q.dtype)
    return _silence_skipped(o, call.state_indices, call.cu_seqlens), results


def _start(call):
    """The initial states [N, HV, K, V], gathered from a pool if indices are given, or None."""
    if call.initial_state is None:
        return None
    state = call.initial_state.mT if call.options.state_v_first else call.initial_state
    if call.state_indices is None:
        return state
    rows = state[call.state_indices.clamp(min=0).long()]
    return rows.masked_fill((call.state_indices < 0).view(-1, 1, 1, 1), 0.0)


def write_pool(pool, indices, states):
    """Writes states[n] to pool[indices[n]] in place; a negative index writes nothing."""
    keep = indices >= 0
    pool[indices[keep].long()] = states[keep].to(pool.dtype)
    return pool


def clear_rows(pool, indices, kept):
    """Zeroes rows indices[n] of the pool where kept[n] is false; a negative index is no row."""
    pool[indices[(indices >= 0) & ~kept].long()] = 0.0


def own_rows(pool, indices, kept):
    """Copies rows indices[n] of a pool into a pool of their own.

    Returns that pool, in fp32 or more and zero where kept[n] is false, and indices into it;
    negative indices stay negative.
    """
    skipped = indices < 0
    fresh = skipped if kept is None else skipped | ~kept
    rows = at_least_fp32(pool[indices.clamp(min=0).long()])
    order = torch.arange(indices.numel(), device=indices.device, dtype=indices.dtype)
    return rows.masked_fill(fresh.view(-1, 1, 1, 1), 0.0), order.masked_fill(skipped, -1)


def _silence_skipped(o, indices, cu_seqlens):
    """Zeroes the outputs of sequences whose state index is negative."""
    if indices is None:
        return o
    skipped = indices < 0
    if cu_seqlens is None:
        return o.masked_fill(skipped.view(-1, 1, 1, 1), 0.0)
    tokens = skipped.repeat_interleave(cu_seqlens.diff().long())
    return o.masked_fill(tokens.view(1, -1, 1, 1), 0.0)


def stacked(states, like_empty):
    """Concatenates [[B, H, R, K, V], ...] to [N, HV, K, V]."""
    if len(states) == 1:  # a state is large: no copy
        return states[0].flatten(1, 2)
    return torch.cat(states).flatten(1, 2) if states else like_empty


def negative(indices, null: int):
    """Indices with -1 in place of null slots."""
    return None if indices is None else indices.masked_fill(indices <= null, -1)
