"""The kernels of losses over a vocabulary: statistics of rows of logits, and any gradient of them.

    z = logits scale, or softcap tanh(logits scale / softcap)
    m = max z,  rest = log sum exp(z - m),  p = exp(z - m - rest)
    dlogits = (a [v = target] + b p + c p (z - m) + d) scale (1 - (z / softcap)^2)

Every function of a row's log-probabilities that this room has is a function of the row's
statistics, so four coefficients a row give its gradient. Rows whose target does not count have
coefficients of zero and a gradient of zeros, whatever their logits are.

Logits are read in their own dtype and computed in fp32. Sizes: M targets, V words of a vocabulary,
N words of a piece of it.
"""

import torch
import triton
import triton.language as tl

from ...runtime import tuning
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv

LOWEST = tl.constexpr(-3.0e38)  # finite, so that minus infinity has a distance from it
LEAST, MOST = 3, 5  # statistics of a row


@triton.jit
def _capped(x, cap, CAP: tl.constexpr):
    """cap tanh(x / cap), where there is a cap."""
    if CAP:
        e = tl.exp(-2.0 * tl.abs(x) / cap)
        x = tl.where(x < 0, -cap, cap) * ((1.0 - e) / (1.0 + e))
    return x


@triton.jit(do_not_specialize=["M", "ignore_index"])
def rows_kernel(
    logits_ptr,  # [rows, V], a row every `stride` numbers
    target_ptr,  # [rows]
    stats_ptr,  # [3 or 5, M] from this piece's first row on
    weight_ptr,  # [], or None: with it the loss's gradient times this replaces the logits
    M, ignore_index,
    stride,
    scale, cap, smoothing, z_loss,
    V: tl.constexpr, CAP: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m, rest and z[target] - m of a row, the last NaN for a target that is no word. MORE: also
    sum p (z - m) and the mean of z - m."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    target = tl.load(target_ptr + row)
    known = (target >= 0) & (target < V)
    # here: behind the loop a warp could read it after another has stored the gradient there
    own = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32) * scale
    own = _capped(own, cap, CAP)
    # every lane has a maximum and sums of its own, which are joined at the end
    most = LOWEST + tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    far = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for v in range(0, V, BLOCK):
        offs = v + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + offs, mask=offs < V, other=float("-inf")).to(tl.float32) * scale
        z = tl.where(offs < V, _capped(x, cap, CAP), float("-inf"))
        above = z > most
        apart = -tl.abs(z - most)
        e = tl.exp(apart)  # of the one that is less
        if MORE:
            less = tl.where(e > 0, e * apart, 0.0)
            far = tl.where(above, e * far + tl.where(total > 0, less * total, 0.0), far + less)
            plain += tl.where(offs < V, z, 0.0)
        total = tl.where(above, total * e + 1.0, total + e)
        most = tl.maximum(most, z)
    m = tl.max(most, 0)
    share = tl.exp(most - m)
    s = tl.sum(tl.where(total != 0, total * share, 0.0), 0)
    rest = tl.where(m == float("inf"), float("nan"), tl.log(s))
    own -= m
    tl.store(stats_ptr + row, m)
    tl.store(stats_ptr + M + row, rest)
    tl.store(stats_ptr + 2 * M + row, own)
    if MORE:
        shifted = tl.where(share > 0, share * (far + total * (most - m)), 0.0)
        tl.store(stats_ptr + 3 * M + row, tl.sum(shifted, 0) / s)
        tl.store(stats_ptr + 4 * M + row, tl.sum(plain, 0) / V - m)
    if weight_ptr is not None:
        w = tl.load(weight_ptr)
        b = 1.0 + 2.0 * z_loss * (m + rest)
        counts = target != ignore_index
        for v in range(0, V, BLOCK):
            offs = v + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + offs, mask=offs < V, other=0.0).to(tl.float32) * scale
            z = _capped(x, cap, CAP)
            g = b * tl.exp(z - m - rest) - tl.where(offs == target, 1.0 - smoothing, 0.0)
            g = (g - smoothing / V) * (w * scale)
            if CAP:
                g *= 1.0 - (z / cap) * (z / cap)
            g = tl.where(counts, g, 0.0).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + offs, g, mask=offs < V)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def loss_kernel(
    stats_ptr,  # [3 or 5, M]
    target_ptr,  # [M]
    loss_ptr,  # []
    count_ptr,  # []
    known_ptr,  # []: left alone if all targets that count are words
    M, ignore_index, smoothing, z_loss,
    V: tl.constexpr, MEAN: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss, and the number of targets that count, by one program."""
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, M, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        here = rows < M
        target = tl.load(target_ptr + rows, mask=here, other=ignore_index)
        counts = target != ignore_index
        rest = tl.load(stats_ptr + M + rows, mask=here, other=0.0)
        own = tl.load(stats_ptr + 2 * M + rows, mask=here, other=0.0)
        loss = rest - (1.0 - smoothing) * own
        if MORE:
            mean = tl.load(stats_ptr + 4 * M + rows, mask=here, other=0.0)
            lse = tl.load(stats_ptr + rows, mask=here, other=0.0) + rest
            loss += z_loss * lse * lse - smoothing * mean
        total += tl.where(counts, loss, 0.0)
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
def coefficients_kernel(
    target_ptr,  # [M]
    stats_ptr,  # [3 or 5, M]
    coefficients_ptr,  # [4, M]
    dloss_ptr,  # [] or None: of the loss
    count_ptr,  # [] or None: with a mean
    dlog_prob_ptr,  # [M] or None: of z[target] - m - rest
    dmean_ptr,  # [M] or None: of the mean of z - m - rest
    dlse_ptr,  # [M] or None: of m + rest
    dentropy_ptr,  # [M] or None: of rest - sum p (z - m)
    M, ignore_index, smoothing, z_loss,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a, b, c, d of each row."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = rows < M
    counts = here & (tl.load(target_ptr + rows, mask=here, other=ignore_index) != ignore_index)
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    c = tl.zeros((BLOCK,), tl.float32)
    d = tl.zeros((BLOCK,), tl.float32)
    if dloss_ptr is not None:
        w = tl.load(dloss_ptr).to(tl.float32)
        if count_ptr is not None:
            w = tl.div_rn(w, tl.load(count_ptr))
        lse = tl.load(stats_ptr + rows, mask=here, other=0.0)
        lse += tl.load(stats_ptr + M + rows, mask=here, other=0.0)
        a -= (1.0 - smoothing) * w
        b += (1.0 + 2.0 * z_loss * lse) * w
        d -= smoothing / V * w
    if dlog_prob_ptr is not None:
        g = tl.load(dlog_prob_ptr + rows, mask=here, other=0.0).to(tl.float32)
        a += g
        b -= g
    if dmean_ptr is not None:
        g = tl.load(dmean_ptr + rows, mask=here, other=0.0).to(tl.float32)
        d += g / V
        b -= g
    if dlse_ptr is not None:
        b += tl.load(dlse_ptr + rows, mask=here, other=0.0).to(tl.float32)
    if dentropy_ptr is not None:
        g = tl.load(dentropy_ptr + rows, mask=here, other=0.0).to(tl.float32)
        b += tl.load(stats_ptr + 3 * M + rows, mask=here, other=0.0) * g
        c -= g
    tl.store(coefficients_ptr + rows, tl.where(counts, a, 0.0), mask=here)
    tl.store(coefficients_ptr + M + rows, tl.where(counts, b, 0.0), mask=here)
    tl.store(coefficients_ptr + 2 * M + rows, tl.where(counts, c, 0.0), mask=here)
    tl.store(coefficients_ptr + 3 * M + rows, tl.where(counts, d, 0.0), mask=here)


@triton.jit(do_not_specialize=["M", "N", "first", "blocks"])
def gradient_kernel(
    logits_ptr,  # [M, N], a row every `stride` numbers
    target_ptr,  # [M]
    stats_ptr,  # [3 or 5, M]
    coefficients_ptr,  # [4, M]
    out_ptr,  # [M, N] as the logits, or the same
    M, N, first, blocks,
    stride,
    scale, cap,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of BLOCK logits of a row, which are of words from `first` on."""
    row = tl.program_id(0) // blocks
    offs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * stride + offs
    # not masked by the coefficients, for which it would wait
    x = tl.load(logits_ptr + at, mask=offs < N, other=0.0).to(tl.float32) * scale
    a = tl.load(coefficients_ptr + row)
    b = tl.load(coefficients_ptr + M + row)
    c = tl.load(coefficients_ptr + 2 * M + row)
    d = tl.load(coefficients_ptr + 3 * M + row)
    some = (a != 0) | (b != 0) | (c != 0) | (d != 0)
    z = _capped(x, cap, CAP)
    m = tl.load(stats_ptr + row)
    p = tl.exp(z - m - tl.load(stats_ptr + M + row))
    g = b * p + d + tl.where(first + offs == tl.load(target_ptr + row), a, 0.0)
    g += c * tl.where(p > 0, p * (z - m), 0.0)
    g *= scale
    if CAP:
        g *= 1.0 - (z / cap) * (z / cap)
    tl.store(out_ptr + at, tl.where(some, g, 0.0).to(out_ptr.dtype.element_ty), mask=offs < N)


@triton.jit(do_not_specialize=["n"])
def scale_kernel(
    x_ptr,  # [n]
    dloss_ptr,  # []
    back_ptr,  # []
    out_ptr,  # [n]
    n,
    BLOCK: tl.constexpr,
):
    """x dloss back in fp32, rounded once."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(dloss_ptr).to(tl.float32) * tl.load(back_ptr)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, (x * factor).to(out_ptr.dtype.element_ty), mask=offs < n)


class Kernels:
    """The launches for rows of a vocabulary of V words on one device.

    stride: between rows of logits. softcap, smoothing, z_loss: 0 for none. more: all statistics.
    """

    def __init__(
        self, V: int, M: int, where: torch.device, ignore_index: int, stride: int,
        scale: float = 1.0, softcap: float = 0.0, smoothing: float = 0.0, z_loss: float = 0.0,
        more: bool = False,
    ):  # fmt: skip
        self.V, self.M, self.where = V, M, where
        self.ignore_index, self.stride = ignore_index, stride
        self.values = (scale, softcap)
        self.form = (smoothing, z_loss)
        self.cap, self.more = softcap > 0, more
        self.count = MOST if more else LEAST
        self.said = f"targets must be {ignore_index} or 0 to {V - 1}"

    def rows(self, rows: int) -> Launch:
        """(logits, target, stats, weight or None) -> nothing, for so many rows."""
        config = tuning.lookup("portable_cross_entropy_fwd", self.where, V=self.V)
        numbers = (self.M, self.ignore_index, self.stride, *self.values, *self.form)
        return Launch(
            rows_kernel, rows, self.where, numbers=numbers, V=self.V, CAP=self.cap, MORE=self.more,
            **config,
        )  # fmt: skip

    def loss(self, mean: bool) -> Launch:
        """(stats, target, loss, count, known) -> nothing."""
        return Launch(
            loss_kernel, 1, self.where, numbers=(self.M, self.ignore_index, *self.form),
            constexprs=(self.V, mean, self.more, 1024), options=(("num_warps", 4),),
        )  # fmt: skip

    def coefficients(self) -> Launch:
        """(target, stats, coefficients, dloss, count, dlog_prob, dmean, dlse, dentropy)."""
        return Launch(
            coefficients_kernel, cdiv(self.M, 512), self.where,
            numbers=(self.M, self.ignore_index, *self.form), constexprs=(self.V, 512),
            options=(("num_warps", 4),),
        )  # fmt: skip

    def gradient(self, N: int, first: int, stride: int) -> Launch:
        """(logits, target, stats, coefficients, out) -> nothing, for N words from `first` on."""
        config = tuning.lookup("portable_cross_entropy_bwd", self.where, V=self.V)
        blocks = cdiv(N, config["BLOCK"])
        numbers = (self.M, N, first, blocks, stride, *self.values)
        return Launch(
            gradient_kernel, self.M * blocks, self.where, numbers=numbers, CAP=self.cap, **config,
        )  # fmt: skip


def scaled(x: torch.Tensor, dloss, back, dtype: torch.dtype) -> torch.Tensor:
    """x dloss back in this dtype, as a new tensor; the product is fp32."""
    out = torch.empty_like(x, dtype=dtype)
    n = x.numel()
    Launch(
        scale_kernel, cdiv(n, 8192), x.device, numbers=(n,), constexprs=(8192,),
        options=(("num_warps", 8),),
    )(x, dloss, back, out)  # fmt: skip
    return out
