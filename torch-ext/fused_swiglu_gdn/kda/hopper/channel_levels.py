"""Tokens of a chunk by levels for the gradient of Kimi Delta Attention: gradient_channels.py.

Tensors are [4, 32, 16]: block, channel, token, as accumulators of mma.sync have them, which are its
left operands, too. A warp has a block. Pairs of tokens are [4, 16, 16] and symmetric, so that
accumulators' order is that of right operands. Tokens of one block meet in registers; of two, what a
level makes of q and k goes through shared memory, once.
"""

from ...gdn.hopper.blocks import operand
from ...runtime.gluon import as_tile, barrier, gl, gluon, mma_v2, rounded
from .gates import exp2_short
from .levels import TILE

CHANNELS = gl.constexpr(32)  # of a CTA
HALF = gl.constexpr(64)  # channels of V that a box has
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
CHANNEL = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, TILE)))  # [32]


@gluon.jit
def tokens_of(smem):
    """[C, 32] in shared memory as [4, 32, 16] fp32."""
    BITS: gl.constexpr = smem.dtype.primitive_bitwidth
    VIEW: gl.constexpr = gl.NVMMASharedLayout(4 * BITS, BITS, 3)  # of the same bytes
    x = as_tile(smem, smem.dtype, [4, 16, CHANNELS], VIEW).permute((0, 2, 1))
    return x.load(TILE).to(gl.float32)


@gluon.jit
def for_all(x):
    """A left operand [1, 32, ..] for all warps."""
    like = gl.zeros((4, x.shape[1], x.shape[2]), x.dtype, operand(0, TILE))
    x, _ = gl.broadcast(x, like)
    return x


@gluon.jit
def states_product(s_smem, x_smem, acc):
    """S x^T + acc of half of the channels of V: S [32, HALF], x [C, HALF] in shared memory."""
    DTYPE: gl.constexpr = s_smem.dtype
    VIEW: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    a = for_all(as_tile(s_smem, DTYPE, [1, CHANNELS, HALF], VIEW).load(operand(0, TILE)))
    x = as_tile(x_smem, DTYPE, [4, 16, HALF], VIEW).permute((0, 2, 1)).load(operand(1, TILE))
    return mma_v2(a, x, acc)


@gluon.jit
def as_left(x):
    return gl.convert_layout(x, operand(0, TILE), assert_trivial=True)


@gluon.jit
def as_right(x):
    """x [4, 16, 16] of 16 bits: its transpose as a right operand."""
    return gl.convert_layout(x.permute((0, 2, 1)), operand(1, TILE), assert_trivial=True)


@gluon.jit
def ones(which, dtype: gl.constexpr):
    """1 where which [1, 16, 16] holds, as the right operand: rows are the tokens that get."""
    one = gl.where(which, 1.0, 0.0).to(dtype)
    one, _ = gl.broadcast(one, gl.zeros((4, 16, 16), dtype, TILE))
    return as_right(one)


@gluon.jit
def summed(high, low, which, zero):
    """Sums of x = high + low over the tokens that a row of which [1, 16, 16] names."""
    one = ones(which, gl.float16)
    return mma_v2(low, one, mma_v2(high, one, zero))


@gluon.jit
def running(x, which, acc):
    """The same of any x fp32, in three parts, plus acc."""
    one = ones(which, gl.bfloat16)
    for _ in gl.static_range(3):
        part = rounded(x, gl.bfloat16)
        x -= part.to(gl.float32)
        acc = mma_v2(as_left(part), one, acc)
    return acc


@gluon.jit
def bits_where(which):
    """All bits where a condition on [4, 16, 16] holds."""
    bits = gl.where(which, -1, 0).to(gl.int16)
    bits, _ = gl.broadcast(bits, gl.zeros((4, 16, 16), gl.int16, TILE))
    return bits


@gluon.jit
def masked(x, bits):
    """x of 16 bits where all bits are set, else 0; two at once."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [x, bits], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def pairs_of(smem):
    """Pairs of the warps' tokens and those of one block, in shared memory [C, 16]."""
    VIEW: gl.constexpr = gl.NVMMASharedLayout(32, 16, 3)
    return as_tile(smem, smem.dtype, [4, 16, 16], VIEW).load(TILE)


