"""The input projections of a GDN layer, in plain torch."""

from typing import List

import torch
import torch.nn.functional as F


def gdn_project_fwd(
    x: torch.Tensor,  # [M, K]
    weights: List[torch.Tensor],  # [N_i, K] each
) -> torch.Tensor:  # [M, N]
    """x W_i^T for each i, side by side."""
    return torch.cat([F.linear(x, w) for w in weights], dim=-1)
