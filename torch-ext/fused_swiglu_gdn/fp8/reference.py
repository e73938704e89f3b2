"""Quantising to FP8 and products of blocks in plain torch.

    s = max(amax, 1e-4) / 448        q = e4m3(x (1 / s))

for each 128 columns of a token, of which the last may be fewer, as DeepGEMM's per_token_cast_to_fp8
has it on a GPU, where torch multiplies by the reciprocal of 448. NaN and infinity in 128 columns
make their scale NaN or infinite, so that all that is multiplied with them becomes NaN.

Sizes: M tokens, P of them with padding, K columns, N rows of a weight.
"""

from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F

from ..norm import reference as norm
from .call import BLOCK, INVERSE, LEAST, Quantised, padded


def quantise_fwd(x: torch.Tensor) -> Quantised:  # x [M, K] bf16
    M, K = x.shape
    x = F.pad(x, (0, -K % BLOCK, 0, padded(M) - M))
    groups = x.float().unflatten(1, (-1, BLOCK))  # [P, ceil(K / BLOCK), BLOCK]
    scales = groups.abs().amax(2).clamp(LEAST) * INVERSE
    codes = (groups * (1.0 / scales).unsqueeze(2)).to(torch.float8_e4m3fn)
    return Quantised(codes.flatten(1)[:, :K].contiguous(), scales.t().contiguous().t())


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
    """weight [N, K] e4m3 times scale [ceil(N / BLOCK), ceil(K / BLOCK)], fp32."""
    N, K = weight.shape
    wide = scale.float().repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    return weight.float() * wide


def dequantise_fwd(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns weight times scale, rounded once, [N, K] bf16."""
    return dequantised(weight, scale).to(torch.bfloat16)


def multiply_fwd(
    weight: torch.Tensor,  # [N, K] e4m3
    scale: torch.Tensor,  # [ceil(N / BLOCK), ceil(K / BLOCK)]
    x: Quantised,  # [P, K]
) -> torch.Tensor:  # [P, N] bf16
    tokens = x.codes.float() * x.scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return (tokens @ dequantised(weight, scale).t()).to(torch.bfloat16)


def products_fwd(*given) -> List[torch.Tensor]:
    """The fields of a call of Products -> the products with all weights, [*lead, N_i] each."""
    *tensors, x, codes, scales, p0, p1, lead = given
    half = len(tensors) // 2
    tokens = _tokens(x, codes, scales)
    pairs = zip(tensors[:half], tensors[half:])
    found = [multiply_fwd(w, s, tokens) for w, s in pairs if w is not None]
    found = [y.resize_((*lead, y.shape[1])) for y in found]  # the tokens' rows, no views
    return [*found, *(F.linear(x, p) for p in (p0, p1) if p is not None)]


def _tokens(x, codes, scales) -> Quantised:
    if codes is not None:
        return Quantised(codes, scales)
    return quantise_fwd(x.reshape(-1, x.shape[-1]))


def mlp_fwd(*given) -> torch.Tensor:
    """The fields of a call of Mlp -> [*lead, H] bf16. A bias is added to what was rounded."""
    weights, scales, biases, (*tokens, residual, lead, gate_first) = (
        given[:3], given[3:6], given[6:9], given[9:]
    )  # fmt: skip

    def product(i: int, x: Quantised) -> torch.Tensor:
        y = multiply_fwd(weights[i], scales[i], x)
        return y if biases[i] is None else y + biases[i]

    x = _tokens(*tokens)
    gate = product(0, x)
    if weights[1] is None:
        gate, up = gate.chunk(2, 1)[:: 1 if gate_first else -1]
    else:
        up = product(1, x)
    y = product(2, silu_mul_quantise_fwd(gate, up))
    y = y.resize_((*lead, y.shape[1]))
    return y if residual is None else residual + y
