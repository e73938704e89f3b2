"""The arguments of a product in FP8 that all its parts share."""

from typing import NamedTuple

from torch import Tensor

BLOCK = 128  # columns, and rows of a weight, that share a scale
MOST = 64  # tokens are few
ROWS = 16  # the product takes a multiple of so many
LEAST = 1e-4  # the least magnitude that a scale is made of
INVERSE = 1 / 448  # of the largest value of e4m3; torch divides by a number on a GPU like this


class Quantised(NamedTuple):
    """Tokens in FP8: codes * scales, each scale for BLOCK columns."""

    codes: Tensor  # [P, K] e4m3; P: the tokens, and rows of zeros up to a multiple of ROWS
    scales: Tensor  # [P, K / BLOCK] fp32 with strides (1, P)


def padded(rows: int) -> int:
    return -(-rows // ROWS) * ROWS
