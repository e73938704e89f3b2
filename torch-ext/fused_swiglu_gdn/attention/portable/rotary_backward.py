"""The gradient of rotary.py in one pass over its inputs.

The transpose of a rotation is the inverse rotation. With n = x rstd and d the gradient of the
rotation's input:

    dn = d (offset + weight)      dx = rstd (dn - n mean(dn n))      dweight = sum over tokens d n

Sizes: B rows, T tokens, HQ and HK heads, D head dim, P = R / 2, U = D - R.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime.copies import contiguous_like
from ...runtime.dtypes import served
from ...runtime.launch import Launch, steps
from ..call import QkGradient, QkNormRope
from .heads import (
    load_heads,
    load_turn,
    load_weight,
    mean_of_heads,
    rms_reciprocal,
    store_heads,
)
from .rotary import head_tiles, on_dense_rows, parts_of, settings, takes, turn_steps


@triton.jit
def _differentiate(
    d_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, dx_ptr, dw_ptr, d_strides, x_strides, turn_strides,
    group, block, tokens, T, eps, offset, H: tl.constexpr, WHOLE: tl.constexpr, P: tl.constexpr,
    U: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_U: tl.constexpr,
    ANGLES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of heads over TILES tokens, and their contribution to the weight's
    gradient."""
    D: tl.constexpr = 2 * P + U
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
    dw1 = tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
    dw2 = tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
    dw3 = tl.zeros((BLOCK_H, BLOCK_U), tl.float32)
    for tile in range(0, TILES):
        row = group * TILES + tile
        there = tl.where(row < tokens, H, 0)  # heads of this token
        row = tl.minimum(row, tokens - 1)
        b = row // T
        t = row % T
        d = d_ptr + b * d_strides[0] + t * d_strides[1]
        first, second, rest = load_heads(
            d, heads, d_strides[2], there, P, U, BLOCK_P, BLOCK_U, ANGLES
        )
        if P > 0:
            at = b * turn_strides[0] + t * turn_strides[1]
            c1, c2, s1, s2 = load_turn(cos_ptr, sin_ptr, at, P, BLOCK_P, ANGLES)
            turned = first * c1 + second * s2
            second = second * c2 - first * s1
            first = turned
        if w_ptr is not None:
            x = x_ptr + b * x_strides[0] + t * x_strides[1]
            n1, n2, n3 = load_heads(x, heads, x_strides[2], there, P, U, BLOCK_P, BLOCK_U, ANGLES)
            rstd = rms_reciprocal(n1, n2, n3, heads, H, eps, D, WHOLE)
            # of heads that are not there eps could be 0, and 0 / 0 would spoil the sums
            rstd = tl.where((heads < there)[:, None], rstd, 1.0)
            n1 *= rstd
            n2 *= rstd
            n3 *= rstd
            dw1 += first * n1
            dw2 += second * n2
            dw3 += rest * n3
            w1, w2, w3 = load_weight(w_ptr, heads, H, WHOLE, P, U, BLOCK_P, BLOCK_U, ANGLES)
            first *= offset + w1
            second *= offset + w2
            rest *= offset + w3
            mean = mean_of_heads(first * n1, second * n2, rest * n3, heads, H, D, WHOLE)
            first = rstd * (first - n1 * mean)
            second = rstd * (second - n2 * mean)
            rest = rstd * (rest - n3 * mean)
        dx = dx_ptr + row * (H * D)
        store_heads(dx, heads, D, there, first, second, rest, P, U, BLOCK_P, BLOCK_U, ANGLES)
    if w_ptr is not None:
        if WHOLE:
            dw = dw_ptr + group * (H * D)
            store_heads(dw, heads, D, H, dw1, dw2, dw3, P, U, BLOCK_P, BLOCK_U, ANGLES)
        else:
            store_heads(
                dw_ptr + (group * BLOCKS + block) * D, tl.arange(0, 1), D, 1,
                tl.sum(dw1, 0, keep_dims=True), tl.sum(dw2, 0, keep_dims=True),
                tl.sum(dw3, 0, keep_dims=True), P, U, BLOCK_P, BLOCK_U, ANGLES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T", "tokens"])
def _qk_norm_rope_bwd_kernel(
    dq_ptr,  # [B, T, HQ, D], the gradient of what was made
    dk_ptr,  # [B, T, HK, D]
    q_ptr,  # [B, T, HQ, D] or None
    k_ptr,  # [B, T, HK, D] or None
    cos_ptr,  # [B or 1, T, R] or None
    sin_ptr,
    q_weight_ptr,  # [D], [HQ * D] or None
    k_weight_ptr,
    d_q_ptr,  # [B, T, HQ, D]
    d_k_ptr,  # [B, T, HK, D]
    d_q_weight_ptr,  # [programs of q, D or HQ * D] fp32 or None
    d_k_weight_ptr,
    dq_strides,  # of B, T, heads
    dk_strides, q_strides, k_strides,
    turn_strides,  # of B, T in cos and sin
    tokens,  # B * T
    T, eps, offset,
    HQ: tl.constexpr, HK: tl.constexpr, P: tl.constexpr, U: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_U: tl.constexpr,
    ANGLES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_Q heads of q or BLOCK_K of k, at TILES tokens."""
    Q: tl.constexpr = (HQ + BLOCK_Q - 1) // BLOCK_Q
    K: tl.constexpr = (HK + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    block = pid % (Q + K)
    group = (pid // (Q + K)).to(tl.int64)  # of TILES tokens
    if block < Q:
        _differentiate(
            dq_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, d_q_ptr, d_q_weight_ptr, dq_strides,
            q_strides, turn_strides, group, block, tokens, T, eps, offset, HQ, WHOLE, P, U, BLOCK_Q,
            BLOCK_P, BLOCK_U, ANGLES, TILES,
        )  # fmt: skip
    else:
        _differentiate(
            dk_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, d_k_ptr, d_k_weight_ptr, dk_strides,
            k_strides, turn_strides, group, block - Q, tokens, T, eps, offset, HK, WHOLE, P, U,
            BLOCK_K, BLOCK_P, BLOCK_U, ANGLES, TILES,
        )  # fmt: skip


def prepare_qk_norm_rope_bwd(call: QkGradient) -> Optional[Callable]:
    """A function of the call's tensors -> the gradients of q, k and the weights: one launch, and a
    sum over programs for each weight."""
    dq, dk, q, k, cos, sin, q_weight, k_weight, options = call
    none = (None, None, None, None)
    like = QkNormRope(dq, dk, cos, sin, q_weight, k_weight, *none, options)
    if not served(q, k) or not takes(like):
        return None
    on_copy = on_dense_rows(prepare_qk_norm_rope_bwd, call, 4)
    if on_copy is not None:
        return on_copy
    (B, T, HQ, D), HK, whole = dq.shape, dk.shape[2], options.whole
    parts = parts_of(D, cos, options.interleaved)
    config = settings("portable_qk_norm_rope_bwd", dq, parts["U"], whole)
    BLOCK_Q, BLOCK_K = head_tiles(config, D, whole, HQ, HK)
    groups, Q, K = -(-B * T // config["TILES"]), -(-HQ // BLOCK_Q), -(-HK // BLOCK_K)
    strides = [(0, 0, 0) if x is None else steps(x) for x in (dq, dk, q, k)]
    numbers = (*strides, turn_steps(cos, B), B * T, T, options.eps, options.offset)
    kernel = Launch(
        _qk_norm_rope_bwd_kernel, groups * (Q + K), dq.device, numbers=numbers, guarded=True,
        HQ=HQ, HK=HK, WHOLE=whole, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K, TILES=config["TILES"],
        num_warps=config["num_warps"], **parts,
    )  # fmt: skip
    make_q, make_k = contiguous_like(dq), contiguous_like(dk)

    def run(*tensors):
        dq, dk, *_, q_weight, k_weight = tensors
        d_q, d_k = make_q(dq), make_k(dk)
        weights = (q_weight, groups * Q), (k_weight, groups * K)
        sums = [
            x if x is None else x.new_empty(rows, x.numel(), dtype=torch.float32)
            for x, rows in weights
        ]
        kernel(*tensors, d_q, d_k, *sums)
        found = [x if x is None else x.sum(0).to(w.dtype) for x, (w, _) in zip(sums, weights)]
        return (d_q, d_k, *found)

    return run
