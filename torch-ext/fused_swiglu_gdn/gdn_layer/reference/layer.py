"""The parts of a model's layer around the gated delta rule, in plain torch.

Sizes: B batch, D channels, T tokens, W taps of the convolution, N packed sequences.
"""

from typing import Optional

import torch
import torch.nn.functional as F

from ...gdn.chunks import count_sequences
from ...runtime.dtypes import at_least_fp32, in_one_dtype


def sequence_of_token(T: int, seq_idx, cu_seqlens) -> Optional[torch.Tensor]:
    """The sequence of each token, [B or 1, T], or None if a row is one sequence."""
    if seq_idx is not None:
        return seq_idx
    if cu_seqlens is None:
        return None
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).unsqueeze(0)


def places(B: int, T: int, seq_idx, cu_seqlens, device):
    """(row of the initial state, position in the sequence) of each token, [B, T] each."""
    token = torch.arange(T, device=device)
    row = torch.arange(B, device=device).unsqueeze(1).expand(B, T)
    sequence = sequence_of_token(T, seq_idx, cu_seqlens)
    if sequence is None:
        return row, token.expand(B, T)
    first = torch.ones_like(sequence, dtype=torch.bool)
    first[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    position = token - torch.where(first, token, 0).cummax(-1).values
    return (row if cu_seqlens is None else sequence.long()), position


def reads(x, history, n, position):
    """Yields the inputs of each tap: the token `back` before, or a column of the initial state.

    x: [B, D, T]; history: [N, D, W - 1]; n, position: [B, T] from `places`. Yields (back, inside
    [B, 1, T]: True for a token, column [B, T], input [B, D, T]).
    """
    W, token = history.shape[-1] + 1, torch.arange(x.shape[-1], device=x.device)
    for back in range(W):
        inside = (position >= back).unsqueeze(1)
        column = (W - 1 + position - back).clamp(0, W - 2)
        before = history[n, :, column].mT
        yield back, inside, column, torch.where(inside, x[..., (token - back).clamp(min=0)], before)


def causal_conv1d_fwd(
    x: torch.Tensor,  # [B, D, T]
    weight: torch.Tensor,  # [D, W]
    bias: Optional[torch.Tensor],  # [D]
    seq_idx: Optional[torch.Tensor],  # [B, T]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    initial_states: Optional[torch.Tensor],  # [B or N, D, W - 1]
    activation: Optional[str],
    return_final_states: bool,
):
    """y_t = act(bias + sum_w weight[w] x[t - W + 1 + w]) within each sequence; y [B, D, T].

    Also the last W - 1 inputs of each sequence, [B or N, D, W - 1], or None.
    """
    W = weight.shape[-1]
    wide, taps = at_least_fp32(x), at_least_fp32(weight)
    history = initial_states
    if history is None:
        N = count_sequences(x.shape[0], cu_seqlens)
        history = wide.new_zeros(N, x.shape[1], W - 1)
    history = at_least_fp32(history)
    if x.numel() == 0:
        y = wide + sum(t.sum() for t in (taps, history, bias) if t is not None)  # empty
    elif seq_idx is None and cu_seqlens is None:
        y = _sum_of_taps(wide, taps, None if initial_states is None else history)
    elif seq_idx is not None:
        y = _conv_by_seq_idx(wide, taps, seq_idx)
    else:
        found = reads(wide, history, *places(1, x.shape[-1], None, cu_seqlens, x.device))
        y = sum(seen * taps[:, W - 1 - back, None] for back, *_, seen in found)
    if bias is not None:
        y = y + at_least_fp32(bias).unsqueeze(-1)
    if activation is not None:
        y = F.silu(y)
    final = _final_inputs(wide, history, cu_seqlens) if return_final_states else None
    return y.to(x.dtype), None if final is None else final.to(x.dtype)


def _sum_of_taps(x, weight, history):
    """The convolution of [B, D, T] after `history` [B, D, W - 1] or zeros, tap by tap.

    On a CPU this is four times as fast as the depthwise F.conv1d, which needs another layout.
    """
    W, T = weight.shape[-1], x.shape[-1]
    y = x * weight[:, -1:]
    for back in range(1, W):
        tap = weight[:, W - 1 - back, None]
        if T > back:
            y[..., back:].addcmul_(x[..., :-back], tap)
        if history is not None:
            start, n = W - 1 - back, min(back, T)
            y[..., :n].addcmul_(history[..., start : start + n], tap)
    return y


def _conv_by_seq_idx(x, weight, seq_idx):
    """The convolution for seq_idx, without inputs of other sequences; sequences start from
    zeros."""
    W, T = weight.shape[-1], x.shape[-1]
    y = x * weight[:, -1:]
    for back in range(1, min(W, T)):
        same = (seq_idx[:, back:] == seq_idx[:, :-back]).unsqueeze(1)
        term = torch.where(same, x[..., :-back], 0.0) * weight[:, W - 1 - back, None]
        y = y + F.pad(term, (back, 0))
    return y


def _final_inputs(x, history, cu_seqlens):
    """The last inputs of each sequence, shaped as history [N, D, W - 1]."""
    if cu_seqlens is None:
        return torch.cat([history, x], -1)[..., x.shape[-1] :]
    cu = cu_seqlens.tolist()
    parts = [
        torch.cat([history[n], x[0, :, a:b]], -1)[:, b - a :]
        for n, (a, b) in enumerate(zip(cu, cu[1:]))
    ]
    return torch.stack(parts) if parts else history


def causal_conv1d_update(
    x: torch.Tensor,  # [B, D, T]
    conv_state: torch.Tensor,  # [N or P, D, S], S >= W - 1, the last inputs; updated in place
    weight: torch.Tensor,  # [D, W]
    bias: Optional[torch.Tensor],  # [D]
    indices: Optional[torch.Tensor],  # [N] rows of conv_state
    accepted: Optional[torch.Tensor],  # [N] tokens of the call before that count, from 1
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    activation: Optional[str],
    null_index: int,  # rows of conv_state up to this one are null slots
) -> torch.Tensor:
    """One or a few tokens of the convolution, with the state of the tokens before; y [B, D, T]."""
    rest = (weight, bias, activation)
    if indices is None and accepted is None and cu_seqlens is None:
        y = _next_tokens(x, conv_state, *rest)
    else:
        if indices is None:
            indices = torch.arange(conv_state.shape[0], device=x.device)
            null_index = -1
        cu = None if cu_seqlens is None else cu_seqlens.tolist()
        if cu is None:
            y = _by_slots(x, conv_state, *rest, indices, accepted, null_index)
        else:
            y = torch.zeros_like(x)
            for n, (a, b) in enumerate(zip(cu, cu[1:])):
                own = slice(n, n + 1)
                counts = None if accepted is None else accepted[own]
                tokens = x[..., a:b]
                if b > a:
                    y[..., a:b] = _by_slots(
                        tokens, conv_state, *rest, indices[own], counts, null_index
                    )
    return y


def _by_slots(x, conv_state, weight, bias, activation, indices, accepted, null_index):
    """The next tokens of sequences whose states are rows of conv_state."""
    W, T, S = weight.shape[-1], x.shape[-1], conv_state.shape[-1]
    alive, rows = indices > null_index, indices.clamp(min=0).long()
    held = conv_state[rows]  # [N, D, S]
    first = torch.full_like(rows, S - W + 1)
    if accepted is not None:
        first = accepted.long().clamp(1, S - W + 2) - 1
    columns = first.unsqueeze(1) + torch.arange(W - 1, device=x.device)  # [N, W - 1]
    before = held.gather(2, columns.unsqueeze(1).expand(-1, held.shape[1], -1))
    y, _ = causal_conv1d_fwd(x, weight, bias, None, None, before, activation, False)
    if accepted is None:
        moved = torch.cat([held, x], -1)[..., T:]
    else:
        moved = torch.cat([before[..., 1:], x, held[..., W - 2 + T :]], -1)[..., :S]
    conv_state[rows[alive]] = moved[alive].to(conv_state.dtype)
    return y.masked_fill(~alive.view(-1, 1, 1), 0.0)


def _next_tokens(x, conv_state, weight, bias, activation):
    """The next tokens of all rows of conv_state."""
    W, T = weight.shape[-1], x.shape[-1]
    seen = torch.cat([conv_state, x], -1)  # [B, D, S + T], the wider dtype of the two
    if T == 1:
        y = torch.linalg.vecdot(*in_one_dtype(seen[..., -W:], weight)).unsqueeze(-1)
        y = y if bias is None else y + at_least_fp32(bias).unsqueeze(-1)
        y = (y if activation is None else F.silu(y)).to(x.dtype)
    else:
        before = conv_state[..., conv_state.shape[-1] - W + 1 :]
        y, _ = causal_conv1d_fwd(x, weight, bias, None, None, before, activation, False)
    conv_state.copy_(seen[..., T:])
    return y


def rms_norm_gated_fwd(
    x: torch.Tensor,  # [..., D]
    gate: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D]
    eps: float,
    activation: str,
) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) * act(gate) in fp32, rounded once; act: silu, sigmoid."""
    normed = F.rms_norm(at_least_fp32(x), weight.shape, at_least_fp32(weight), eps)
    act = F.silu if activation == "silu" else torch.sigmoid
    return (normed * act(at_least_fp32(gate))).to(x.dtype)
