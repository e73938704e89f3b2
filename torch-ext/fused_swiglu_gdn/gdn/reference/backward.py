"""The gradient of the gated delta rule in chunks of 64 tokens, written out (docs/gdn_backward.md).

It equals automatic differentiation of chunk.py, in the form that the kernels compute. With the
state S before a chunk, the gradient dS of the state after it, and `new` of chunk.py as W:

    dW = gam_C / gam (K dS) + P^T dO                 dV = T^T dW
    dS <- gam_C dS + (gam Q)^T dO - (gam K)^T dV     dbeta = (X - strict(Gam K K^T) W) .
    dP = lower(Gam dO W^T)                                   (dW - strict(Gam K K^T)^T dV)
    N = -strictly_lower(Gam dV W^T)
    dQ = gam dO S^T + dP K      dK = -gam dV S^T + gam_C / gam W dS^T + (N + N^T) K + dP^T Q

Sizes as in common.py, and C = 64 tokens a chunk.
"""

from typing import Callable

import torch

from ...runtime.dtypes import at_least_fp32
from ..call import GdnBackward
from .chunk import decays, to_chunks
from .common import Inputs, of_sequences, padded, prepare_inputs, spans


def passes(x, gam, k_end, T_beta, P, do, S, dS):
    """S before and dS after each chunk, and W, dV, X, dW of each chunk; then dS before the first.

    The forward pass over the chunks and the backward pass are independent. gam is
    [B, H, R, NT, C, 1], or has a factor for each channel of the keys.
    """
    forward, backward = [], []
    chunks = x.g.shape[3]
    q, k = gam * x.q, gam * x.k  # [B, H, R, NT, C, K]
    for c in range(chunks):
        X = x.v[:, :, :, c] - k[:, :, :, c] @ S  # [B, H, R, C, V]
        W = T_beta[:, :, :, c] @ X
        forward.append((S, W, X))
        S = gam[:, :, :, c, -1, :, None] * S + k_end[:, :, :, c].mT @ W
    for c in reversed(range(chunks)):
        dW = k_end[:, :, :, c] @ dS + P[:, :, :, c].mT @ do[:, :, :, c]
        dV = T_beta[:, :, :, c].mT @ dW
        backward.append((dS, dV, dW))
        dS = gam[:, :, :, c, -1, :, None] * dS + q[:, :, :, c].mT @ do[:, :, :, c]
        dS = dS - k[:, :, :, c].mT @ dV
    stacks = [torch.stack(s, 3) for s in (*zip(*forward), *zip(*backward[::-1]))]
    return (*stacks, dS)


def _chunked(x: Inputs, do, S, dS):
    """Gradients of one batch of sequences: those of its Inputs, and of its initial state."""
    T = x.v.shape[3]
    if T == 0:
        return Inputs(*(torch.zeros_like(y) for y in x)), dS
    x, do = Inputs(*(to_chunks(y) for y in x)), to_chunks(do)
    decay = decays(x.g)  # [B, H, R, NT, C, C]
    qk, kk = x.q @ x.k.mT * decay, x.k @ x.k.mT * decay  # [B, H, R, NT, C, C]
    T_beta = torch.linalg.solve_triangular(
        x.beta.unsqueeze(-1) * kk, torch.diag_embed(x.beta), upper=False, unitriangular=True
    )
    kk = kk.tril(-1)
    gam, gam_end = x.g.cumsum(-1).exp().unsqueeze(-1), decay[..., -1, :, None]
    S, W, X, dS, dV, dW, dS0 = passes(x, gam, gam_end * x.k, T_beta, qk, do, S, dS)

    dP = do @ W.mT * decay  # [B, H, R, NT, C, C]
    N = -(dV @ W.mT * decay).tril(-1)
    by_q = gam * (do @ S.mT)  # [B, H, R, NT, C, K]
    by_row = -gam * (dV @ S.mT)
    by_col = gam_end * (W @ dS.mT)
    dP_all, N_all = dP.sum(2, keepdim=True), N.sum(2, keepdim=True)
    dq = by_q.sum(2, keepdim=True) + dP_all @ x.k
    dk = (by_row + by_col).sum(2, keepdim=True) + (N_all + N_all.mT) @ x.k + dP_all.mT @ x.q

    # dg_u: whatever crosses from before token u to u or later, which is where exp(g_u) stands
    pairs = (dP * (x.q @ x.k.mT)).tril(-1) + N * (x.k @ x.k.mT)
    row = (by_q * x.q + by_row * x.k).sum(-1) + pairs.sum(-1) - pairs.sum(-2)
    col = (by_col * x.k).sum(-1)
    dg = row.flip(-1).cumsum(-1).flip(-1)
    dg[..., 1:] += col[..., :-1].cumsum(-1)
    dg = dg + gam[..., -1, :] * (S * dS).sum((-2, -1)).unsqueeze(-1)
    dbeta = ((dW - kk.mT @ dV) * (X - kk @ W)).sum(-1)
    grads = (dq, dk, dV, dg, dbeta)
    return Inputs(*(y.flatten(3, 4)[:, :, :, :T] for y in grads)), dS0


