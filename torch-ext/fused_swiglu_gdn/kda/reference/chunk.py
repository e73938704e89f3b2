"""Kimi Delta Attention in chunks of 64 tokens (docs/kda.md): what a CPU should run.

With G = cumsum(g) inside a chunk and the state S at its start, A and P as in levels.py:

    T = (I + diag(beta) A)^-1 diag(beta)        X = V - (e^G K) S        new = T X
    O = (e^G Q) S + P new                       S <- e^(G_C) S + (e^(G_C - G) K)^T new

Sizes as in gdn/reference/common.py, and C = 64 tokens a chunk.
"""

import torch

from ...gdn.chunks import CHUNK
from ...gdn.reference.chunk import by_chunks, to_chunks
from ...gdn.reference.common import Inputs, no_tokens
from ..call import KdaCall
from .gates import activated
from .levels import lost_until_end, lower_products


def solved(A: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """(I + diag(beta) A)^-1 diag(beta), [..., C, C], of A strictly below the diagonal."""
    return torch.linalg.solve_triangular(
        beta.unsqueeze(-1) * A, torch.diag_embed(beta), upper=False, unitriangular=True
    )


def _chunked(x: Inputs, S: torch.Tensor, checkpoint_every: int):
    """The chunk form. S [B, H, R, K, V] -> o [B, H, R, T, V], S and the checkpointed states."""
    T = x.v.shape[3]
    if T == 0:
        return no_tokens(x, S), S, []
    q, k, v, g, beta = (to_chunks(y) for y in x)  # padding: beta = 0 and g = 0 change nothing
    A, P = lower_products(q, k, g)
    T_beta = solved(A, beta)  # [B, H, R, NT, C, C]
    gam = g.cumsum(-2).exp()  # [B, H, R, NT, C, K]
    q_start, k_start, k_end = gam * q, gam * k, lost_until_end(g) * k
    o, checkpoints = [], []
    for c in range(v.shape[3]):
        new = T_beta[:, :, :, c] @ (v[:, :, :, c] - k_start[:, :, :, c] @ S)  # [B, H, R, C, V]
        o.append(q_start[:, :, :, c] @ S + P[:, :, :, c] @ new)
        S = gam[:, :, :, c, -1, :, None] * S + k_end[:, :, :, c].mT @ new
        end = (c + 1) * CHUNK
        if checkpoint_every and end % checkpoint_every == 0 and end <= T:
            checkpoints.append(S)
    return torch.cat(o, 3)[..., :T, :], S, checkpoints


def kda_chunk_fwd(call: KdaCall):
    """o [B, T, HV, V]; the final state [N, HV, K, V], the pool, or None; checkpoints or None; None.

    Checkpoints as gdn/reference/chunk.py has them.
    """
    return by_chunks(call, _chunked, activated)
