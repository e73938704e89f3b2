"""Quantising to FP8 and products of blocks in plain torch.

    s = max(amax, 1e-4) / 448        q = e4m3(x (1 / s))

for each 128 columns of a token, as DeepGEMM's per_token_cast_to_fp8 has it on a GPU, where torch
multiplies by the reciprocal of 448. NaN and infinity in 128 columns make their scale NaN or
infinite, so that all that is multiplied with them becomes NaN.

Sizes: M tokens, P of them with padding, K columns, N rows of a weight.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F

from ..norm import reference as norm
from .call import BLOCK, INVERSE, LEAST, Quantised, padded


def quantise_fwd(x: torch.Tensor) -> Quantised:  # x [M, K] bf16
    x = F.pad(x, (0, 0, 0, padded(x.shape[0]) - x.shape[0]))
    groups = x.float().unflatten(1, (-1, BLOCK))  # [P, K / BLOCK, BLOCK]
    scales = groups.abs().amax(2).clamp(LEAST) * INVERSE
    codes = (groups * (1.0 / scales).unsqueeze(2)).to(torch.float8_e4m3fn)
    return Quantised(codes.flatten(1), scales.t().contiguous().t())


def norm_quantise_fwd(
    x: torch.Tensor,  # [..., D] bf16
    weight: Optional[torch.Tensor],  # [D]
    residual: Optional[torch.Tensor],  # [..., D]
    eps: float,
    casting_mode: str,
    offset: float,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Quantised]:
    """RMSNorm of x + residual, that sum, and the norm's result in FP8."""
    y, total, _ = norm.rms_norm_fwd(x, weight, residual, eps, casting_mode, offset, False)
    return y, total, quantise_fwd(y.reshape(-1, y.shape[-1]))


def silu_mul_quantise_fwd(gate: torch.Tensor, up: torch.Tensor) -> Quantised:  # [M, N] bf16 each
    """silu(gate) * up, of which transformers rounds each to bf16 before it is quantised."""
    return quantise_fwd(F.silu(gate) * up)


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [N, K] e4m3 times scale [ceil(N / BLOCK), K / BLOCK], fp32."""
    N, K = weight.shape
    wide = scale.float().repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    return weight.float() * wide


def dequantise_fwd(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns weight times scale, rounded once, [N, K] bf16."""
    return dequantised(weight, scale).to(torch.bfloat16)


def multiply_fwd(
    weight: torch.Tensor,  # [N, K] e4m3
    scale: torch.Tensor,  # [ceil(N / BLOCK), K / BLOCK] fp32
    x: Quantised,  # [P, K]
) -> torch.Tensor:  # [P, N] bf16
    groups = x.codes.float().unflatten(1, (-1, BLOCK)) * x.scales.unsqueeze(2)
    return (groups.flatten(1) @ dequantised(weight, scale).t()).to(torch.bfloat16)


def few_fwd(
    codes: torch.Tensor,  # [P, K]
    scales: torch.Tensor,  # [P, K / BLOCK]
    *more,  # weights, their scales, x and weights in bf16, None where there is none, and M
) -> torch.Tensor:  # [M, N] bf16: the products with all weights
    *tensors, tokens, p0, p1, M = more
    half, x = len(tensors) // 2, Quantised(codes, scales)
    pairs = zip(tensors[:half], tensors[half:])
    found = [multiply_fwd(w, s, x)[:M] for w, s in pairs if w is not None]
    return torch.cat([*found, *(F.linear(tokens, p) for p in (p0, p1) if p is not None)], 1)


def quantise_few_fwd(
    x: torch.Tensor,  # [..., K] bf16
    weight: torch.Tensor,  # [N, K] e4m3
    scale: torch.Tensor,  # [ceil(N / BLOCK), K / BLOCK]
) -> torch.Tensor:  # [..., N] bf16
    rows = x.reshape(-1, x.shape[-1])
    y = multiply_fwd(weight, scale, quantise_fwd(rows))[: rows.shape[0]]
    return y.reshape(*x.shape[:-1], -1)


def few_mlp_fwd(
    codes: torch.Tensor,  # [P, K]
    scales: torch.Tensor,  # [P, K / BLOCK]
    w_gate: torch.Tensor,  # [N, K] e4m3
    w_up: torch.Tensor,
    w_down: torch.Tensor,  # [H, N]
    s_gate: torch.Tensor,
    s_up: torch.Tensor,
    s_down: torch.Tensor,
    residual: Optional[torch.Tensor],  # [M, H]
    M: int,
) -> torch.Tensor:  # [M, H] bf16
    x = Quantised(codes, scales)
    gate, up = multiply_fwd(w_gate, s_gate, x), multiply_fwd(w_up, s_up, x)
    y = multiply_fwd(w_down, s_down, silu_mul_quantise_fwd(gate, up))[:M]
    return y if residual is None else residual + y
