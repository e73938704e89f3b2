"""The calls of RMSNorm and of its gradient. Sizes: D, the last dimension, is normalised."""

from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime.call import call

CASTING_MODES = ("llama", "gemma")


class RmsNormOptions(NamedTuple):
    eps: float  # added to the mean square
    casting_mode: str  # "llama" or "gemma"
    offset: float  # added to the weight
    after: bool = False  # the residual is added to the result, not to x
    keep: bool = False  # rstd is returned, for the gradient


@call
class RmsNorm(NamedTuple):
    x: Tensor  # [..., D]
    weight: Optional[Tensor]  # [D]
    residual: Optional[Tensor]  # [..., D]
    options: RmsNormOptions


class GradientOptions(NamedTuple):
    offset: float
    needs_weight: bool


@call
class RmsNormGradient(NamedTuple):
    x: Tensor  # [..., D]: what was normalised, so with a residual the sum
    rstd: Tensor  # [...]
    weight: Optional[Tensor]  # [D]
    dy: Tensor  # [..., D]
    dtotal: Optional[Tensor]  # [..., D]
    options: GradientOptions
