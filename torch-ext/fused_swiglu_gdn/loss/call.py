"""The calls of losses over a vocabulary and of their gradients.

Sizes: M targets, V words of a vocabulary, H the width of hidden states. Logits of hidden states are
z = hidden weight^T + bias, times a scale, then under a soft cap.
"""

from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime.call import call


class CrossEntropyOptions(NamedTuple):
    ignore_index: int  # targets that do not count
    mean: bool  # over the targets that count; False: their sum


@call
class CrossEntropy(NamedTuple):
    logits: Tensor  # [M, V]
    target: Tensor  # [M] int64
    options: CrossEntropyOptions


@call
class CrossEntropyGradient(NamedTuple):
    logits: Tensor  # [M, V]
    target: Tensor  # [M] int64
    stats: Tensor  # [3, M]: m, rest and z[target] - m of portable/rows.py
    count: Tensor  # []: targets that count
    dloss: Tensor  # []
    options: CrossEntropyOptions


class LossOptions(NamedTuple):
    ignore_index: int
    mean: bool
    smoothing: float  # share of the target's probability that all words have alike
    z_loss: float  # of the square of log sum exp(z)
    scale: float  # of the logits
    softcap: float  # 0: none
    rows: int = 0  # whose logits are made at once
    way: str = ""  # "kept" or "rows" (portable/linear.py); "": no gradient is needed
    of_hidden: bool = False  # gradients that are needed
    of_weight: bool = False
    of_bias: bool = False


@call
class LinearLoss(NamedTuple):
    hidden: Tensor  # [M, H]
    weight: Tensor  # [V, H]
    bias: Optional[Tensor]  # [V]
    target: Tensor  # [M] int64
    options: LossOptions


@call
class LinearLossGradient(NamedTuple):
    hidden: Tensor  # [M, H]
    weight: Tensor  # [V, H]
    bias: Optional[Tensor]  # [V]
    target: Tensor  # [M] int64
    stats: Tensor  # [3 or 5, M]
    count: Tensor  # []
    kept: Optional[Tensor]  # "kept": logits, which are overwritten; "rows": of hidden, unscaled
    dweight: Optional[Tensor]  # "rows": unscaled
    dbias: Optional[Tensor]
    dloss: Tensor  # []
    options: LossOptions


class TokenOptions(NamedTuple):
    ignore_index: int
    scale: float
    softcap: float
    more: bool  # the entropy and the mean of all words' log-probabilities, too
    rows: int = 0  # whose logits are made at once
    of_hidden: bool = False  # gradients that are needed
    of_weight: bool = False
    of_bias: bool = False


@call
class TokenLogProbs(LinearLoss):
    __slots__ = ()
    options: TokenOptions


@call
class TokenLogProbsGradient(NamedTuple):
    hidden: Tensor  # [M, H]
    weight: Tensor  # [V, H]
    bias: Optional[Tensor]  # [V]
    target: Tensor  # [M] int64
    stats: Tensor  # [3 or 5, M]
    dlog_prob: Optional[Tensor]  # [M]
    dlse: Optional[Tensor]  # [M]
    dmean: Optional[Tensor]  # [M]
    dentropy: Optional[Tensor]  # [M]
    options: TokenOptions
