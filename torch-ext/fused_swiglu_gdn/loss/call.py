"""The calls of cross entropy and of its gradient. Sizes: M targets, V words of a vocabulary."""

from typing import NamedTuple

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
    parts: Tensor  # [2, M]: the largest logit; the logarithm of the sum of exp(logit - largest)
    count: Tensor  # []: targets that count
    dloss: Tensor  # []
    options: CrossEntropyOptions
