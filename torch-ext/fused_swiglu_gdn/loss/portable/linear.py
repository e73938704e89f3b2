"""Losses of hidden states and the weight of their output projection, whose logits never exist at
once, or only until the backward pass. The products are torch's.

    "kept"   logits [M, V] live until the backward, which writes their gradient over them
    "rows"   pieces of rows, each with its gradient in the forward; dweight is summed in fp32, and
             the backward multiplies by dloss
    tokens   statistics in pieces of rows; the backward makes logits again for pieces of the
             vocabulary: any gradient per token, dweight without a sum, dhidden summed in fp32

"rows" does not know dloss in the forward. Its gradients are those times 2^k / count, at least 1 and
below 2 (fp16: 2^8 more), and the backward multiplies by dloss 2^-k: where dloss is a power of two,
as a loss scaler's factor is, no digit is lost.

Sizes: M targets, V words, H the width.
"""

from typing import Callable, List, Optional, Tuple

import torch
from torch import Tensor

from ...runtime.dtypes import served
from ...runtime.products import ADDS_TO_FP32, add_product, linear
from ...runtime.sizes import cdiv
from ..call import LinearLoss, LinearLossGradient, TokenLogProbs, TokenLogProbsGradient
from .rows import Kernels, scaled

ALIGNED = 64  # a row of logits begins at multiples of so many, as cuBLAS and vector loads want it


def _is_served(call) -> bool:
    hidden, weight, bias, target = call[:4]
    tensors = [x for x in (hidden, weight, bias) if x is not None]
    return (
        served(*tensors)
        and len({x.dtype for x in tensors}) == 1
        and hidden.numel() > 0
        and weight.numel() > 0
        and target.dtype is torch.int64
        and target.is_contiguous()
        and hidden.shape[0] * weight.shape[0] < 2**40
    )


def _pieces(n: int, step: int) -> List[Tuple[int, int]]:
    return [(i, min(i + step, n)) for i in range(0, n, step)]


def _wide(a: Tensor, b: Tensor, wide: bool, out: Optional[Tensor] = None) -> Tensor:
    """a b, in fp32 where wide."""
    if not wide or a.dtype is torch.float32:
        return torch.mm(a, b, out=out)
    if a.is_cuda and ADDS_TO_FP32:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    found = torch.mm(a.float(), b.float())
    return found if out is None else out.copy_(found)