def _through_norm(dx, x):
    """The gradient of x from that of l2norm(x)."""
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return r * dx - x * r.pow(3) * (x * dx).sum(-1, keepdim=True)


def through_beta(dbeta, call):
    """The gradient of beta, which may be raw."""
    if call.options.use_beta_sigmoid:
        s = at_least_fp32(call.beta).sigmoid()
        dbeta = dbeta * s * (1 - s) * call.options.beta_max
    return dbeta.to(call.beta.dtype)


def _through_gates(dg, dbeta, call):
    """Gradients of the raw g and beta, of A_log and of dt_bias."""
    dA_log = ddt_bias = None
    if call.A_log is not None:
        a, dt_bias = at_least_fp32(call.g), call.dt_bias
        a = a if dt_bias is None else a + at_least_fp32(dt_bias)
        slope = -at_least_fp32(call.A_log).exp()  # of g by softplus(a)
        dA_log = (dg * slope * torch.nn.functional.softplus(a)).sum((0, 1)).to(call.A_log.dtype)
        dg = dg * slope * a.sigmoid()
        ddt_bias = None if dt_bias is None else dg.sum((0, 1)).to(dt_bias.dtype)
    return dg.to(call.g.dtype), through_beta(dbeta, call), dA_log, ddt_bias


def _by_sequence(chunked, x: Inputs, do, S, dS, call):
    """chunked(...) for each sequence.

    Returns gradients like q, k, v, g, beta, in fp32 or fp64, and those of the initial states.
    """
    parts, starts = [], []
    for n, (rows, tokens) in enumerate(spans(call.B, call.T, call.cu_seqlens)):
        own = slice(None) if call.cu_seqlens is None else slice(n, n + 1)
        part = Inputs(*(y[rows, :, :, tokens] for y in x))
        grads, start = chunked(part, do[rows, :, :, tokens], S[own], dS[own])
        parts.append(grads)
        starts.append(start)
    if parts:
        grads = [torch.cat(y, 3).flatten(1, 2).transpose(1, 2) for y in zip(*parts)]
    else:
        inputs = (call.q, call.k, call.v, call.g, call.beta)
        grads = [torch.zeros_like(y, dtype=x.v.dtype) for y in inputs]
    return grads, starts


def gdn_chunk_bwd(call: GdnBackward):
    """by_chunks_bwd of this rule.

    The blocks that the forward saved spare kernels some work; here they are unused.
    """
    return by_chunks_bwd(call, _chunked, _through_gates)


def by_chunks_bwd(
    call, chunked: Callable, through_gates: Callable, activated: Callable = lambda call: call
):
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state; None if not given. With values_only
    dv and d_initial_state alone.

    activated: as for by_chunks.
    """
    T, call = call.T, of_sequences(call)
    x = prepare_inputs(activated(call))
    v_first = call.options.state_v_first
    group = (call.H, call.HV // call.H)

    def state(given):
        """[N, H, R, K, V]; zeros if None is given."""
        if given is None:
            return x.v.new_zeros(call.N, *group, call.K, call.V)
        given = given.mT if v_first else given
        return given.to(x.v.dtype).unflatten(1, group)

    S, dS = state(call.initial_state), state(call.d_final_state)
    do = at_least_fp32(call.do).to(x.v.dtype).transpose(1, 2).unflatten(1, group)
    (dq, dk, dv, dg, dbeta), starts = _by_sequence(chunked, x, do, S, dS, call)
    d_initial, initial = None, call.initial_state
    if initial is not None:
        d_initial = torch.cat(starts).flatten(1, 2) if starts else torch.zeros_like(initial)
        d_initial = d_initial.mT if v_first and starts else d_initial
        d_initial = d_initial.to(initial.dtype)
    if call.options.values_only:
        return None, None, padded(dv.to(call.v.dtype), T), *[None] * 4, d_initial
    dq = dq * call.options.scale
    if call.options.use_qk_l2norm:
        dq = _through_norm(dq, at_least_fp32(call.q))
        dk = _through_norm(dk, at_least_fp32(call.k))
    dg, dbeta, *to_gates = through_gates(dg, dbeta, call)
    tokens = (*[y.to(call.q.dtype) for y in (dq, dk, dv)], dg, dbeta)
    return (*[padded(y, T) for y in tokens], *to_gates, d_initial)
