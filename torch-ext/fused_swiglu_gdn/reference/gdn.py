"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) in plain torch.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

`gdn_recurrent_fwd` is that recurrence, token by token: the definition. `gdn_chunk_fwd` computes the
same in chunks of 64 tokens (docs/gdn.md), which is what a CPU should run. Both are differentiable.

Sizes: B batch, T tokens, H query/key heads, HV value heads (R = HV / H each), K and V head dims,
N sequences, C = 64 tokens a chunk. States are [N, HV, K, V]; [N, HV, V, K] with state_v_first.
"""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from .swiglu import at_least_fp32

CHUNK = 64


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


class _Inputs(NamedTuple):
    """One sequence batch, heads before tokens, in fp32 or fp64; queries and keys per key head."""

    q: torch.Tensor  # [B, H, 1, T, K], scaled
    k: torch.Tensor  # [B, H, 1, T, K]
    v: torch.Tensor  # [B, H, R, T, V]
    g: torch.Tensor  # [B, H, R, T]
    beta: torch.Tensor  # [B, H, R, T]


def _inputs(
    q, k, v, g, beta, A_log, dt_bias, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval
) -> _Inputs:
    q, k, v, beta = (at_least_fp32(x) for x in (q, k, v, beta))
    g = at_least_fp32(g) if A_log is None else gated_delta_gate(g, A_log, dt_bias)
    if use_beta_sigmoid:
        beta = beta.sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    H, HV = k.shape[2], v.shape[2]
    q, k = (x.transpose(1, 2).unsqueeze(2) for x in (q * scale, k))
    v = v.transpose(1, 2).unflatten(1, (H, HV // H))
    g, beta = (x.transpose(1, 2).unflatten(1, (H, HV // H)) for x in (g, beta))
    return _Inputs(q, k, v, g, beta)


def _recurrent(x: _Inputs, S: torch.Tensor, all_states: bool):
    """The recurrence. S [B, H, R, K, V] -> o [B, H, R, T, V] and S, or every S [B, T, H, R, K, V]."""
    decay = x.g.exp()[..., None, None]  # [B, H, R, T, 1, 1]
    o, states = [], []
    for t in range(x.v.shape[3]):
        k = x.k[:, :, :, t, :, None]  # [B, H, 1, K, 1]
        S = S * decay[:, :, :, t]
        delta = (x.v[:, :, :, t] - (S * k).sum(-2)) * x.beta[:, :, :, t, None]  # [B, H, R, V]
        S = S + k * delta.unsqueeze(-2)
        o.append((S * x.q[:, :, :, t, :, None]).sum(-2))
        if all_states:
            states.append(S)
    o = torch.stack(o, 3) if o else torch.zeros_like(x.v)
    if not all_states:
        return o, S
    return o, torch.stack(states, 1) if states else S.unsqueeze(1)[:, :0]


def _to_chunks(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Pads the token dimension with zeros and splits it into [NT, C]."""
    pad = -x.shape[dim] % CHUNK
    if pad:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, pad])
    return x.unflatten(dim, (-1, CHUNK))


def _chunked(x: _Inputs, S: torch.Tensor, checkpoint_every: int):
    """The chunk form. S [B, H, R, K, V] -> o [B, H, R, T, V], S and the checkpointed states."""
    T = x.v.shape[3]
    if T == 0:
        return torch.zeros_like(x.v), S, []
    q, k, v, g, beta = (_to_chunks(y, 3) for y in x)  # padding: beta = 0 and g = 0 change nothing
    G = g.cumsum(-1)  # [B, H, R, NT, C]
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decay = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    P = (q @ k.mT) * decay  # [B, H, R, NT, C, C]
    A = beta.unsqueeze(-1) * (k @ k.mT) * decay  # unit diagonal is understood by the solve below
    # T = (I + strictly_lower(A))^-1 diag(beta)
    T_beta = torch.linalg.solve_triangular(
        A, torch.diag_embed(beta), upper=False, unitriangular=True
    )
    gam = G.exp().unsqueeze(-1)  # [B, H, R, NT, C, 1]
    k_end = k * (G[..., -1:] - G).exp().unsqueeze(-1)  # [B, H, R, NT, C, K]
    qk = torch.cat([q, k], -2)  # [B, H, 1, NT, 2C, K]
    o, checkpoints = [], []
    for c in range(G.shape[3]):
        read = qk[:, :, :, c] @ S  # [B, H, R, 2C, V]
        gam_c = gam[:, :, :, c]
        new = T_beta[:, :, :, c] @ (v[:, :, :, c] - gam_c * read[..., CHUNK:, :])  # [B, H, R, C, V]
        o.append(gam_c * read[..., :CHUNK, :] + P[:, :, :, c] @ new)
        S = gam_c[..., -1:, :] * S + k_end[:, :, :, c].mT @ new
        end = (c + 1) * CHUNK
        if checkpoint_every and end % checkpoint_every == 0 and end <= T:
            checkpoints.append(S)
    return torch.cat(o, 3)[..., :T, :], S, checkpoints


def _spans(B: int, T: int, cu_seqlens: Optional[torch.Tensor]):
    """(batch rows, token range) of each group of equally long sequences that run together."""
    if cu_seqlens is None:
        return [(slice(0, B), slice(0, T))]
    cu = cu_seqlens.tolist()  # a host copy; the kernels read cu_seqlens on the device
    return [(slice(0, 1), slice(a, b)) for a, b in zip(cu, cu[1:])]


