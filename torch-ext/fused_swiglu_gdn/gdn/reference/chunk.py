"""The gated delta rule in chunks of 64 tokens (docs/gdn.md): what a CPU should run.

With G = cumsum(g) inside a chunk, gam = exp(G), Gam_ij = exp(G_i - G_j) for i >= j, and the state S
at the start of the chunk:

    T = (I + strictly_lower(beta Gam K K^T))^-1 diag(beta)      P = lower(Gam Q K^T)
    new = T (V - gam K S)       O = gam Q S + P new       S <- gam_C S + (gam_C / gam K)^T new

Sizes as in common.py, and C = 64 tokens a chunk.
"""

import torch
import torch.nn.functional as F

from ...runtime.dtypes import at_least_fp32
from ..chunks import CHUNK
from .common import (
    Inputs,
    no_tokens,
    read_state,
    run,
    silence_skipped,
    stacked,
    without_autocast,
    write_pool,
)


def to_chunks(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Pads the token dimension with zeros and splits it into [NT, C]."""
    pad = -x.shape[dim] % CHUNK
    if pad:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, pad])
    return x.unflatten(dim, (-1, CHUNK))


def _chunked(x: Inputs, S: torch.Tensor, checkpoint_every: int):
    """The chunk form. S [B, H, R, K, V] -> o [B, H, R, T, V], S and the checkpointed states."""
    T = x.v.shape[3]
    if T == 0:
        return no_tokens(x, S), S, []
    q, k, v, g, beta = (to_chunks(y, 3) for y in x)  # padding: beta = 0 and g = 0 change nothing
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


@without_autocast
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
    state = read_state(initial_state, state_indices, state_v_first)
    o, results = run(
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
    o = silence_skipped(o, state_indices, cu_seqlens)
    final = stacked([S for S, _ in results], empty)
    if state_indices is not None:
        final = final.mT if state_v_first else final
        return o, write_pool(initial_state, state_indices, final), checkpoints
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
