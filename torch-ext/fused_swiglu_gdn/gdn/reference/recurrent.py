"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), token by token: the definition.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Sizes as in common.py.
"""

import torch

from ...runtime.dtypes import at_least_fp32
from ...runtime.ops import transformed
from ..call import RecurrentCall
from .common import Inputs, negative, no_tokens, run, stacked, without_autocast, write_pool


def step_in_place(q, k, v, decay, beta, S):
    """One token of N independent heads without gradients: o [N, 1, V]; S [N, K, V] is updated.

    q, k [N, 1, K]; v [N, 1, V]; beta [N, 1, 1]; decay [N, 1, 1], or [N, K, 1] for one a channel.
    The four passes over S are the whole cost of a token on a CPU.
    """
    S.mul_(decay)
    delta = torch.bmm(k, S).neg_().add_(v).mul_(beta)  # [N, 1, V]
    S.baddbmm_(k.mT, delta)
    return torch.bmm(q, S)


def _decays(x: Inputs):
    """[B, H, R, T, 1 or K, 1]."""
    decay = x.g.exp().unsqueeze(-1)
    return decay.unsqueeze(-1) if x.g.ndim == x.beta.ndim else decay


def _by_steps_in_place(x: Inputs, S: torch.Tensor):
    """_recurrent without gradients on a CPU; S is overwritten if it is contiguous."""
    (B, H, R, T, V), K = x.v.shape, x.k.shape[-1]
    N = B * H * R
    q, k = (y.expand(-1, -1, R, -1, -1).reshape(N, T, K) for y in (x.q, x.k))
    v, beta = x.v.reshape(N, T, V), x.beta.reshape(N, T, 1)
    decay = _decays(x).flatten(0, 2)  # [N, T, 1 or K, 1]
    heads = S.contiguous().view(N, K, V)
    o = torch.empty_like(v)
    for t in range(T):
        now = slice(t, t + 1)
        o[:, now] = step_in_place(q[:, now], k[:, now], v[:, now], decay[:, t], beta[:, now], heads)
    return o.view(B, H, R, T, V), heads.view(B, H, R, K, V)


def _recurrent(x: Inputs, S: torch.Tensor, all_states: bool, overwrite: bool):
    """S [B, H, R, K, V] -> o [B, H, R, T, V], and S or every S [B, T, H, R, K, V]."""
    if S.device.type == "cpu" and not all_states and not torch.is_grad_enabled():
        # torch.func.vmap has no way to write a state of all samples in place
        if torch.compiler.is_compiling() or not transformed():
            return _by_steps_in_place(x, S if overwrite else S.clone())
    decay = _decays(x)
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
def gdn_recurrent_fwd(call: RecurrentCall):
    """o [B, T, HV, V] and the final state fp32, all states [B, T, HV, K, V], the pool, or None."""
    call = call._replace(
        state_indices=negative(call.state_indices, call.options.null_index),
        output_state_indices=negative(call.output_state_indices, call.options.null_index),
    )
    o, state = (_by_call if call.num_accepted_tokens is None else _by_drafts)(call)
    return o if call.out is None else call.out.copy_(o), state


def _by_drafts(call: RecurrentCall):
    """_by_call for sequences with a row of the pool for the state after each token."""
    rows, T = call.state_indices, call.T  # [N, 1 + S]
    N, columns = rows.shape
    last = (call.num_accepted_tokens.long() - 1).clamp(0, columns - 1)
    start = rows.gather(1, last.unsqueeze(1)).squeeze(1)  # [N]
    options = call.options._replace(inplace=False, all_states=True)
    o, states = _by_call(
        call._replace(state_indices=start, num_accepted_tokens=None, options=options)
    )
    n = torch.arange(N, device=rows.device)
    if call.cu_seqlens is None:
        n, t = n.repeat_interleave(T), torch.arange(T, device=rows.device).repeat(N)
    else:
        n = n.repeat_interleave(call.cu_seqlens.diff().long())
        t = torch.arange(T, device=rows.device) - call.cu_seqlens[n]
    own = rows[n, t.clamp(max=columns - 1)].masked_fill((start[n] < 0) | (t >= columns), -1)
    return o, write_pool(call.initial_state, own, states.flatten(0, 1))


def _by_call(call: RecurrentCall):
    """o and states; only negative indices are null slots."""
    options, all_states = call.options, call.options.all_states
    overwrite = options.inplace or call.initial_state is None or call.state_indices is not None
    o, results = run(lambda x, S: _recurrent(x, S, all_states, overwrite), call)
    wide = at_least_fp32(call.v[:0]).dtype
    empty = call.v.new_zeros(0, call.HV, call.K, call.V, dtype=wide)
    if all_states:
        final = torch.cat([S for (S,) in results], int(call.cu_seqlens is not None)).flatten(2, 3)
    else:
        final = stacked([S for (S,) in results], empty)
    final = final.mT.contiguous() if options.state_v_first else final
    if options.inplace:
        initial = call.initial_state
        if call.state_indices is None:
            if torch.compiler.is_compiling() or final.data_ptr() != initial.data_ptr():
                initial.copy_(final)
            return o, initial
        rows = call.output_state_indices
        rows = call.state_indices if rows is None else rows
        rows = rows.masked_fill(call.state_indices < 0, -1)
        return o, write_pool(initial, rows, final)
    return o, final.to(wide) if options.output_final_state or all_states else None