def _run(step, q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens, scale, flags):
    """Calls step(inputs, S) for each sequence; returns o [B, T, HV, V] and what the steps returned."""
    B, T, H = k.shape[:3]
    HV, V, K = v.shape[2], v.shape[3], k.shape[3]
    x = _inputs(q, k, v, g, beta, A_log, dt_bias, scale, *flags)
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if state is None:
        state = x.v.new_zeros(N, HV, K, V)
    state = state.to(x.v.dtype).unflatten(1, (H, HV // H))
    outputs, results = [], []
    for n, (rows, tokens) in enumerate(_spans(B, T, cu_seqlens)):
        part = _Inputs(*(y[rows, :, :, tokens] for y in x))
        o, *rest = step(part, state if cu_seqlens is None else state[n : n + 1])
        outputs.append(o)
        results.append(rest)
    o = torch.cat(outputs, 3) if outputs else torch.zeros_like(x.v)
    return o.flatten(1, 2).transpose(1, 2).to(q.dtype), results


def _read_state(initial_state, state_indices, state_v_first):
    """The states to start from, [N, HV, K, V], out of a pool when indices are given."""
    if initial_state is None:
        return None
    state = initial_state.mT if state_v_first else initial_state
    if state_indices is None:
        return state
    rows = state[state_indices.clamp(min=0).long()]
    return rows.masked_fill((state_indices < 0).view(-1, 1, 1, 1), 0.0)


def _write_pool(pool, indices, states):
    """Writes states[n] to pool[indices[n]] in place; a negative index writes nothing."""
    keep = indices >= 0
    pool[indices[keep].long()] = states[keep].to(pool.dtype)
    return pool


def _silence_skipped(o, indices, cu_seqlens):
    """Zeros in the outputs of sequences whose state index is negative."""
    if indices is None:
        return o
    skipped = indices < 0
    if cu_seqlens is None:
        return o.masked_fill(skipped.view(-1, 1, 1, 1), 0.0)
    tokens = skipped.repeat_interleave(cu_seqlens.diff().long())
    return o.masked_fill(tokens.view(1, -1, 1, 1), 0.0)


def _stacked(states, like_empty):
    """[[B, H, R, K, V], ...] -> [N, HV, K, V]."""
    return torch.cat(states).flatten(1, 2) if states else like_empty


def gdn_recurrent_fwd(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
    cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
    output_final_state, inplace, all_states,
):  # fmt: skip
    """o [B, T, HV, V] and the final state fp32, all states [B, T, HV, K, V], the pool, or None."""
    flags = (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval)
    state = _read_state(initial_state, state_indices, state_v_first)
    o, results = _run(
        lambda x, S: _recurrent(x, S, all_states),
        q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens, scale, flags,
    )  # fmt: skip
    empty = v.new_zeros(0, v.shape[2], k.shape[3], v.shape[3], dtype=at_least_fp32(v[:0]).dtype)
    if all_states:
        final = torch.cat([S for (S,) in results], int(cu_seqlens is not None)).flatten(2, 3)
    else:
        final = _stacked([S for (S,) in results], empty)
    final = final.mT.contiguous() if state_v_first else final
    o = _silence_skipped(o, state_indices, cu_seqlens)
    if inplace:
        rows = state_indices if output_state_indices is None else output_state_indices
        if rows is None:
            return o, initial_state.copy_(final)
        return o, _write_pool(initial_state, rows, final)
    return o, final if output_final_state or all_states else None


def gdn_chunk_fwd(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens, scale,
    use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first, output_final_state,
    state_dtype, checkpoint_every,
):  # fmt: skip
    """o [B, T, HV, V]; the final state [N, HV, K, V], the pool, or None; checkpoints or None.

    Checkpoint row cu[n] // E + j (b * (T // E) + j without cu_seqlens) is the state of sequence n
    after its first (j + 1) * E tokens, E = checkpoint_every; rows that no sequence fills are zero.
    """
    flags = (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval)
    state = _read_state(initial_state, state_indices, state_v_first)
    o, results = _run(
        lambda x, S: _chunked(x, S, checkpoint_every),
        q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens, scale, flags,
    )  # fmt: skip
    wide = at_least_fp32(v[:0]).dtype
    empty = v.new_zeros(0, v.shape[2], k.shape[3], v.shape[3], dtype=wide)

    def finished(S):
        S = S.mT.contiguous() if state_v_first else S
        return S.to(state_dtype or wide)

    checkpoints = None
    if checkpoint_every:
        checkpoints = finished(_place(results, k, cu_seqlens, checkpoint_every, empty))
    o = _silence_skipped(o, state_indices, cu_seqlens)
    final = _stacked([S for S, _ in results], empty)
    if state_indices is not None:
        final = final.mT if state_v_first else final
        return o, _write_pool(initial_state, state_indices, final), checkpoints
    return o, finished(final) if output_final_state else None, checkpoints


def _place(results, k, cu_seqlens, every, empty):
    """The checkpoint rows, in the order that gdn_chunk_fwd documents."""
    B, T = k.shape[:2]
    if cu_seqlens is None:
        states = results[0][1]
        return torch.stack(states, 1).flatten(0, 1).flatten(1, 2) if states else empty
    rows = empty.new_zeros(T // every, *empty.shape[1:])
    for start, (_, states) in zip(cu_seqlens.tolist(), results):
        for j, S in enumerate(states):
            rows[start // every + j] = S[0].flatten(0, 1)
    return rows
