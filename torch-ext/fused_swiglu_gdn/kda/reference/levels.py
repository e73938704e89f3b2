"""The decays inside a chunk by levels, so that no exponent is ever positive (docs/kda.md).

Tokens i > j part at level s: neighbouring blocks of s = 32, 16, .., 1 tokens that make up one of
2 s. With E_s of a token what it has lost since the middle of that block, its own gate included,
or, before the middle, what it loses until then,

    sum_d x_id y_jd exp(G_id - G_jd) = (E_s x)_i . (E_s y)_j        G = cumsum(g)
"""

import torch
import torch.nn.functional as F

from ...gdn.chunks import CHUNK

LEVELS = (32, 16, 8, 4, 2, 1)


def level_mask(s: int, device: torch.device) -> torch.Tensor:
    """The pairs [C, C] that part at level s."""
    block = torch.arange(CHUNK, device=device) // s
    return (block[:, None] == block[None, :] + 1) & (block[None, :] % 2 == 0)


def level_factors(g: torch.Tensor, s: int) -> torch.Tensor:
    """E_s [..., C, K] of gates g [..., C, K]."""
    x = g.unflatten(-2, (-1, 2, s))
    later = x[..., 0, :, :].flip(-2).cumsum(-2).flip(-2)
    before = F.pad(later[..., 1:, :], (0, 0, 0, 1))  # a difference would be NaN where g is -inf
    behind = x[..., 1, :, :].cumsum(-2)
    return torch.stack((before, behind), -3).exp().flatten(-4, -2)


def lost_until_end(g: torch.Tensor) -> torch.Tensor:
    """Decay of a token's write until the end of the chunk, [..., C, K]."""
    later = g.flip(-2).cumsum(-2).flip(-2)
    return F.pad(later[..., 1:, :], (0, 0, 0, 1)).exp()


def lower_products(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple:
    """A strictly below the diagonal, and P with it, both [..., C, C]:

    A_ij = sum_d k_id k_jd exp(G_id - G_jd)    P_ij = sum_d q_id k_jd exp(G_id - G_jd)
    """
    A = k.new_zeros(())
    P = torch.diag_embed((q * k).sum(-1))
    for s in LEVELS:
        E, mask = level_factors(g, s), level_mask(s, g.device)
        columns = (E * k).mT
        A = A + torch.where(mask, (E * k) @ columns, 0.0)
        P = P + torch.where(mask, (E * q) @ columns, 0.0)
    return A, P
