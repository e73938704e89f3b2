"""The calls of projections with low-rank adapters, and of their gradients.

Sizes: M tokens, K the width of x, N that of an output, r the rank of an adapter, R the sum of all.
Up to MOST projections of one x, of which those behind the last are None.
"""

from typing import NamedTuple, Optional, Tuple

from torch import Tensor

from ..runtime.call import call

MOST = 4  # adapters, of projections that share their input


class LoraOptions(NamedTuple):
    scales: Tuple[float, ...]  # of the adapters
    drops: Tuple[float, ...]  # shares of x that their dropouts set to 0
    given: bool  # the products with the weights stand in the weights' places, [M, N]


@call
class Lora(NamedTuple):
    x: Tensor  # [.., K]: M rows
    w0: Tensor  # [N, K]
    w1: Optional[Tensor]
    w2: Optional[Tensor]
    w3: Optional[Tensor]
    bias0: Optional[Tensor]  # [N]
    bias1: Optional[Tensor]
    bias2: Optional[Tensor]
    bias3: Optional[Tensor]
    a0: Tensor  # [r, K] fp32, or in the dtype of x
    a1: Optional[Tensor]
    a2: Optional[Tensor]
    a3: Optional[Tensor]
    b0: Tensor  # [N, r] likewise
    b1: Optional[Tensor]
    b2: Optional[Tensor]
    b3: Optional[Tensor]
    seed: Optional[Tensor]  # [1] int64, with dropout
    options: LoraOptions


class LoraGradientOptions(NamedTuple):
    scales: Tuple[float, ...]
    drops: Tuple[float, ...]
    given: bool  # there are no weights, and dx is that of the adapters
    of_x: bool  # gradients that are needed
    of_a: bool
    of_b: bool


@call
class LoraGradient(NamedTuple):
    x: Tensor  # [M, K]
    h: Tensor  # [M, R] fp32: x a^T of all adapters
    seed: Optional[Tensor]
    w0: Optional[Tensor]
    w1: Optional[Tensor]
    w2: Optional[Tensor]
    w3: Optional[Tensor]
    a0: Tensor
    a1: Optional[Tensor]
    a2: Optional[Tensor]
    a3: Optional[Tensor]
    b0: Tensor
    b1: Optional[Tensor]
    b2: Optional[Tensor]
    b3: Optional[Tensor]
    dy0: Tensor  # [M, N]
    dy1: Optional[Tensor]
    dy2: Optional[Tensor]
    dy3: Optional[Tensor]
    options: LoraGradientOptions
