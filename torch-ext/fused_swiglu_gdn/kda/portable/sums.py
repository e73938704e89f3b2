"""Sums over tokens of a chunk, as products with matrices of 0 and 1.

A chunk's 64 tokens are four blocks of 16 each, and Triton gives each of four warps a block. Tiles
are [4, 16, BLOCK], or [4, BLOCK, 16], channels first, by which operand of the next product they
are. Sums along tokens would pass from thread to thread; as a product of tensor cores their result
lies where that product takes it from registers. Parts in fp16, 11 bits each, keep what is added as
exact as it was.
"""

import triton
import triton.language as tl


@triton.jit
def as_blocks(x):
    """[64, BLOCK] -> [4, BLOCK, 16]."""
    return tl.permute(tl.reshape(x, (4, 16, x.shape[1])), (0, 2, 1))


@triton.jit
def as_tokens(x):
    """[4, BLOCK, 16] -> [64, BLOCK]."""
    return tl.reshape(tl.permute(x, (0, 2, 1)), (64, x.shape[1]))


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """x fp32, within fp16's range, as a sum of tensors in fp16."""
    parts = ()
    for _ in tl.static_range(PARTS):
        part = x.to(tl.float16)
        x -= part.to(tl.float32)
        parts = parts + (part,)
    return parts


@triton.jit
def summed(parts, which):
    """For each token of a block the sum over those of its tokens that a column of which [16, 16]
    names, [4, BLOCK, 16] fp32."""
    ones = tl.where(which, 1.0, 0.0).to(tl.float16)
    ones = tl.broadcast_to(ones[None, :, :], (4, 16, 16))
    total = tl.dot(parts[0], ones)
    for i in tl.static_range(1, len(parts)):
        total = tl.dot(parts[i], ones, total)
    return total


@triton.jit
def of_blocks(total, which):
    """For each block the sum of totals [4, BLOCK] over the blocks that a column of which [4, 4]
    names."""
    return tl.sum(tl.where(which[:, :, None], total[:, None, :], 0.0), 0)


@triton.jit
def running(x, BEHIND: tl.constexpr, PREC: tl.constexpr):
    """Sums of x [4, BLOCK, 16] fp32 over the tokens before each; BEHIND: over it and those behind.
    PREC: of products of fp32."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    a = tl.arange(0, 4)[:, None]
    b = tl.arange(0, 4)[None, :]
    ones = tl.where((i >= j) if BEHIND else (i < j), 1.0, 0.0)
    ones = tl.broadcast_to(ones[None, :, :], (4, 16, 16))
    total = of_blocks(tl.sum(x, 2), (a > b) if BEHIND else (a < b))
    return tl.dot(x, ones, input_precision=PREC) + total[:, :, None]
