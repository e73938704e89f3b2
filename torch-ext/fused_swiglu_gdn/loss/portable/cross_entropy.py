"""Cross entropy of logits in one pass over them, and its gradient in another.

torch makes fp32 copies of logits in bf16 for this, the logarithm of all probabilities, and their
gradients in fp32. Here logits are read in their own dtype and computed in fp32.

Sizes: M targets, V words of a vocabulary.
"""

from typing import Callable, Optional

import torch

from ...runtime.dtypes import served
from ..call import CrossEntropy, CrossEntropyGradient
from .rows import LEAST, Kernels


def _is_served(logits: torch.Tensor, target: torch.Tensor) -> bool:
    tensors = (logits, target)
    return (
        served(logits)
        and logits.numel() > 0
        and target.dtype is torch.int64
        and all([x.is_contiguous() for x in tensors])
        and logits.numel() < 2**40  # so many blocks that a grid holds them
    )


def prepare_cross_entropy_fwd(call: CrossEntropy) -> Optional[Callable]:
    """(logits, target) -> (loss, stats, count). A target that is no word is an error of the
    device, as in torch."""
    logits, target, (ignore_index, mean) = call
    if not _is_served(logits, target):
        return None
    (M, V), where = logits.shape, logits.device
    kernels = Kernels(V, M, where, ignore_index, V)
    rows, add = kernels.rows(M), kernels.loss(mean)

    def run(logits, target):
        stats, loss, count = [
            logits.new_empty(shape, dtype=torch.float32) for shape in ((LEAST, M), (), ())
        ]
        known = target.new_ones((), dtype=torch.int32)
        rows(logits, target, stats, None)
        add(stats, target, loss, count, known)
        torch._assert_async(known, kernels.said)
        return loss, stats, count

    return run


def prepare_cross_entropy_bwd(call: CrossEntropyGradient) -> Optional[Callable]:
    """(logits, target, stats, count, dloss) -> dlogits: two launches."""
    logits, target, stats, count, dloss, (ignore_index, mean) = call
    if not _is_served(logits, target) or not served(stats, count, dloss):
        return None
    (M, V), where = logits.shape, logits.device
    kernels = Kernels(V, M, where, ignore_index, V)
    coefficients, gradient = kernels.coefficients(), kernels.gradient(V, 0, V)
    none = (None,) * 4

    def run(logits, target, stats, count, dloss):
        found, out = stats.new_empty((4, M)), torch.empty_like(logits)
        coefficients(target, stats, found, dloss, count if mean else None, *none)
        gradient(logits, target, stats, found, out)
        return out

    return run
