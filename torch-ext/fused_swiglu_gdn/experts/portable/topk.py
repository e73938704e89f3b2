"""Top-k routing in one launch: a program, of one warp, reads the logits of one token.

Sizes: T tokens, E experts, K of them chosen.
"""

import functools
from typing import Callable, Optional, Tuple

import torch
import triton
import triton.language as tl

from ...runtime.dtypes import SERVED, served
from ...runtime.launch import Launch
from ..call import LEAST, TopkOptions


@triton.jit
def _scores(logits_ptr, token, E, SOFTMAX: tl.constexpr, EXPERTS: tl.constexpr):
    """(logits, scores) [EXPERTS] fp32 of a token; -inf and 0 past the last expert."""
    e = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + token * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, 0))
        return logits, scores / tl.sum(scores, 0)
    return logits, 1.0 / (1.0 + tl.exp(-logits))


@triton.jit
def _ranked(choice, e, EXPERTS: tl.constexpr):
    """Sort keys, int64, the largest for the first choice.

    They order by value with NaN above all; among equal values the lower index comes first; indices
    past the last expert come last.
    """
    choice = tl.where(choice == 0.0, 0.0, choice)  # -0 is no less than 0
    bits = choice.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(choice != choice, 0x7FFFFFFF, bits)
    return bits.to(tl.int64) * 4294967296 + (EXPERTS - 1 - e)


@triton.jit(do_not_specialize=["E"])
def _topk_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E], or None
    weights_ptr,  # [T, K]
    ids_ptr,  # [T, K] int64
    scale,
    E,
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # K, rounded up to a power of two
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LEAST: tl.constexpr,
    EXPERTS: tl.constexpr,  # E, rounded up
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    logits, scores = _scores(logits_ptr, token, E, SOFTMAX, EXPERTS)
    choice = logits
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        choice = tl.where(e < E, scores + bias, float("-inf"))
    keys = _ranked(choice, e, EXPERTS)
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    weights = tl.zeros((SLOTS,), tl.float32)
    for k in tl.static_range(K):
        first = keys == tl.max(keys, 0)  # [EXPERTS], of one
        ids = tl.where(slot == k, tl.sum(tl.where(first, e, 0), 0), ids)
        weights = tl.where(slot == k, tl.sum(tl.where(first, scores, 0.0), 0), weights)
        keys = tl.where(first, -0x7FFFFFFFFFFFFFFF, keys)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + LEAST)
    weights = (weights * scale).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + token * K + slot, weights, mask=slot < K)
    tl.store(ids_ptr + token * K + slot, ids.to(tl.int64), mask=slot < K)


@triton.jit(do_not_specialize=["E"])
def _topk_backward_kernel(
    dweights_ptr,  # [T, K]
    logits_ptr,  # [T, E]
    ids_ptr,  # [T, K]
    dlogits_ptr,  # [T, E]
    scale,
    E,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LEAST: tl.constexpr,
    EXPERTS: tl.constexpr,
):
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
        total = tl.sum(tl.where(chosen, scores, 0.0), 0) + LEAST
        mean = tl.sum(tl.where(chosen, gradient * scores, 0.0), 0) / total
        gradient = tl.where(chosen, (gradient - mean) / total, 0.0)
    if SOFTMAX:
        gradient = scores * (gradient - tl.sum(gradient * scores, 0))
    else:
        gradient = gradient * scores * (1.0 - scores)
    gradient = gradient.to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + token * E + e, gradient, mask=e < E)


def _width(E: int) -> int:
    return max(32, triton.next_power_of_2(E))


@functools.lru_cache(maxsize=1024)
def _launch(where, T: int, E: int, K: int, options: TopkOptions) -> Launch:
    _, scoring, renormalize, scale, _ = options
    slots = triton.next_power_of_2(K)
    constexprs = (K, slots, scoring == "softmax", renormalize, LEAST[scoring], _width(E))
    return Launch(
        _topk_kernel, T, where, numbers=(scale, E), constexprs=constexprs,
        options=(("num_warps", 1),),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _backward_launch(where, T: int, E: int, K: int, options: TopkOptions) -> Launch:
    _, scoring, renormalize, scale, _ = options
    constexprs = (K, scoring == "softmax", renormalize, LEAST[scoring], _width(E))
    return Launch(
        _topk_backward_kernel, T, where, numbers=(scale, E), constexprs=constexprs,
        options=(("num_warps", 1),),
    )  # fmt: skip


def supports_topk_fwd(logits, bias, options) -> bool:
    fits = 0 < logits.shape[1] <= 1024 and options.top_k <= 64 and logits.shape[0] < 2**31
    return fits and served(logits, bias) and options.dtype in SERVED


def supports_topk_bwd(logits, *args) -> bool:
    """True if the dtype is supported; takes the arguments of either direction."""
    return logits.dtype in SERVED


def topk_fwd(
    logits: torch.Tensor,  # [T, E]
    bias: Optional[torch.Tensor],  # [E]
    options: TopkOptions,
) -> Tuple[torch.Tensor, torch.Tensor]:  # weights [T, K], ids [T, K] int64
    logits = logits.contiguous()
    (T, E), K = logits.shape, options.top_k
    weights = logits.new_empty((T, K), dtype=options.dtype)
    ids = logits.new_empty((T, K), dtype=torch.int64)
    start = _launch(logits.device, T, E, K, options)
    start(logits, None if bias is None else bias.contiguous(), weights, ids)
    return weights, ids


def plan_topk_fwd(logits, bias, options) -> Callable:
    """Returns topk_fwd as a function of the tensors for all calls that match this one."""
    return lambda logits, bias: topk_fwd(logits, bias, options)


def topk_bwd(
    dweights: torch.Tensor,  # [T, K]
    logits: torch.Tensor,  # [T, E]
    ids: torch.Tensor,  # [T, K]
    options: TopkOptions,
) -> torch.Tensor:  # [T, E]
    dweights, logits = dweights.contiguous(), logits.contiguous()
    dlogits = torch.empty_like(logits)
    start = _backward_launch(logits.device, *logits.shape, ids.shape[1], options)
    start(dweights, logits, ids, dlogits)
    return dlogits
