"""Projections of a few tokens, in plain torch."""

from typing import Optional

import torch
import torch.nn.functional as F

from ..swiglu.reference import swiglu_fwd


def project_fwd(x: torch.Tensor, *weights_and_options) -> torch.Tensor:
    """x W_i^T for each i, side by side; with an activation, act(x W_0^T) * (x W_1^T).

    x [..., K]; weights [N_i, K] or None, then the activation or None, and whether the result is in
    fp32 -> [..., N].
    """
    *weights, activation, fp32 = weights_and_options
    if fp32:
        x, weights = x.float(), [w if w is None else w.float() for w in weights]
    if activation is not None:
        return swiglu_fwd(x, *weights[:2], None, None, activation)
    return torch.cat([F.linear(x, w) for w in weights if w is not None], dim=-1)


def token_mlp_fwd(
    x: torch.Tensor,  # [..., K]
    w_gate: torch.Tensor,  # [N, K]
    w_up: torch.Tensor,  # [N, K]
    w_down: torch.Tensor,  # [K, N]
    activation: Optional[str],
) -> torch.Tensor:  # [..., K]
    return F.linear(swiglu_fwd(x, w_gate, w_up, None, None, activation), w_down)


def normed_project_fwd(
    x: torch.Tensor,  # [..., K]
    norm: torch.Tensor,  # [K]
    w: torch.Tensor,  # [N, K]
    eps: float,
) -> torch.Tensor:  # [..., N]
    """(x / rms(x) * norm) w^T; what the norm gives is not rounded."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    n = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps) * norm.to(wide)
    return F.linear(n, w.to(wide)).to(x.dtype)