def _mantissa(count: Tensor, mean: bool, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """The factor of gradients that the forward makes, and what undoes the power of two in it."""
    more = 256.0 if dtype is torch.float16 else 1.0
    if not mean:
        one = torch.ones_like(count)
        return one * more, one / more
    power = torch.exp2(torch.ceil(torch.log2(count.clamp(min=1)))) * more
    return power / count, 1 / power


class _Form:
    """Common parts of the calls of one operation: sizes, launches, memory for logits."""

    def __init__(self, call, more: bool):
        hidden, weight, options = call.hidden, call.weight, call.options
        (self.M, self.H), self.V = hidden.shape, weight.shape[0]
        self.width = cdiv(self.V, ALIGNED) * ALIGNED
        self.kernels = Kernels(
            self.V, self.M, hidden.device, options.ignore_index, self.width, options.scale,
            options.softcap, getattr(options, "smoothing", 0.0), getattr(options, "z_loss", 0.0),
            more,
        )  # fmt: skip
        self.rows: dict = {}  # launches for so many rows

    def statistics(self, logits, target, stats, weight=None) -> None:
        count = len(target)
        if count not in self.rows:
            self.rows[count] = self.kernels.rows(count)
        self.rows[count](logits, target, stats, weight)

    def known(self, target: Tensor) -> None:
        """Asserts on the device that the targets that count are words."""
        right = (target >= 0) & (target < self.V) | (target == self.kernels.ignore_index)
        torch._assert_async(right.all(), self.kernels.said)


def prepare_linear_loss_fwd(call: LinearLoss) -> Optional[Callable]:
    """(hidden, weight, bias, target) -> (loss, count, stats, kept, dweight, dbias)."""
    if not _is_served(call):
        return None
    *_, o = call
    dtype = call.hidden.dtype
    form = _Form(call, o.smoothing > 0 or o.z_loss > 0)
    kernels, M, V = form.kernels, form.M, form.V
    add = kernels.loss(o.mean)
    step = M if o.way == "kept" else min(M, o.rows)
    wide = dtype is torch.float16

    def run(hidden, weight, bias, target):
        new = hidden.new_empty
        stats = new((kernels.count, M), dtype=torch.float32)
        loss, count = new((), dtype=torch.float32), new((), dtype=torch.float32)
        known = target.new_ones((), dtype=torch.int32)
        logits = new((step, form.width))
        kept = dweight = dbias = factor = None
        if o.way == "kept":
            kept = logits
        elif o.way:
            number = (target != o.ignore_index).sum().float()
            factor, _ = _mantissa(number, o.mean, dtype)
            if o.of_hidden:
                kept = torch.empty_like(hidden, dtype=torch.float32 if wide else dtype)
            if o.of_weight:
                dweight = torch.zeros_like(weight, dtype=torch.float32)
            if o.of_bias:
                dbias = torch.zeros_like(bias, dtype=torch.float32)
        for i, j in _pieces(M, step):
            z = linear(hidden[i:j], weight, bias, logits[: j - i, :V])
            form.statistics(z, target[i:j], stats[:, i:], factor)
            if o.way == "rows":
                if o.of_hidden:
                    _wide(z, weight, wide, kept[i:j])
                if o.of_weight:
                    add_product(dweight, z.t(), hidden[i:j])
                if o.of_bias:
                    dbias += z.sum(0, dtype=torch.float32)
        add(stats, target, loss, count, known)
        torch._assert_async(known, kernels.said)
        return loss, count, stats, kept, dweight, dbias

    return run


def prepare_linear_loss_bwd(call: LinearLossGradient) -> Optional[Callable]:
    """(hidden, weight, bias, target, stats, count, kept, dweight, dbias, dloss) -> gradients of
    hidden, weight and bias. Logits that were kept are overwritten; None of them: a backward has
    done so, and they are made again."""
    if not _is_served(call):
        return None
    o, dtype = call.options, call.hidden.dtype
    if o.way == "rows":

        def scale(hidden, weight, bias, target, stats, count, kept, dweight, dbias, dloss):
            _, back = _mantissa(count, o.mean, dtype)
            found = (kept, dweight, dbias)
            return tuple([None if x is None else scaled(x, dloss, back, dtype) for x in found])

        return scale
    form = _Form(call, o.smoothing > 0 or o.z_loss > 0)
    M, V = form.M, form.V
    coefficients, gradient = form.kernels.coefficients(), form.kernels.gradient(V, 0, form.width)
    none = (None,) * 4

    def run(hidden, weight, bias, target, stats, count, kept, dweight, dbias, dloss):
        if kept is None:
            kept = hidden.new_empty((M, form.width))
            linear(hidden, weight, bias, kept[:, :V])
        z, found = kept[:, :V], stats.new_empty((4, M))
        coefficients(target, stats, found, dloss, count if o.mean else None, *none)
        gradient(z, target, stats, found, z)
        return (
            torch.mm(z, weight) if o.of_hidden else None,
            torch.mm(z.t(), hidden) if o.of_weight else None,
            z.sum(0) if o.of_bias else None,
        )

    return run


def prepare_token_log_probs_fwd(call: TokenLogProbs) -> Optional[Callable]:
    """(hidden, weight, bias, target) -> (log_prob, lse, mean, entropy, stats)."""
    if not _is_served(call):
        return None
    o = call.options
    form = _Form(call, o.more)
    M, V = form.M, form.V
    step = min(M, o.rows)

    def run(hidden, weight, bias, target):
        logits = hidden.new_empty((step, form.width))
        stats = hidden.new_empty((form.kernels.count, M), dtype=torch.float32)
        for i, j in _pieces(M, step):
            z = linear(hidden[i:j], weight, bias, logits[: j - i, :V])
            form.statistics(z, target[i:j], stats[:, i:])
        form.known(target)
        counts = target != o.ignore_index
        m, rest, own, *more = stats
        found = [own - rest, m + rest, *((more[1] - rest, rest - more[0]) if more else ())]
        found = [torch.where(counts, x, 0.0) for x in found]
        return (*found, *((None,) * (4 - len(found))), stats)

    return run


def prepare_token_log_probs_bwd(call: TokenLogProbsGradient) -> Optional[Callable]:
    """(hidden, weight, bias, target, stats, dlog_prob, dlse, dmean, dentropy) -> gradients of
    hidden, weight and bias."""
    if not _is_served(call):
        return None
    o = call.options
    form = _Form(call, o.more)
    M, V = form.M, form.V
    count = cdiv(V, max(256, o.rows * V // M))  # pieces with as many logits as rows have
    step = cdiv(cdiv(V, count), 256) * 256
    coefficients = form.kernels.coefficients()
    width = min(step, cdiv(V, ALIGNED) * ALIGNED)
    pieces = [(i, j, form.kernels.gradient(j - i, i, width)) for i, j in _pieces(V, step)]

    def run(hidden, weight, bias, target, stats, dlog_prob, dlse, dmean, dentropy):
        found = stats.new_empty((4, M))
        given = [x if x is None else x.contiguous() for x in (dlog_prob, dmean, dlse, dentropy)]
        coefficients(target, stats, found, None, None, *given)
        dhidden = torch.zeros_like(hidden, dtype=torch.float32) if o.of_hidden else None
        dweight = torch.empty_like(weight) if o.of_weight else None
        dbias = torch.empty_like(bias) if o.of_bias else None
        logits = hidden.new_empty((M, width))
        for i, j, gradient in pieces:
            z = logits[:, : j - i]
            linear(hidden, weight[i:j], None if bias is None else bias[i:j], z)
            gradient(z, target, stats, found, z)
            if o.of_weight:
                torch.mm(z.t(), hidden, out=dweight[i:j])
            if o.of_hidden:
                add_product(dhidden, z, weight[i:j])
            if o.of_bias:
                torch.sum(z, 0, out=dbias[i:j])
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight, dbias

    return run
