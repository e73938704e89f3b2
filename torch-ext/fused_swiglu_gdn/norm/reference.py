"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) in plain torch, forward and backward.

    n = x / sqrt(mean(x^2) + eps)

Sizes: D, the last dimension, is normalised.
"""

from typing import Optional, Tuple

import torch

from ..runtime.dtypes import at_least_fp32


def result_dtype(x: torch.Tensor, weight: Optional[torch.Tensor], casting_mode: str) -> torch.dtype:
    """The dtype of y: with "llama" torch's promotion of x and weight, else the dtype of x."""
    if weight is None or casting_mode != "llama":
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def rms_norm_fwd(
    x: torch.Tensor,  # [..., D]
    weight: Optional[torch.Tensor],  # [D]
    residual: Optional[torch.Tensor],  # [..., D]
    eps: float, casting_mode: str, offset: float, after: bool = False, keep: bool = False,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:  # fmt: skip
    """y [..., D], x + residual [..., D] or None, 1 / sqrt(mean(x^2) + eps) [...] or None.

    after: y + residual and None instead.
    """
    total = None if residual is None or after else x + residual  # [..., D]
    x = x if total is None else total
    wide = at_least_fp32(x)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
    n = wide * rstd
    if weight is None:
        y = n.to(x.dtype)
    elif casting_mode == "llama":
        y = weight * n.to(x.dtype)
    else:
        weight = at_least_fp32(weight)
        y = (n * (offset + weight if offset else weight)).to(x.dtype)
    y = residual + y if after else y
    return y, total, rstd.squeeze(-1) if keep else None


def rms_norm_bwd(
    x: torch.Tensor,  # [..., D]: what was normalised, so with a residual the sum
    rstd: torch.Tensor,  # [...]
    weight: Optional[torch.Tensor],  # [D]
    dy: torch.Tensor,  # [..., D]
    dtotal: Optional[torch.Tensor],  # [..., D]
    offset: float,
    needs_weight: bool,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """dx [..., D], which is also the residual's gradient, and dweight [D] or None."""
    d, rstd = at_least_fp32(dy), rstd.unsqueeze(-1)
    n = at_least_fp32(x) * rstd
    dn = d if weight is None else d * (offset + at_least_fp32(weight))
    dx = rstd * (dn - n * (dn * n).mean(-1, keepdim=True))
    dx = dx if dtotal is None else dx + dtotal
    dweight = (d * n).flatten(0, -2).sum(0).to(weight.dtype) if needs_weight else None
    return dx.to(x.dtype), dweight
