"""The gradient of Kimi Delta Attention in chunks of 64 tokens, written out (docs/kda.md).

With A, P and E_s of levels.py, the state S before a chunk and the gradient dS of the state after
it, W = T X as in chunk.py:

    dW = Ke dS + P^T dO            dV = T^T dW            dbeta = (X - A W) . (dW - A^T dV)
    dS <- e^(G_C) dS + Qd^T dO - Kd^T dV
    dP = lower(dO W^T)             N = -strictly_lower(dV W^T)
    q_row = e^G (dO S^T) + sum_s E_s (dP|_s (E_s K))
    k_row = -e^G (dV S^T) + sum_s E_s (N|_s (E_s K))
    k_col = e^(G_C - G) (W dS^T) + sum_s E_s (dP|_s^T (E_s Q) + N|_s^T (E_s K))
    dQ = q_row + diag(dP) K        dK = k_row + k_col + diag(dP) Q
    dG = Q q_row + K k_row - K k_col, its last row plus the sum over V of dS * S_end
    dg = dG summed from the chunk's end

where .|_s are the pairs of level s. The diagonal of dP has no share in dG.
"""

import torch
import torch.nn.functional as F

from ...gdn.reference.backward import by_chunks_bwd, passes, through_beta
from ...gdn.reference.chunk import to_chunks
from ...gdn.reference.common import Inputs
from ...runtime.dtypes import at_least_fp32
from ..call import KdaBackward
from .chunk import solved
from .gates import activated
from .levels import LEVELS, level_factors, level_mask, lost_until_end, lower_products


def _chunked(x: Inputs, do, S, dS):
    """Gradients of one sequence batch: Inputs of the gradients, and of the state it starts from."""
    T = x.v.shape[3]
    if T == 0:
        return Inputs(*(torch.zeros_like(y) for y in x)), dS
    x, do = Inputs(*(to_chunks(y) for y in x)), to_chunks(do)
    q, k, g = x.q, x.k, x.g
    A, P = lower_products(q, k, g)
    gam, k_end = g.cumsum(-2).exp(), lost_until_end(g) * k  # [B, H, R, NT, C, K]
    T_beta = solved(A, x.beta)
    S, W, X, dS, dV, dW, dS0 = passes(x, gam, k_end, T_beta, P, do, S, dS)

    q_row, k_row, k_col = gam * (do @ S.mT), -gam * (dV @ S.mT), lost_until_end(g) * (W @ dS.mT)
    dP, N = do @ W.mT, -(dV @ W.mT)
    for s in LEVELS:
        E, mask = level_factors(g, s), level_mask(s, g.device)
        dP_s, N_s = torch.where(mask, dP, 0.0), torch.where(mask, N, 0.0)
        q_row = q_row + E * (dP_s @ (E * k))
        k_row = k_row + E * (N_s @ (E * k))
        k_col = k_col + E * (dP_s.mT @ (E * q) + N_s.mT @ (E * k))
    dG = q * q_row + k * (k_row - k_col)
    end = gam[..., -1, :, None] * S + k_end.mT @ W  # what decays with the last gate
    dG[..., -1, :] += (dS * end).sum(-1)
    dg = dG.flip(-2).cumsum(-2).flip(-2)
    own = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dq = (q_row + own * k).sum(2, keepdim=True)
    dk = (k_row + k_col + own * q).sum(2, keepdim=True)
    dbeta = ((dW - A.mT @ dV) * (X - A @ W)).sum(-1)
    grads = (dq, dk, dV, dg, dbeta)
    return Inputs(*(y.flatten(3, 4)[:, :, :, :T] for y in grads)), dS0


def _through_gates(dg, dbeta, call):
    """Gradients of the raw g and beta, of A_log and of dt_bias."""
    dA_log = ddt_bias = None
    lower = call.options.lower_bound
    if call.A_log is not None or lower is not None:
        a, dt_bias, A_log = at_least_fp32(call.g), call.dt_bias, call.A_log
        a = a if dt_bias is None else a + at_least_fp32(dt_bias).view(a.shape[-2:])
        rate = 1.0 if A_log is None else at_least_fp32(A_log).exp().unsqueeze(-1)
        if lower is None:
            by_rate, by_a = -rate * F.softplus(a), -rate * a.sigmoid()
        else:
            s = torch.sigmoid(rate * a)
            by_a = lower * rate * s * (1 - s)
            by_rate = by_a * a
        if A_log is not None:
            dA_log = (dg * by_rate).sum((0, 1, 3)).to(A_log.dtype)
        dg = dg * by_a
        if dt_bias is not None:
            ddt_bias = dg.sum((0, 1)).reshape(dt_bias.shape).to(dt_bias.dtype)
    return dg.to(call.g.dtype), through_beta(dbeta, call), dA_log, ddt_bias


def kda_chunk_bwd(call: KdaBackward):
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state; None for what was not given."""
    return by_chunks_bwd(call, _chunked, _through_gates, activated)
