"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), token by token: the definition.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Sizes as in common.py.
"""

import torch

from ...runtime.dtypes import at_least_fp32
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


def step_in_place(q, k, v, decay, beta, S):
    """One token of N independent heads without gradients: o [N, 1, V], and S [N, K, V] is updated.

    q, k [N, 1, K]; v [N, 1, V]; decay, beta [N, 1, 1]. S is passed over four times, which is all
    that a token costs on a CPU.
    """
    S.mul_(decay)
    delta = torch.bmm(k, S).neg_().add_(v).mul_(beta)  # [N, 1, V]
    S.baddbmm_(k.mT, delta)
    return torch.bmm(q, S)


def _by_steps_in_place(x: Inputs, S: torch.Tensor):
    """_recurrent without gradients on a CPU; S is overwritten if it is dense."""
    (B, H, R, T, V), K = x.v.shape, x.k.shape[-1]
    N = B * H * R
    q, k = (y.expand(-1, -1, R, -1, -1).reshape(N, T, K) for y in (x.q, x.k))
    v, decay, beta = (y.reshape(N, T, n) for y, n in ((x.v, V), (x.g.exp(), 1), (x.beta, 1)))
    heads = S.contiguous().view(N, K, V)
    o = torch.empty_like(v)
    for t in range(T):
        now = slice(t, t + 1)
        o[:, now] = step_in_place(
            q[:, now], k[:, now], v[:, now], decay[:, now], beta[:, now], heads
        )
    return o.view(B, H, R, T, V), heads.view(B, H, R, K, V)


def _recurrent(x: Inputs, S: torch.Tensor, all_states: bool, overwrite: bool):
    """S [B, H, R, K, V] -> o [B, H, R, T, V], and S or every S [B, T, H, R, K, V]."""
    if S.device.type == "cpu" and not all_states and not torch.is_grad_enabled():
        return _by_steps_in_place(x, S if overwrite else S.clone())
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
    o = torch.stack(o, 3) if o else no_tokens(x, S)
    if not all_states:
        return o, S
    return o, torch.stack(states, 1) if states else S.unsqueeze(1)[:, :0]


@without_autocast
def gdn_recurrent_fwd(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
    cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
    output_final_state, inplace, all_states,
):  # fmt: skip
    """o [B, T, HV, V] and the final state fp32, all states [B, T, HV, K, V], the pool, or None."""
    flags = (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval)
    state = read_state(initial_state, state_indices, state_v_first)
    overwrite = inplace or state is None or state_indices is not None
    o, results = run(
        lambda x, S: _recurrent(x, S, all_states, overwrite),
        q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens, scale, flags,
    )  # fmt: skip
    empty = v.new_zeros(0, v.shape[2], k.shape[3], v.shape[3], dtype=at_least_fp32(v[:0]).dtype)
    if all_states:
        final = torch.cat([S for (S,) in results], int(cu_seqlens is not None)).flatten(2, 3)
    else:
        final = stacked([S for (S,) in results], empty)
    final = final.mT.contiguous() if state_v_first else final
    o = silence_skipped(o, state_indices, cu_seqlens)
    if inplace:
        if state_indices is None:
            if torch.compiler.is_compiling() or final.data_ptr() != initial_state.data_ptr():
                initial_state.copy_(final)
            return o, initial_state
        rows = state_indices if output_state_indices is None else output_state_indices
        rows = rows.masked_fill(state_indices < 0, -1)
        return o, write_pool(initial_state, rows, final)
    return o, final if output_final_state or all_states else None
