"""The calls of FP8, and what they share. Sizes: M tokens, P of them with padding, K columns."""

import functools
from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..runtime.call import NoOptions, call

BLOCK = 128  # columns, and rows of a weight, that share a scale
MOST = 64  # tokens that have products of their own: from 65 on the product is cuBLAS's
MAX_PLAIN = 2  # weights in bf16 beside those in FP8
ROWS = 16  # the product takes a multiple of so many
PLAIN_ROWS = 32  # of a weight in bf16 that a program takes
LEAST = 1e-4  # the least magnitude that a scale is made of
E8M0 = getattr(torch, "float8_e8m0fnu", None)  # powers of two of one byte
SCALES = (torch.float32,) if E8M0 is None else (torch.float32, E8M0)  # of weights
INVERSE = 1 / 448  # of the largest value of e4m3; torch divides by a number on a GPU like this


class Quantised(NamedTuple):
    """Tokens in FP8: codes * scales, each scale for BLOCK columns.

    Scales that kernels make of up to MOST tokens are in the memory behind the codes, whose rows are
    more then, and None stands in their place (portable/quantise.py).
    """

    codes: Tensor  # [P, K] e4m3; P: the tokens, and rows of zeros up to a multiple of ROWS
    scales: Optional[Tensor]  # [P, ceil(K / BLOCK)] fp32 with strides (1, P)


def padded(rows: int) -> int:
    return -(-rows // ROWS) * ROWS


def blocks_of(n: int) -> int:
    """The number of scales of n columns, or of n rows of a weight."""
    return -(-n // BLOCK)


@functools.lru_cache(maxsize=1024)
def _fit(weight: torch.Size, scale: torch.Size) -> bool:
    return len(weight) == 2 and min(weight) > 0 and scale == tuple(map(blocks_of, weight))


def is_scaled(weight: Tensor, scale: Tensor) -> bool:
    """True for a weight [N, K] in FP8 and a scale for each BLOCK x BLOCK of it, both dense."""
    return (
        weight.dtype is torch.float8_e4m3fn
        and scale.dtype in SCALES
        and weight.device == scale.device
        and _fit(weight.shape, scale.shape)
        and weight.is_contiguous()
        and scale.is_contiguous()
    )


def as_bytes(scales: Sequence[Optional[Tensor]]) -> tuple:
    """Scales in e8m0 as kernels take them."""
    return tuple([
        s.view(torch.uint8) if s is not None and s.dtype is E8M0 else s for s in scales
    ])  # fmt: skip


class NormOptions(NamedTuple):
    """The options of rms_norm."""

    eps: float
    casting_mode: str
    offset: float


@call
class NormQuantise(NamedTuple):
    """RMSNorm of x + residual, that sum or None, and the norm's result in FP8."""

    x: Tensor  # [..., K] bf16
    weight: Optional[Tensor]  # [K]
    residual: Optional[Tensor]  # [..., K]
    options: NormOptions


@call
class Product(NamedTuple):
    """The weight of a product, by which its kernel is chosen before any tokens are quantised: a
    function of the weight, its scale and tokens in FP8, which gives [P, N] bf16."""

    weight: Tensor  # [N, K] e4m3
    scale: Tensor  # [ceil(N / BLOCK), ceil(K / BLOCK)] fp32 or e8m0
    options: NoOptions


@call
class Dequantise(NamedTuple):
    """The weight times its scale in bf16."""

    weight: Tensor  # [N, K] e4m3
    scale: Tensor  # [ceil(N / BLOCK), ceil(K / BLOCK)] fp32
    options: NoOptions


class ProductsOptions(NamedTuple):
    lead: tuple  # the shape of the tokens: M in all


@call
class Products(NamedTuple):
    """Products of M tokens by up to MAX_WEIGHTS weights (projection/call.py), and of up to MOST
    tokens by up to MAX_PLAIN in bf16."""

    w0: Tensor  # [N_i, K] e4m3, as all of them
    w1: Optional[Tensor]
    w2: Optional[Tensor]
    w3: Optional[Tensor]
    w4: Optional[Tensor]
    w5: Optional[Tensor]
    s0: Tensor  # [ceil(N_i / BLOCK), ceil(K / BLOCK)] fp32 or e8m0, as all of them
    s1: Optional[Tensor]
    s2: Optional[Tensor]
    s3: Optional[Tensor]
    s4: Optional[Tensor]
    s5: Optional[Tensor]
    x: Optional[Tensor]  # [..., K] bf16, for weights in bf16, and where there are no codes
    codes: Optional[Tensor]  # [P, K] e4m3
    scales: Optional[Tensor]  # [P, ceil(K / BLOCK)]
    p0: Optional[Tensor]  # [N_i, K] bf16, as both of them
    p1: Optional[Tensor]
    options: ProductsOptions


class MlpOptions(NamedTuple):
    lead: tuple
    gate_first: bool  # where one weight holds both


@call
class Mlp(NamedTuple):
    """down(silu(gate(x)) * up(x)), and the residual that is added to it."""

    w_gate: Tensor  # [N, K] e4m3, or [2 N, K] where there is no w_up
    w_up: Optional[Tensor]
    w_down: Tensor  # [H, N]
    s_gate: Tensor  # [ceil(N / BLOCK), ceil(K / BLOCK)] fp32 or e8m0
    s_up: Optional[Tensor]
    s_down: Tensor  # [ceil(H / BLOCK), ceil(N / BLOCK)]
    b_gate: Optional[Tensor]  # [N] bf16
    b_up: Optional[Tensor]
    b_down: Optional[Tensor]  # [H]
    x: Tensor  # [..., K] bf16
    codes: Optional[Tensor]  # [P, K] e4m3, if they are known
    scales: Optional[Tensor]
    residual: Optional[Tensor]  # [..., H] bf16
    options: MlpOptions
