"""Cross entropy in one pass over the logits, and its gradient in another.

    loss of a row = log(s) - (logits[target] - m),  m = max(logits),  s = sum exp(logits - m)
    dlogits = (exp(logits - m - log(s)) - [v = target]) dloss,  with the mean divided by the count

torch makes fp32 copies of logits in bf16 for this, the logarithm of all probabilities, and their
gradients in fp32. Here logits are read in their own dtype and computed in fp32. Rows whose target
does not count have no loss and a gradient of zeros, whatever their logits are.

Sizes: M targets, V words of a vocabulary.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime import tuning
from ...runtime.dtypes import served
from ...runtime.launch import Launch, named
from ...runtime.sizes import cdiv
from ..call import CrossEntropy, CrossEntropyGradient

LOWEST = tl.constexpr(-3.0e38)  # finite, so that minus infinity has a distance from it


@triton.jit(do_not_specialize=["M", "ignore_index"])
def _loss_of_rows_kernel(
    logits_ptr,  # [M, V]
    target_ptr,  # [M]
    parts_ptr,  # [2, M]
    losses_ptr,  # [M]
    M,
    ignore_index,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """m, log(s) and the loss of a row; NaN for a target that is no word."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    largest = LOWEST + tl.zeros((), tl.float32)
    total = tl.zeros((), tl.float32)
    for v in range(0, V, BLOCK):
        offs = v + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
        now = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(x - now), 0)
        largest = now
    rest = tl.log(total)
    target = tl.load(target_ptr + row)
    known = (target >= 0) & (target < V)
    own = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(parts_ptr + row, largest)
    tl.store(parts_ptr + M + row, rest)
    tl.store(losses_ptr + row, tl.where(target == ignore_index, 0.0, rest - (own - largest)))


@triton.jit(do_not_specialize=["M", "ignore_index"])
def _loss_kernel(
    losses_ptr,  # [M]
    target_ptr,  # [M]
    loss_ptr,  # []
    count_ptr,  # []
    known_ptr,  # []: left alone if all targets that count are words
    M,
    ignore_index,
    V: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The loss and the number of targets that count, by one program."""
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, M, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + rows, mask=rows < M, other=ignore_index)
        counts = target != ignore_index
        total += tl.load(losses_ptr + rows, mask=rows < M, other=0.0)
        count += counts.to(tl.int32)
        wrong |= (counts & ((target < 0) | (target >= V))).to(tl.int32)
    loss, number = tl.sum(total, 0), tl.sum(count, 0).to(tl.float32)
    if MEAN:
        loss = tl.div_rn(loss, number)
    tl.store(loss_ptr, loss)
    tl.store(count_ptr, number)
    if tl.max(wrong, 0) > 0:
        tl.store(known_ptr, 0)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def _logits_gradient_kernel(
    logits_ptr,  # [M, V]
    target_ptr,  # [M]
    parts_ptr,  # [2, M]
    count_ptr,  # []
    dloss_ptr,  # []
    out_ptr,  # [M, V]
    M,
    ignore_index,
    V: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of BLOCK logits of a row."""
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    offs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    at = row.to(tl.int64) * V + offs
    x = tl.load(logits_ptr + at, mask=(offs < V) & counts, other=0.0).to(tl.float32)
    scale = tl.load(dloss_ptr).to(tl.float32)
    if MEAN:
        scale = tl.div_rn(scale, tl.load(count_ptr))
    share = tl.exp(x - tl.load(parts_ptr + row) - tl.load(parts_ptr + M + row))
    dx = tl.where(counts, (share - (offs == target).to(tl.float32)) * scale, 0.0)
    tl.store(out_ptr + at, dx.to(out_ptr.dtype.element_ty), mask=offs < V)


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
    """(logits, target) -> (loss, parts, count). A target that is no word is an error of the
    device, as in torch."""
    logits, target, (ignore_index, mean) = call
    if not _is_served(logits, target):
        return None
    (M, V), where = logits.shape, logits.device
    config = tuning.lookup("portable_cross_entropy_fwd", where, V=V)
    constexprs, options = named(_loss_of_rows_kernel, V=V, **config)
    rows = Launch(
        _loss_of_rows_kernel, M, where, numbers=(M, ignore_index), constexprs=constexprs,
        options=options, guarded=True,
    )  # fmt: skip
    add = Launch(
        _loss_kernel, 1, where, numbers=(M, ignore_index), constexprs=(V, mean, 1024),
        options=(("num_warps", 4),), guarded=True,
    )  # fmt: skip
    said = f"targets must be {ignore_index} or 0 to {V - 1}"

    def run(logits, target):
        parts, losses, loss, count = [
            logits.new_empty(shape, dtype=torch.float32) for shape in ((2, M), (M,), (), ())
        ]
        known = target.new_ones((), dtype=torch.int32)
        rows(logits, target, parts, losses)
        add(losses, target, loss, count, known)
        torch._assert_async(known, said)
        return loss, parts, count

    return run


def prepare_cross_entropy_bwd(call: CrossEntropyGradient) -> Optional[Callable]:
    """(logits, target, parts, count, dloss) -> dlogits: one launch."""
    logits, target, parts, count, dloss, (ignore_index, mean) = call
    if not _is_served(logits, target) or not served(parts, count, dloss):
        return None
    (M, V), where = logits.shape, logits.device
    config = tuning.lookup("portable_cross_entropy_bwd", where, V=V)
    constexprs, options = named(_logits_gradient_kernel, V=V, MEAN=mean, **config)
    blocks = M * cdiv(V, config["BLOCK"])
    gradient = Launch(
        _logits_gradient_kernel, blocks, where, numbers=(M, ignore_index), constexprs=constexprs,
        options=options, guarded=True,
    )  # fmt: skip

    def run(logits, target, parts, count, dloss):
        out = torch.empty_like(logits)
        gradient(logits, target, parts, count, dloss, out)
        return out

    return run
