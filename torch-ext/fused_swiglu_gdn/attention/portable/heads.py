"""Loads and stores of heads in three parts, for rotary.py and rotary_backward.py.

The first R channels of a head are rotated in P = R / 2 pairs, and U = D - R channels are unchanged:
a tile of heads is [H, P], [H, P] and [H, U]. ANGLES is 0 if channels (i, P + i) are a pair: then
each part is contiguous. If (2 i, 2 i + 1) are a pair, ANGLES says whether the tables have an angle
for 1 or for both (2) of the channels; then all pairs are contiguous and are split in registers. So
all loads are wide.
"""

import triton
import triton.language as tl


@triton.jit
def apart(x, BLOCK_P: tl.constexpr):
    """Splits interleaved pairs [H, 2 BLOCK_P] into two [H, BLOCK_P], fp32."""
    return tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], BLOCK_P, 2)))


@triton.jit
def load_heads(
    x_ptr, heads, stride, H, P: tl.constexpr, U: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_U: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Loads the three parts of rows `heads` below H as fp32, with 0 elsewhere."""
    rows = x_ptr + heads.to(tl.int64)[:, None] * stride
    there = (heads < H)[:, None]
    p = tl.arange(0, BLOCK_P)[None, :]
    u = tl.arange(0, BLOCK_U)[None, :]
    if ANGLES > 0:
        at = tl.arange(0, 2 * BLOCK_P)[None, :]
        first, second = apart(tl.load(rows + at, mask=there & (at < 2 * P), other=0.0), BLOCK_P)
    else:
        first = tl.load(rows + p, mask=there & (p < P), other=0.0).to(tl.float32)
        second = tl.load(rows + P + p, mask=there & (p < P), other=0.0).to(tl.float32)
    rest = tl.load(rows + 2 * P + u, mask=there & (u < U), other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit
def store_heads(
    y_ptr, heads, stride, H, first, second, rest, P: tl.constexpr, U: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_U: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Stores the three parts to rows `heads` below H."""
    rows = y_ptr + heads.to(tl.int64)[:, None] * stride
    there = (heads < H)[:, None]
    p = tl.arange(0, BLOCK_P)[None, :]
    u = tl.arange(0, BLOCK_U)[None, :]
    dtype = y_ptr.dtype.element_ty
    if ANGLES > 0:
        at = tl.arange(0, 2 * BLOCK_P)[None, :]
        tl.store(rows + at, tl.interleave(first, second).to(dtype), mask=there & (at < 2 * P))
    elif P > 0:
        tl.store(rows + p, first.to(dtype), mask=there & (p < P))
        tl.store(rows + P + p, second.to(dtype), mask=there & (p < P))
    if U > 0:
        tl.store(rows + 2 * P + u, rest.to(dtype), mask=there & (u < U))


@triton.jit
def load_weight(
    w_ptr, heads, H, WHOLE: tl.constexpr, P: tl.constexpr, U: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_U: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Loads the parts of a norm's weight, [1, ..], or [H, ..] for a norm over all heads."""
    if WHOLE:
        return load_heads(w_ptr, heads, 2 * P + U, H, P, U, BLOCK_P, BLOCK_U, ANGLES)
    else:
        return load_heads(w_ptr, tl.arange(0, 1), 0, 1, P, U, BLOCK_P, BLOCK_U, ANGLES)


@triton.jit
def mean_of_heads(first, second, rest, heads, H, D: tl.constexpr, WHOLE: tl.constexpr):
    """Mean over each head [H, 1], or over all heads [1, 1], of three parts."""
    sums = tl.sum(first, 1) + tl.sum(second, 1) + tl.sum(rest, 1)
    if WHOLE:
        return tl.sum(sums, 0, keep_dims=True)[:, None] / (H * D)
    else:
        return sums[:, None] / D


@triton.jit
def rms_reciprocal(first, second, rest, heads, H, eps, D: tl.constexpr, WHOLE: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps), [H, 1] or [1, 1]; 1 for rows that are no heads."""
    square = mean_of_heads(
        first * first, second * second, rest * rest, heads, H, D, WHOLE
    )  # fmt: skip
    if WHOLE:
        return tl.rsqrt(square + eps)
    else:
        return tl.rsqrt(tl.where((heads < H)[:, None], square + eps, 1.0))


@triton.jit
def load_turn(cos_ptr, sin_ptr, at, P: tl.constexpr, BLOCK_P: tl.constexpr, ANGLES: tl.constexpr):
    """Loads cos and sin of both channels of each pair, [1, P] fp32; at: offset of the token's
    row."""
    p = tl.arange(0, BLOCK_P)[None, :]
    if ANGLES == 2:
        both = tl.arange(0, 2 * BLOCK_P)[None, :]
        c1, c2 = apart(tl.load(cos_ptr + at + both, mask=both < 2 * P, other=0.0), BLOCK_P)
        s1, s2 = apart(tl.load(sin_ptr + at + both, mask=both < 2 * P, other=0.0), BLOCK_P)
    else:
        FAR: tl.constexpr = 0 if ANGLES == 1 else P
        c1 = tl.load(cos_ptr + at + p, mask=p < P, other=0.0).to(tl.float32)
        c2 = tl.load(cos_ptr + at + FAR + p, mask=p < P, other=0.0).to(tl.float32)
        s1 = tl.load(sin_ptr + at + p, mask=p < P, other=0.0).to(tl.float32)
        s2 = tl.load(sin_ptr + at + FAR + p, mask=p < P, other=0.0).to(tl.float32)
    return c1, c2, s1, s2
