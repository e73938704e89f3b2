"""Projections of a few tokens, in plain torch."""

from typing import List, Optional

import torch
import torch.nn.functional as F

from ..swiglu.reference import swiglu_fwd


def project_fwd(
    x: torch.Tensor,  # [M, K]
    weights: List[torch.Tensor],  # [N_i, K] each
    activation: Optional[str],
) -> torch.Tensor:  # [M, N]
    """x W_i^T for each i, side by side; with an activation, act(x W_0^T) * (x W_1^T)."""
    if activation is not None:
        w_gate, w_up = weights
        return swiglu_fwd(x, w_gate, w_up, None, None, activation)
    return torch.cat([F.linear(x, w) for w in weights], dim=-1)
