"""Sums over tokens of a chunk, as products with matrices of 0 and 1.

A warp holds some tokens of every channel: sums along tokens pass from thread to thread, or are one
product of tensor cores, whose result lies as the next product's does. Parts in fp16, 11 bits each,
keep what is added as exact as it was.
"""

import triton
import triton.language as tl


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """x [C, BLOCK] fp32, within fp16's range, as a sum of tensors in fp16."""
    parts = ()
    for _ in tl.static_range(PARTS):
        part = x.to(tl.float16)
        x -= part.to(tl.float32)
        parts = parts + (part,)
    return parts


@triton.jit
def summed(which, parts):
    """For each token the sum of x over the tokens that a row of which [C, C] names, fp32."""
    ones = tl.where(which, 1.0, 0.0).to(tl.float16)
    total = tl.dot(ones, parts[0])
    for i in tl.static_range(1, len(parts)):
        total = tl.dot(ones, parts[i], total)
    return total


@triton.jit
def is_behind(S):
    """[C, 1]: a token lies behind the middle of its block of 2 S."""
    return (tl.arange(0, 64)[:, None] & S) != 0


@triton.jit
def factors(parts, S):
    """E of level S, a power of two (levels.py), of the parts of log2 of the decays."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    return tl.exp2(summed(((i ^ j) < S) & ((j <= i) == is_behind(S)), parts))


@triton.jit
def running(x, REVERSE: tl.constexpr):
    """Sums of x [C, BLOCK] fp32 from the first token to each; REVERSE: from the last.

    As 16 rows of four blocks, of which Triton gives each warp one where BLOCK is 8 times as many as
    there are warps: a thread then has all rows of a channel.
    """
    y = tl.permute(tl.reshape(x, (4, 16, x.shape[1])), (1, 0, 2))
    total = tl.sum(y, 0)  # [4, BLOCK]
    own = tl.arange(0, 4)[None, :, None]
    other = tl.arange(0, 4)[:, None, None]
    passed = (other > own) if REVERSE else (other < own)
    total = tl.sum(tl.where(passed, total[:, None, :], 0.0), 0)
    y = tl.cumsum(y, axis=0, reverse=REVERSE) + total[None, :, :]
    return tl.reshape(tl.permute(y, (1, 0, 2)), x.shape)
