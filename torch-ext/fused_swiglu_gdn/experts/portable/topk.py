"""Top-k routing in one launch: a program, of one warp, reads the logits of one token.

Sizes: T tokens, E experts, K of them chosen. grouped.py has the kernel for groups of experts.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.dtypes import SERVED, served
from ...runtime.launch import Launch
from ...runtime.primitives import after_predecessor
from ...runtime.sizes import next_power_of_2
from ..call import Topk, TopkGradient
from .grouped import _grouped_topk_kernel
from .ranks import _ranked, _rounded, _store_best


@triton.jit
def _scores(logits_ptr, token, E, SOFTMAX: tl.constexpr, EXPERTS: tl.constexpr):
    """(logits, scores) [EXPERTS] fp32 of a token; -inf and 0 past the last expert."""
    e = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + token * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, 0))
        return logits, scores / tl.sum(scores, 0)
    return logits, 1.0 / (1.0 + tl.exp(-logits))


@triton.jit(do_not_specialize=["E"])
def _topk_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E], or None
    weights_ptr,  # [T, K]
    ids_ptr,  # [T, K] int64
    scale, E,
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # K, rounded up to a power of two
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, EPS: tl.constexpr,
    EXPERTS: tl.constexpr,  # E, rounded up
    ROUNDS: tl.constexpr,  # every step to the dtype of logits
    PDL: tl.constexpr,  # the next launch may begin before this one has ended
):  # fmt: skip
    after_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    logits, scores = _scores(logits_ptr, token, E, SOFTMAX, EXPERTS)
    choice = logits
    if ROUNDS:
        scores = _rounded(scores, logits_ptr.dtype.element_ty)
        choice = tl.where(e < E, scores, float("-inf"))
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        choice = scores + bias
        if ROUNDS and bias_ptr.dtype == logits_ptr.dtype:
            choice = _rounded(choice, logits_ptr.dtype.element_ty)
        choice = tl.where(e < E, choice, float("-inf"))
    keys = _ranked(choice, e, EXPERTS)
    out = (weights_ptr, ids_ptr)
    dtype: tl.constexpr = logits_ptr.dtype.element_ty if ROUNDS else None
    _store_best(out, token, keys, e, scores, scale, K, SLOTS, RENORMALIZE, EPS, dtype)


@triton.jit(do_not_specialize=["E"])
def _topk_backward_kernel(
    dweights_ptr,  # [T, K]
    logits_ptr,  # [T, E]
    ids_ptr,  # [T, K]
    dlogits_ptr,  # [T, E]
    scale, E,
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, EPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,  # as above
):  # fmt: skip
    after_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    _, scores = _scores(logits_ptr, token, E, SOFTMAX, EXPERTS)
    gradient = tl.zeros((EXPERTS,), tl.float32)  # of the scores
    chosen = tl.zeros((EXPERTS,), tl.int1)
    for k in tl.static_range(K):
        here = e == tl.load(ids_ptr + token * K + k)
        dweight = tl.load(dweights_ptr + token * K + k).to(tl.float32)
        gradient = tl.where(here, dweight * scale, gradient)
        chosen = chosen | here
    if RENORMALIZE:
        total = tl.sum(tl.where(chosen, scores, 0.0), 0) + EPS
        mean = tl.sum(tl.where(chosen, gradient * scores, 0.0), 0) / total
        gradient = tl.where(chosen, (gradient - mean) / total, 0.0)
    if SOFTMAX:
        gradient = scores * (gradient - tl.sum(gradient * scores, 0))
    else:
        gradient = gradient * scores * (1.0 - scores)
    gradient = gradient.to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + token * E + e, gradient, mask=e < E)


def _launch(kernel, call, *slots: int) -> Optional[Launch]:
    """The launch of a call or of its gradient, or None if they have no kernels for its sizes."""
    (T, E), options = call.logits.shape, call.options
    K, scoring, renormalize, scale, dtype, *groups, eps, rounds = options
    if not (0 < E <= 1024 and K <= 64 and T < 2**31 and dtype in SERVED and served(call.logits)):
        return None
    constexprs = (K, *slots, scoring == "softmax", renormalize, eps)
    numbers, sizes = (scale, E), (max(32, next_power_of_2(E)),)
    if kernel is _topk_kernel:
        sizes = (*sizes, rounds)
    if kernel is _grouped_topk_kernel:
        if rounds:
            return None
        count, most, by = groups
        parts = next_power_of_2(count), next_power_of_2(E // count)
        if parts[0] * parts[1] > 1024:
            return None
        numbers, sizes = (scale,), (count, E // count, most, by == "top2", *parts)
    pdl = device.overlaps_launches(call.device)
    return Launch(
        kernel, T, call.device, numbers=numbers, constexprs=(*constexprs, *sizes, pdl),
        options=(("num_warps", 1),), guarded=True, early=pdl,
    )  # fmt: skip


def prepare_topk_fwd(call: Topk) -> Optional[Callable]:
    """(logits, bias) -> (weights [T, K], ids [T, K] int64): one launch."""
    T, (K, _, _, _, dtype, count, *_) = call.logits.shape[0], call.options
    form = _topk_kernel if count == 1 else _grouped_topk_kernel
    kernel = _launch(form, call, next_power_of_2(K)) if served(call.bias) else None

    def run(logits, bias):
        weights = logits.new_empty((T, K), dtype=dtype)
        ids = logits.new_empty((T, K), dtype=torch.int64)
        bias = bias if bias is None else bias.contiguous()
        kernel(logits.contiguous(), bias, weights, ids)
        return weights, ids

    return None if kernel is None else run


def prepare_topk_bwd(call: TopkGradient) -> Optional[Callable]:
    """(dweights, logits, ids) -> dlogits [T, E]: one launch."""
    kernel = _launch(_topk_backward_kernel, call)

    def run(dweights, logits, ids):
        logits = logits.contiguous()
        dlogits = torch.empty_like(logits)
        kernel(dweights.contiguous(), logits, ids, dlogits)
        return dlogits

    return None if kernel is None else run
