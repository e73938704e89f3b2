"""A and P of 16 tokens by levels, in registers: docs/kda.md.

A chunk's 64 tokens are four blocks of 16, and each of four warps has a block. Tensors are
[4, 2, 8, 32]: block, half, token of the half, channel. A lane has eight neighbouring channels of
one token of either half, and another lane, whose number differs in one bit, has those of the
token 1, 2 or 4 away; so a level needs one exchange of registers. The same registers, with channels
in another order, are operands of mma.sync: of both sides, since a fragment of the left operand is
one of the right operand of the transpose.
"""

from ...gdn.hopper.blocks import operand, tile_layout
from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon

TILE = gl.constexpr(tile_layout(4))  # accumulators [4, 16, 16]
# [4, 2, 8, 32]: eight channels and two tokens a lane
X = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0]],
        [[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 2, 8, 32],
    )
)


@gluon.jit
def of_token(x):
    """[4, 16] of accumulators' rows -> [4, 2, 8, 1]."""
    x = gl.convert_layout(x.reshape([4, 2, 8]), gl.SliceLayout(3, X))
    return gl.expand_dims(x, 3)


@gluon.jit
def positions():
    """Block, half, token of the half and channel of each element."""
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    t = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, X))))
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, X))))
    block = gl.expand_dims(gl.expand_dims(gl.expand_dims(block, 1), 2), 3)
    half = gl.expand_dims(gl.expand_dims(gl.expand_dims(half, 0), 2), 3)
    t = gl.expand_dims(gl.expand_dims(gl.expand_dims(t, 0), 0), 3)
    return block, half, t, gl.expand_dims(gl.expand_dims(gl.expand_dims(d, 0), 0), 0)


@gluon.jit
def tokens(smem):
    """A panel [C, 32] as [4, 2, 8, 32]."""
    BITS: gl.constexpr = smem.dtype.primitive_bitwidth
    VIEW: gl.constexpr = gl.NVMMASharedLayout(4 * BITS, BITS, 4)  # of the same bytes
    return hw.as_tile(smem, smem.dtype, [4, 2, 8, 32], VIEW).load(X)


@gluon.jit
def left(x):
    """[.., 2, 8, 32] of 16 bits as the left operand [.., 16, 32] of a product over channels."""
    N: gl.constexpr = x.shape[0]
    x = x.reshape([N, 16, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([N, 16, 32])
    return gl.convert_layout(x, operand(0, TILE))


@gluon.jit
def right(x):
    """The same as the right operand [.., 32, 16]."""
    N: gl.constexpr = x.shape[0]
    x = x.reshape([N, 16, 4, 2, 2, 2]).permute((0, 3, 4, 2, 5, 1)).reshape([N, 32, 16])
    return gl.convert_layout(x, operand(1, TILE))


@gluon.jit
def _exchanged(x, LANES: gl.constexpr):
    """x of the lane whose number differs by LANES."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, " + LANES + ", 31, -1;",
        "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def other_half(x):
    """x of the token 8 away."""
    a, b = gl.split(x.permute((0, 2, 3, 1)))
    return gl.convert_layout(gl.join(b, a).permute((0, 3, 1, 2)), X)


@gluon.jit
def halves_product(x, y):
    """x y of 16 bits each, two at once."""
    NAME: gl.constexpr = "f16x2" if x.dtype == gl.float16 else "bf16x2"
    return gl.inline_asm_elementwise(
        "mul.rn." + NAME + " $0, $1, $2;", "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def add_levels(kk, qk, k, q, a, i, j):
    """Adds 32 channels' share of levels 1 to 8 to A (symmetric, no diagonal) and P [4, 16, 16].

    k, q: fp16; a: decays; i, j: row and column. Returns also what tokens have lost
    since the block's start, and what they lose until its end, as factors.
    """
    _, half, t, _ = positions()
    zero = gl.zeros((4, 16, 16), gl.float32, TILE)
    kt = right(k)
    qk += gl.where(i == j, hw.mma_v2(left(q), kt, zero), 0.0)
    # of the token's side of the level's middle, and of the other side: since or until
    own, other = gl.where((t & 1) != 0, a, 1.0), gl.where((t & 1) != 0, 1.0, a)
    for s in gl.static_range(4):
        e = own.to(gl.float16)
        ke = halves_product(k, e)
        kt = right(ke)
        mine = ((i ^ j) >> s) == 1
        kk += gl.where(mine, hw.mma_v2(left(ke), kt, zero), 0.0)
        qk += gl.where(mine, hw.mma_v2(left(halves_product(q, e)), kt, zero), 0.0)
        if s == 0:
            more, same = own * _exchanged(a, "4"), (t & 1) * 2 == (t & 2)
        elif s == 1:
            more, same = own * _exchanged(own * other, "8"), (t & 2) * 2 == (t & 4)
        elif s == 2:
            more, same = own * _exchanged(own * other, "16"), (t & 4) == half * 4
        else:
            more, same = own * other_half(own * other), half == 1
        own, other = gl.where(same, more, other), gl.where(same, other, more)
    return kk, qk, own, other
