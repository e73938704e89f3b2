"""The convolution over channels whose tokens lie side by side, four 16-bit tokens at a time.

A tap moves its inputs by a token, which leaves loads of two bytes; as integers of 64 bits a token's
neighbours come along, and all loads are aligned. Sizes: T tokens, D channels, W taps, Q quads of
tokens that reach back W - 1.
"""

import triton
import triton.language as tl

from ..common.primitives import activate


def takes_quads(x, y, *others) -> bool:
    """Whether conv_quads makes y from x [B, D, T], where nothing but x comes in."""
    if x.element_size() != 2 or any(other is not None for other in others):
        return False
    return all(
        t.stride(2) == 1
        and t.shape[2] % 4 == 0
        and t.stride(0) % 4 == 0
        and t.stride(1) % 4 == 0
        and t.data_ptr() % 8 == 0
        for t in (x, y)
    )


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
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y of BLOCK_T tokens and BLOCK_D channels."""
    Q: tl.constexpr = (W + 2) // 4
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    quad = t0 // 4 + tl.arange(0, BLOCK_T // 4)[None, :]  # [1, BLOCK_T / 4]
    local_d = tl.arange(0, BLOCK_D)[:, None]
    offs_d = d0 + local_d
    mask_d = offs_d < D
    mask = mask_d & (quad < T // 4)
    x_ptrs = x_ptr.to(tl.pointer_type(tl.int64)) + local_d.to(tl.int64) * (x_step // 4) + quad
    seen = ()  # tokens 4 (quad - Q) to 4 quad + 3, [BLOCK_D, BLOCK_T / 4] fp32 each
    for back in tl.static_range(Q, -1, -1):
        four = tl.load(x_ptrs - back, mask=mask & (quad >= back), other=0)
        for i in tl.static_range(4):
            x = (four >> (16 * i)).to(tl.int16).to(dtype, bitcast=True)
            seen = seen + (x.to(tl.float32),)
    bias = tl.zeros((BLOCK_D, 1), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(W):
        tap = tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)
        taps = taps + (tap,)  # [BLOCK_D, 1]
    out = tl.zeros((BLOCK_D, BLOCK_T // 4), tl.int64)
    for i in tl.static_range(4):
        acc = tl.broadcast_to(bias, (BLOCK_D, BLOCK_T // 4))
        for back in tl.static_range(W):
            acc += seen[4 * Q + i - back] * taps[W - 1 - back]
        if SILU:
            acc = activate(acc, "silu")
        y = acc.to(dtype).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        out |= y << (16 * i)
    y_ptrs = y_ptr.to(tl.pointer_type(tl.int64)) + local_d.to(tl.int64) * (y_step // 4) + quad
    tl.store(y_ptrs, out, mask=mask)