@gluon.jit
def of_own(smem, AT: gl.constexpr, b):
    """Pairs inside the warps' own blocks."""
    x = masked(pairs_of(smem.index(AT)), bits_where(b == 0))
    for m in gl.static_range(1, 4):
        more = masked(pairs_of(smem.index(AT + m)), bits_where(b == m))
        x = gl.inline_asm_elementwise(
            "or.b32 $0, $1, $2;", "=r,r,r", [x, more], dtype=x.dtype, is_pure=True, pack=2
        )
    return x


@gluon.jit
def sum_before(x0, x1, x2, b):
    return gl.where(b > 0, x0, 0.0) + gl.where(b > 1, x1, 0.0) + gl.where(b > 2, x2, 0.0)


@gluon.jit
def sum_behind(x1, x2, x3, b):
    return gl.where(b < 1, x1, 0.0) + gl.where(b < 2, x2, 0.0) + gl.where(b < 3, x3, 0.0)


@gluon.jit
def channels_of(smem):
    """Numbers of channels [32] as [1, 32, 1]."""
    return gl.expand_dims(gl.expand_dims(smem.load(CHANNEL), 0), 2)


@gluon.jit
def by_block(smem):
    """Numbers of four blocks' channels [4, 32], each [1, 32, 1] in all warps."""
    smem = as_tile(smem, gl.float32, [4, CHANNELS], FLAT)
    x0, x1 = channels_of(smem.index(0)), channels_of(smem.index(1))
    return x0, x1, channels_of(smem.index(2)), channels_of(smem.index(3))


@gluon.jit
def keep(smem, x):
    """Stores numbers of the warps' channels [4, 32]."""
    smem.store(x)


@gluon.jit
def with_level(e, y, ek, behind, u, w, scale, dq, dk, dg):
    """dQ, dK and dG with a level's products; in dG stand the rounded operands."""
    one = gl.where(behind, 1.0, 0.0)  # a factor, once for all channels
    u *= scale
    dg += (2.0 * one - 1.0) * (y.to(gl.float32) * u + ek.to(gl.float32) * w)
    u *= e
    dq += one * u
    dk += (1.0 - one) * u
    dk += e * w
    return dq, dk, dg


@gluon.jit
def across(smem, pairs, e, q, k, b, scale, dq, dk, dg, S: gl.constexpr):
    """dQ, dK and dG with the terms of level S of 32 and 16, between blocks."""
    DTYPE: gl.constexpr = smem.dtype
    smem = as_tile(smem, DTYPE, [2, 4, CHANNELS, 16], BLOCKS)
    behind = ((16 * b) & S) != 0
    ek = rounded(e * k, DTYPE)
    y = rounded(e * gl.where(behind, q, k), DTYPE)
    smem.index(0).store(y)
    smem.index(1).store(ek)
    barrier()
    u = gl.zeros((4, CHANNELS, 16), gl.float32, TILE)
    w = gl.zeros((4, CHANNELS, 16), gl.float32, TILE)
    for m in gl.static_range(4):
        bits = bits_where((b ^ m) >= 2 if S == 32 else (b ^ m) == 1)
        a = for_all(smem.index(0).slice(m, 1).load(operand(0, TILE)))
        u = mma_v2(a, as_right(masked(pairs_of(pairs.index(m)), bits)), u)
        a = for_all(smem.index(1).slice(m, 1).load(operand(0, TILE)))
        w = mma_v2(a, as_right(masked(pairs_of(pairs.index(4 + m)), bits)), w)
    return with_level(e, y, ek, behind, u, w, scale, dq, dk, dg)


@gluon.jit
def inside(high, low, q, k, p, n, i, j, scale, zero, dq, dk, dg, S: gl.constexpr):
    """The same of level S of 8, 4, 2 and 1, inside a block."""
    e = exp2_short(summed(high, low, ((i ^ j) < S) & ((j <= i) == ((i & S) != 0)), zero))
    behind = (j & S) != 0
    ek = rounded(e * k, p.dtype)
    y = rounded(e * gl.where(behind, q, k), p.dtype)
    bits = bits_where(((i ^ j) >= S) & ((i ^ j) < 2 * S))
    u = mma_v2(as_left(y), as_right(masked(p, bits)), zero)
    w = mma_v2(as_left(ek), as_right(masked(n, bits)), zero)
    return with_level(e, y, ek, behind, u, w, scale, dq, dk, dg)
