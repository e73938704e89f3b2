"""A chunk of C = 64 tokens as tiles [16, 4, BLOCK]: token 16 b + r is row r of block b.

With 4 BLOCK = 32 times as many as there are warps, Triton's layout of such a tile has a lane for
each channel, warps for the blocks, and all rows of a block in one thread's registers: sums over
tokens of a block then pass no other thread.
"""

import triton
import triton.language as tl


@triton.jit
def as_blocks(x):
    """[C, BLOCK] -> [16, 4, BLOCK]."""
    return tl.permute(tl.reshape(x, (4, 16, x.shape[1])), (1, 0, 2))


@triton.jit
def as_tokens(x):
    """[16, 4, BLOCK] -> [C, BLOCK]."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (64, x.shape[2]))


@triton.jit
def since(x):
    """Sums of a block's rows up to each row."""
    return tl.cumsum(x, axis=0)


@triton.jit
def until(x):
    """Sums of a block's rows behind each row."""
    return tl.cumsum(x, axis=0, reverse=True) - x


@triton.jit
def of_blocks(x, which):
    """For each block the sum of all rows of those blocks that which [4 from, 4 to] names, [1, 4,
    BLOCK]."""
    total = tl.sum(x, 0)  # [4, BLOCK]
    return tl.sum(tl.where(which[:, :, None], total[:, None, :], 0.0), 0)[None, :, :]


@triton.jit
def earlier():
    """The blocks before a block."""
    return tl.arange(0, 4)[:, None] < tl.arange(0, 4)[None, :]


@triton.jit
def later():
    """The blocks behind a block."""
    return tl.arange(0, 4)[:, None] > tl.arange(0, 4)[None, :]


@triton.jit
def _towards(FROM: tl.constexpr, TO: tl.constexpr):
    """Block FROM for block TO, and 3 - FROM for 3 - TO."""
    a = tl.arange(0, 4)[:, None]
    b = tl.arange(0, 4)[None, :]
    return ((a == FROM) & (b == TO)) | ((a == 3 - FROM) & (b == 3 - TO))


@triton.jit
def _split(x, S: tl.constexpr):
    """Rows in pairs of halves of S tokens, [8 / S, 2, S, 4, BLOCK]."""
    return tl.reshape(x, (8 // S, 2, S, 4, x.shape[2]))


@triton.jit
def is_behind(S: tl.constexpr):
    """[16, 4, 1]: a token lies behind the middle of its block of 2 S."""
    r = tl.arange(0, 16)[:, None, None]
    b = tl.arange(0, 4)[None, :, None]
    return (16 * b + r) // S % 2 == 1


@triton.jit
def factors(x, S: tl.constexpr):
    """E of level S (levels.py) for log2 of decays x [16, 4, BLOCK] fp32."""
    if S >= 16:
        behind = since(x)
        before = until(x)
        if S == 32:
            beyond = of_blocks(x, _towards(2, 3))  # of the blocks next to the middle
            behind += beyond
            before += beyond
        e = tl.where(is_behind(S), behind, before)
    elif S == 1:
        e = tl.where(is_behind(S), x, 0.0)
    else:
        y = _split(x, S)
        behind = tl.cumsum(y, axis=2)
        before = tl.cumsum(y, axis=2, reverse=True) - y
        second = (tl.arange(0, 2) == 1)[None, :, None, None, None]
        e = tl.reshape(tl.where(second, behind, before), x.shape)
    return tl.exp2(e)


@triton.jit
def crossing(z, S: tl.constexpr):
    """What of a level's terms z [16, 4, BLOCK] crosses from before each token to it or beyond.

    A pair's term stands at its later token if that is the one behind the middle, and at its earlier
    one for tokens before the middle: sums never meet a term that another is to cancel.
    """
    if S == 1:
        return tl.where(is_behind(S), z, 0.0)
    if S < 16:
        y = _split(z, S)
        behind = tl.cumsum(y, axis=2, reverse=True)
        before = tl.cumsum(y, axis=2) - y
        second = (tl.arange(0, 2) == 1)[None, :, None, None, None]
        return tl.reshape(tl.where(second, behind, before), z.shape)
    behind = tl.cumsum(z, axis=0, reverse=True)
    before = tl.cumsum(z, axis=0) - z
    if S == 32:
        beyond = of_blocks(z, _towards(3, 2))
        behind += beyond
        before += beyond
    return tl.where(is_behind(S), behind, before)
