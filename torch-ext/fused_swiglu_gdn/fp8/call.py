"""The calls of FP8, and what they share. Sizes: M tokens, P of them with padding, K columns."""

from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime.call import NoOptions, call

BLOCK = 128  # columns, and rows of a weight, that share a scale
MOST = 64  # tokens are few
MAX_PLAIN = 2  # weights in bf16 beside those in FP8
ROWS = 16  # the product takes a multiple of so many
PLAIN_ROWS = 32  # of a weight in bf16 that a program takes
LEAST = 1e-4  # the least magnitude that a scale is made of
INVERSE = 1 / 448  # of the largest value of e4m3; torch divides by a number on a GPU like this


class Quantised(NamedTuple):
    """Tokens in FP8: codes * scales, each scale for BLOCK columns."""

    codes: Tensor  # [P, K] e4m3; P: the tokens, and rows of zeros up to a multiple of ROWS
    scales: Tensor  # [P, K / BLOCK] fp32 with strides (1, P)


def padded(rows: int) -> int:
    return -(-rows // ROWS) * ROWS


@call
class Quantise(NamedTuple):
    """x in FP8: Quantised."""

    x: Tensor  # [M, K] bf16
    options: NoOptions


@call
class SiluMulQuantise(NamedTuple):
    """silu(gate) * up in FP8, rounded to bf16 after each of the two."""

    gate: Tensor  # [M, K] bf16
    up: Tensor  # [M, K] bf16
    options: NoOptions


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
    scale: Tensor  # [ceil(N / BLOCK), K / BLOCK] fp32
    options: NoOptions


@call
class Dequantise(NamedTuple):
    """The weight times its scale in bf16."""

    weight: Tensor  # [N, K] e4m3
    scale: Tensor  # [ceil(N / BLOCK), K / BLOCK] fp32
    options: NoOptions


class FewOptions(NamedTuple):
    M: int


@call
class Few(NamedTuple):
    """Products of up to MOST tokens by up to MAX_WEIGHTS weights (projection/call.py), and by up to
    MAX_PLAIN in bf16."""

    codes: Tensor  # [P, K] e4m3
    scales: Tensor  # [P, K / BLOCK]
    w0: Tensor  # [N_i, K] e4m3, as all of them
    w1: Optional[Tensor]
    w2: Optional[Tensor]
    w3: Optional[Tensor]
    w4: Optional[Tensor]
    w5: Optional[Tensor]
    s0: Tensor  # [ceil(N_i / BLOCK), K / BLOCK] fp32, as all of them
    s1: Optional[Tensor]
    s2: Optional[Tensor]
    s3: Optional[Tensor]
    s4: Optional[Tensor]
    s5: Optional[Tensor]
    x: Optional[Tensor]  # [M, K] bf16, for weights in bf16
    p0: Optional[Tensor]  # [N_i, K] bf16, as both of them
    p1: Optional[Tensor]
    options: FewOptions


@call
class QuantiseFew(NamedTuple):
    """The product of up to MOST tokens in bf16, which are quantised before, by one weight,
    [..., N]."""

    x: Tensor  # [..., K] bf16
    weight: Tensor  # [N, K] e4m3
    scale: Tensor  # [ceil(N / BLOCK), K / BLOCK] fp32
    options: NoOptions


@call
class FewMlp(NamedTuple):
    """down(silu(gate(x)) * up(x)) of up to MOST tokens, [M, H] bf16."""

    codes: Tensor  # [P, K] e4m3
    scales: Tensor  # [P, K / BLOCK]
    w_gate: Tensor  # [N, K] e4m3
    w_up: Tensor
    w_down: Tensor  # [H, N]
    s_gate: Tensor  # [N / BLOCK, K / BLOCK]
    s_up: Tensor
    s_down: Tensor  # [ceil(H / BLOCK), N / BLOCK]
    residual: Optional[Tensor]  # [M, H] bf16, which is added in the end
    options: FewOptions
