"""Gradients of the parts around the gated delta rule, written out in plain torch.

They equal automatic differentiation of layer.py, for operators without a kernel on the device.
Sizes as in layer.py.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F

from ...gdn.chunks import count_sequences
from ...runtime.dtypes import at_least_fp32
from .layer import places, reads


def rms_norm_gated_bwd(
    x: torch.Tensor,  # [..., D]
    gate: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D]
    dy: torch.Tensor,  # [..., D]
    eps: float,
    activation: str,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dgate [..., D] and dweight [D]."""
    wide, a, w, d = (at_least_fp32(t) for t in (x, gate, weight, dy))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    n, s = wide * rstd, a.sigmoid()
    act, slope = (a * s, s * (1 + a * (1 - s))) if activation == "silu" else (s, s * (1 - s))
    dn = d * w * act
    dx = rstd * (dn - n * (dn * n).mean(-1, keepdim=True))
    dweight = (d * n * act).flatten(0, -2).sum(0)
    return dx.to(x.dtype), (d * w * n * slope).to(gate.dtype), dweight.to(weight.dtype)


def causal_conv1d_bwd(
    x: torch.Tensor,  # [B, D, T]
    weight: torch.Tensor,  # [D, W]
    bias: Optional[torch.Tensor],  # [D]
    seq_idx: Optional[torch.Tensor],  # [B, T]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    initial_states: Optional[torch.Tensor],  # [N, D, W - 1]
    dy: torch.Tensor,  # [B, D, T]
    d_final: Optional[torch.Tensor],  # [N, D, W - 1]
    activation: Optional[str],
) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """dx [B, D, T], dweight [D, W], dbias [D] or None, d_initial_states [N, D, W - 1] or None."""
    (B, D, T), W = x.shape, weight.shape[1]
    wide, taps, dz = at_least_fp32(x), at_least_fp32(weight), at_least_fp32(dy)
    n, position = places(B, T, seq_idx, cu_seqlens, x.device)
    N = count_sequences(B, cu_seqlens)
    history = wide.new_zeros(N, D, W - 1) if initial_states is None else initial_states.to(wide)
    lengths = x.new_full((N,), T, dtype=torch.long) if cu_seqlens is None else cu_seqlens.diff()

    found = list(reads(wide, history, n, position))
    if activation is not None:
        z = sum(taps[:, W - 1 - back, None] * seen for back, *_, seen in found)
        z = z if bias is None else z + at_least_fp32(bias).unsqueeze(-1)
        s = z.sigmoid()
        dz = dz * s * (1 + z * (1 - s))
    dx, dweight, d_history = torch.zeros_like(wide), torch.zeros_like(taps), history * 0
    for back, inside, column, seen in found:
        dweight[:, W - 1 - back] = (dz * seen).sum((0, 2))
        d = dz * taps[:, W - 1 - back, None]
        dx = dx + F.pad(torch.where(inside, d, 0.0)[..., back:], (0, min(back, T)))
        outside = torch.where(inside, 0.0, d).mT  # [B, T, D]
        d_history = d_history.mT.index_put((n, column), outside, accumulate=True).mT
    if d_final is not None:
        d_final = d_final.to(wide)
        left = lengths[n] - position  # tokens from here to the end of the sequence, [B, T]
        kept = d_final[n, :, (W - 1 - left).clamp(min=0)].mT
        dx = dx + torch.where((left < W).unsqueeze(1), kept, 0.0)
        column = torch.arange(W - 1, device=x.device)
        source = (column - lengths.unsqueeze(1)).unsqueeze(1)  # [N, 1, W - 1]
        moved = d_final.gather(2, source.clamp(min=0).expand(N, D, W - 1))
        d_history = d_history + torch.where(source >= 0, moved, 0.0)
    dbias = None if bias is None else dz.sum((0, 2)).to(bias.dtype)
    d_initial = None if initial_states is None else d_history.to(initial_states.dtype)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias, d_initial
