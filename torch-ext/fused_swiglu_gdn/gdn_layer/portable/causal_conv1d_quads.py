"""The convolution for contiguous tokens of a channel, eight 16-bit tokens at a time.

A tap shifts its inputs by a token, which would leave loads of two bytes. Loads of 64-bit integers,
quads of tokens, are all aligned. A thread takes two of these quads, so that one load has both, and
the quads that reach back W - 1 tokens are loaded once for both. Sizes: T tokens, D channels, W
taps, Q quads of tokens that reach back W - 1, P = BLOCK_T / 8 pairs.
"""

import triton
import triton.language as tl

from ...runtime.primitives import activate


def takes_quads(x, y, *others) -> bool:
    """True if conv_quads can make y from x [B, D, T] where they begin at multiples of 8 bytes; it
    takes no other input."""
    if x.element_size() != 2 or any(other is not None for other in others):
        return False
    return all(
        t.stride(2) == 1 and t.shape[2] % 4 == 0 and t.stride(0) % 4 == 0 and t.stride(1) % 4 == 0
        for t in (x, y)
    )


@triton.jit
def _two_tokens(two, dtype: tl.constexpr):
    """The 16-bit tokens in an int32, the first in its lower half, as fp32."""
    if dtype == tl.bfloat16:  # the upper half of an fp32
        first = (two << 16).to(tl.float32, bitcast=True)
        second = (two & -65536).to(tl.float32, bitcast=True)
    else:
        first = two.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (two >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _four_tokens(four, dtype: tl.constexpr):
    """The tokens of a quad, by 32-bit halves, each of which is a register."""
    return _two_tokens(four.to(tl.int32), dtype) + _two_tokens((four >> 32).to(tl.int32), dtype)


@triton.jit
def _pack_two(first, second, dtype: tl.constexpr, PTX: tl.constexpr):
    """The inverse of _two_tokens, with rounding.

    PTX: converts two at once; the instruction for one takes as long as an exponential.
    """
    if PTX:
        CVT: tl.constexpr = "cvt.rn.bf16x2.f32" if dtype == tl.bfloat16 else "cvt.rn.f16x2.f32"
        return tl.inline_asm_elementwise(
            CVT + " $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        first = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _pack_four(a, b, c, d, dtype: tl.constexpr, PTX: tl.constexpr):
    low = _pack_two(a, b, dtype, PTX).to(tl.int64) & 0xFFFFFFFF
    return low | (_pack_two(c, d, dtype, PTX).to(tl.int64) << 32)


@triton.jit
def conv_quads(
    x_ptr,  # token 0 of the row, first channel of the tile
    y_ptr,  # as x_ptr
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    x_step,  # from a channel to the next
    y_step,
    t0,
    d0,  # the tile's first channel
    T, D,
    W: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y of BLOCK_T tokens and BLOCK_D channels."""
    Q: tl.constexpr = (W + 2) // 4
    P: tl.constexpr = BLOCK_T // 8
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # tokens along the first dimension: there Triton lays the threads of a warp side by side
    quad = t0 // 4 + 2 * tl.arange(0, P)[:, None]  # [P, 1], the first of each pair
    quads = quad[:, :, None] + tl.arange(0, 2)  # [P, 1, 2]
    local_d = tl.arange(0, BLOCK_D)[None, :]
    offs_d = d0 + local_d
    mask_d = offs_d < D
    x_ptrs = x_ptr.to(tl.pointer_type(tl.int64)) + local_d.to(tl.int64) * (x_step // 4)
    y_ptrs = y_ptr.to(tl.pointer_type(tl.int64)) + local_d.to(tl.int64) * (y_step // 4)
    mask = mask_d[:, :, None] & (quads < T // 4)  # [P, BLOCK_D, 2]
    pair = tl.load(x_ptrs[:, :, None] + quads, mask=mask, other=0)
    seen = ()  # tokens 4 (quad - Q) to 4 quad + 7, [P, BLOCK_D] fp32 each
    for back in tl.static_range(Q, 0, -1):
        there = mask_d & (quad >= back) & (quad < T // 4)
        seen += _four_tokens(tl.load(x_ptrs + quad - back, mask=there, other=0), dtype)
    first, second = tl.split(pair)
    seen += _four_tokens(first, dtype) + _four_tokens(second, dtype)
    bias = tl.zeros((1, BLOCK_D), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(W):
        tap = tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)
        taps = taps + (tap,)  # [1, BLOCK_D]
    y = ()
    for i in tl.static_range(8):
        acc = tl.broadcast_to(bias, (P, BLOCK_D))
        for back in tl.static_range(W):
            acc += seen[4 * Q + i - back] * taps[W - 1 - back]
        y = y + (activate(acc, "silu", PTX) if SILU else acc,)
    first = _pack_four(y[0], y[1], y[2], y[3], dtype, PTX)
    second = _pack_four(y[4], y[5], y[6], y[7], dtype, PTX)
    tl.store(y_ptrs[:, :, None] + quads, tl.join(first, second), mask=mask)
