"""The gated delta rule in chunks of 64 tokens (docs/gdn.md); the fast form on a CPU.

With G = cumsum(g) inside a chunk, gam = exp(G), Gam_ij = exp(G_i - G_j) for i >= j, and the state S
at the start of the chunk:

    T = (I + strictly_lower(beta Gam K K^T))^-1 diag(beta)      P = lower(Gam Q K^T)
    new = T (V - gam K S)       O = gam Q S + P new       S <- gam_C S + (gam_C / gam K)^T new

Sizes as in common.py, and C = 64 tokens a chunk.
"""

from typing import Callable

import torch
import torch.nn.functional as F

from ...runtime.dtypes import at_least_fp32
from ..call import GdnCall
from ..chunks import CHUNK
from .common import (
    Inputs,
    no_tokens,
    of_sequences,
    padded,
    run,
    stacked,
    without_autocast,
    write_pool,
)


def to_chunks(x: torch.Tensor) -> torch.Tensor:
    """Pads the tokens of x [B, H, R, T, ..] with zeros and splits them into [NT, C]."""
    pad = -x.shape[3] % CHUNK
    if pad:
        x = F.pad(x, [0, 0] * (x.ndim - 4) + [0, pad])
    return x.unflatten(3, (-1, CHUNK))


def decays(g: torch.Tensor) -> torch.Tensor:
    """Gam [.., C, C] of gates g [.., C].

    Each G_i - G_j is a sum of its own: a difference would be NaN where a gate is -inf, and have the
    rounding errors of all that came before where one is large.
    """
    between = g.unsqueeze(-1).expand(*g.shape, g.shape[-1]).tril(-1).cumsum(-2)
    return between.exp().tril()


def _chunked(x: Inputs, S: torch.Tensor, checkpoint_every: int):
    """The chunk form. S [B, H, R, K, V] -> o [B, H, R, T, V], S and the checkpointed states."""
    T = x.v.shape[3]
    if T == 0:
        return no_tokens(x, S), S, []
    q, k, v, g, beta = (to_chunks(y) for y in x)  # padding: beta = 0 and g = 0 change nothing
    decay = decays(g)  # [B, H, R, NT, C, C]
    P = (q @ k.mT) * decay  # [B, H, R, NT, C, C]
    A = beta.unsqueeze(-1) * (k @ k.mT) * decay  # unit diagonal is understood by the solve below
    # T = (I + strictly_lower(A))^-1 diag(beta)
    T_beta = torch.linalg.solve_triangular(
        A, torch.diag_embed(beta), upper=False, unitriangular=True
    )
    gam = g.cumsum(-1).exp().unsqueeze(-1)  # [B, H, R, NT, C, 1]
    k_end = k * decay[..., -1, :, None]  # [B, H, R, NT, C, K]
    qk = torch.cat([q, k], -2)  # [B, H, 1, NT, 2C, K]
    o, checkpoints = [], []
    for c in range(g.shape[3]):
        read = qk[:, :, :, c] @ S  # [B, H, R, 2C, V]
        gam_c = gam[:, :, :, c]
        new = T_beta[:, :, :, c] @ (v[:, :, :, c] - gam_c * read[..., CHUNK:, :])  # [B, H, R, C, V]
        o.append(gam_c * read[..., :CHUNK, :] + P[:, :, :, c] @ new)
        S = gam_c[..., -1:, :] * S + k_end[:, :, :, c].mT @ new
        end = (c + 1) * CHUNK
        if checkpoint_every and end % checkpoint_every == 0 and end <= T:
            checkpoints.append(S)
    return torch.cat(o, 3)[..., :T, :], S, checkpoints


def gdn_chunk_fwd(call: GdnCall):
    """by_chunks of this rule."""
    return by_chunks(call, _chunked)


@without_autocast
def by_chunks(call, chunked: Callable, activated: Callable = lambda call: call):
    """o [B, T, HV, V]; the final state [N, HV, K, V], the pool, or None; checkpoints or None; None.

    activated(call): the call with log decays for gates.

    Checkpoint row cu[n] // E + j (b * (T // E) + j without cu_seqlens) is the state of sequence n
    after its first (j + 1) * E tokens, E = checkpoint_every; rows that no sequence fills are zero.
    """
    options, T = call.options, call.T
    call = activated(of_sequences(call))
    every, v_first = options.checkpoint_every, options.state_v_first
    o, results = run(lambda x, S: chunked(x, S, every), call)
    o = padded(o, T)
    wide = at_least_fp32(call.v[:0]).dtype
    empty = call.v.new_zeros(0, call.HV, call.K, call.V, dtype=wide)

    def finished(S):
        S = S.mT.contiguous() if v_first else S
        return S.to(options.state_dtype or wide)

    checkpoints = None
    if every:
        checkpoints = finished(_place(results, call, empty, T))
    final = stacked([S for S, _ in results], empty)
    if call.state_indices is not None:
        final = final.mT if v_first else final
        return o, write_pool(call.initial_state, call.state_indices, final), checkpoints, None
    return o, finished(final) if options.output_final_state else None, checkpoints, None


def _place(results, call, empty, T: int):
    """The checkpoint rows, in the order that by_chunks documents."""
    every = call.options.checkpoint_every
    if call.cu_seqlens is None:
        states = results[0][1]
        return torch.stack(states, 1).flatten(0, 1).flatten(1, 2) if states else empty
    rows = empty.new_zeros(T // every, *empty.shape[1:])
    for start, (_, states) in zip(call.cu_seqlens.tolist(), results):
        for j, S in enumerate(states):
            rows[start // every + j] = S[0].flatten(0, 1)
    return rows
