"""Tb of the chunked gated delta rule: the inverse of I + L, one warp for each value head.

A [C, C] tile is split into 16 x 16 blocks, the ten on and below its diagonal, each an operand [U,
16, 16] of a batched product for U units (a unit is a chunk of one value head). Batches of products
go to one warp each, so a unit's whole inverse stays in the registers of one warp: the layout of an
accumulator is that of the left operand of the next product, and that of its transpose the right
one. Hence every block that is a right operand later is computed transposed too; that costs less
than a conversion through shared memory. docs/gdn.md has the maths.
"""

import triton
import triton.language as tl

from .primitives import level


@triton.jit
def keep_blocks(ptr, x):
    """Stores x [C, C] in blocks in the order of a warp's lanes, 8 values a lane."""
    x = tl.reshape(
        x, (4, 2, 8, 4, 2, 4, 2)
    )  # block row, half, row, block column, half, pair, column
    x = tl.reshape(tl.permute(x, (2, 5, 0, 3, 4, 1, 6)), (32, 16, 8))
    lane = tl.arange(0, 32)[:, None, None]
    block = tl.arange(0, 16)[None, :, None]
    tl.store(ptr + block * 256 + lane * 8 + tl.arange(0, 8)[None, None, :], x)


@triton.jit
def kept_at(i, j):
    """Offset at which keep_blocks stores element (i, j)."""
    r = i % 16
    c = j % 16
    block = (4 * (i // 16) + j // 16) * 256
    return block + ((r % 8) * 4 + (c % 8) // 2) * 8 + (c // 8) * 4 + (r // 8) * 2 + c % 2


@triton.jit
def _block(ptr, BI: tl.constexpr, BJ: tl.constexpr, TURN: tl.constexpr):
    """Loads block (BI, BJ), stored by keep_blocks at ptr [1, U, 1], as [U, 16, 16]; TURN:
    transposed."""
    U: tl.constexpr = ptr.shape[1]
    lane = tl.arange(0, 32)[:, None, None]
    x = tl.load(ptr + (4 * BI + BJ) * 256 + lane * 8 + tl.arange(0, 8)[None, None, :])  # [32, U, 8]
    x = tl.reshape(x, (8, 4, U, 2, 2, 2))  # row, pair, unit, column half, row half, column
    x = tl.reshape(tl.permute(x, (2, 4, 0, 3, 1, 5)), (U, 16, 16))
    return tl.permute(x, (0, 2, 1)) if TURN else x


@triton.jit
def kept_block(ptr, BI: tl.constexpr, BJ: tl.constexpr):
    """Loads block (BI, BJ), BI >= BJ, of a symmetric tile as [U, 16, 16].

    Below the diagonal it is read as the transpose of the one above, which has the layout of a
    product's right operand.
    """
    if BI == BJ:
        return _block(ptr, BI, BI, False)
    return _block(ptr, BJ, BI, True)


@triton.jit
def kept_blocks(ptr):
    """Loads the blocks (i, j), i >= j, of a symmetric tile: ten [U, 16, 16], row by row."""
    out = ()
    for i in tl.static_range(4):
        for j in tl.static_range(i + 1):
            out = out + (kept_block(ptr, i, j),)
    return out


@triton.jit
def minus_abs(x):
    """-|x|. As a factor, the sign is free: it is part of the instruction that uses the result."""
    return tl.abs(x) * -1.0


@triton.jit
def _row(gates, WHICH: tl.constexpr, BI: tl.constexpr):
    """Loads 16 values of a row of each unit's gates [U] as [U, 16]."""
    return tl.load(gates[:, None] + (WHICH * 64 + 16 * BI) + tl.arange(0, 16)[None, :])


@triton.jit
def _gam(gates, BI: tl.constexpr, BJ: tl.constexpr):
    """exp2(G_i - G_j) of block (BI, BJ) -> [U, 16, 16] fp32; symmetric in diagonal blocks."""
    if BI == BJ:
        G = _row(gates, 0, BI)
        return tl.exp2(minus_abs(G[:, :, None] - G[:, None, :]))
    # a token between the two: both differences are non-positive, and their factors are stored
    BETWEEN: tl.constexpr = 1 if BI // 2 == BJ // 2 else 2
    return _row(gates, BETWEEN, BI)[:, :, None] * _row(gates, BETWEEN, BJ)[:, None, :]


@triton.jit
def _turned(x, DOT: tl.constexpr):
    """x transposed, as a product's right operand.

    It is transposed in fp32 so that Triton keeps it in registers: it would convert 16-bit tensors
    to an operand's layout through shared memory.
    """
    return tl.permute(x, (0, 2, 1)).to(DOT)


@triton.jit
def _diagonal_inverse(m, beta, DOT: tl.constexpr, PREC: tl.constexpr):
    """(I - strictly_lower(beta_i m_ij))^-1 and its transpose, fp32; m [U, 16, 16] symmetric."""
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    full = m.to(tl.float32)
    x = tl.where(i == j, 1.0, tl.where(level(i, j, 1), full * beta[:, :, None], 0.0))
    xt = tl.where(i == j, 1.0, tl.where(level(j, i, 1), full * beta[:, None, :], 0.0))
    for s in tl.static_range(1, 4):
        low = tl.where(level(i, j, 2**s), tl.permute(m, (0, 2, 1)), 0.0).to(DOT)
        y = tl.dot((x * beta[:, None, :]).to(DOT), low, input_precision=PREC)
        x = tl.dot(y.to(DOT), _turned(xt, DOT), x, input_precision=PREC)
        xt = tl.dot(xt.to(DOT), _turned(y, DOT), xt, input_precision=PREC)
    return x, xt


@triton.jit
def _beside(x, y):
    """[x y]: [U, 16, N] twice -> [U, 16, 2 N]."""
    xy = tl.permute(tl.join(x, y), (0, 1, 3, 2))
    return tl.reshape(xy, (x.shape[0], 16, 2 * x.shape[2]))


@triton.jit
def _finish(
    x, beta, gates, BI: tl.constexpr, BJ: tl.constexpr, GATED: tl.constexpr, TYPE: tl.constexpr
):
    """Block (BI, BJ) of Tb = X diag(beta). GATED: x includes the decay already."""
    if not GATED:
        x *= _gam(gates, BI, BJ)
    return (x * beta[:, None, :]).to(TYPE)


@triton.jit
def _store_row(tb, BI: tl.constexpr, x0, x1, x2, x3):
    """Stores block row BI of each unit's Tb at tb [1, U, 1] in whole lines of 128 bytes."""
    x = _beside(_beside(x0, x1), _beside(x2, x3))  # [U, 16, C]
    at = (16 * BI + tl.arange(0, 16)[:, None, None]) * 64 + tl.arange(0, 64)[None, None, :]
    tl.store(tb + at, tl.permute(x, (1, 0, 2)))  # so that the units stay a warp each


@triton.jit
def _key_block(
    m, gates, BI: tl.constexpr, BJ: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr
):
    """Block (BI, BJ) of m, loaded here if m is a pointer.

    GATED: multiplied by the decay between its tokens and the keys' norms, as DOT.
    """
    if len(m) == 1:
        x = kept_block(m[0], BI, BJ)
    else:
        x = m[BI * (BI + 1) // 2 + BJ]
    if GATED:
        gam = _gam(gates, BI, BJ) * _row(gates, 4, BI)[:, :, None] * _row(gates, 4, BJ)[:, None, :]
        x = (x.to(tl.float32) * gam).to(DOT)
    return x


@triton.jit
def _diagonal(
    m, gates, B: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr
):
    """For diagonal block B: beta; its inverse and the transpose; the inverse times beta, as DOT."""
    beta = _row(gates, 3, B)
    x, xt = _diagonal_inverse(_key_block(m, gates, B, B, GATED, DOT), beta, DOT, PREC)
    return beta, x, xt, (x * beta[:, None, :]).to(DOT)


@triton.jit
def store_inverse(
    tb,  # [1, U, 1] pointers to [C, C]
    gates,  # [U] pointers to [4 or 5, C] fp32: G, factors of Gam, beta, lengths of keys
    m,  # the ten blocks of -k_i.k_j for keys of length 1, or (a pointer to where they are kept,)
    UNIT_KEYS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    MADE: tl.constexpr = False,  # m has everything in it but beta, and gates beta alone
):  # fmt: skip
    """Stores Tb of U units. The inverse of [[A, 0], [-M, D]] has D^-1 M A^-1 below the diagonal.

    The decay is a similarity, (I + L)^-1 = diag(gam) (I + diag(beta) K K^T)^-1 diag(1 / gam). So it
    can be applied last, and all heads share the blocks of K K^T, if keys are unit vectors. For
    other keys the inverse may exceed fp32 unless the decay is applied first. MADE: m is A of a
    rule whose decays are not a similarity.
    """
    LEFT: tl.constexpr = not UNIT_KEYS and not MADE  # decay and lengths come to m here
    GATED: tl.constexpr = not UNIT_KEYS or MADE
    TYPE: tl.constexpr = tb.dtype.element_ty
    LATER: tl.constexpr = len(m) == 1  # what is made, when it is needed: a form of fewer registers
    b0 = _row(gates, 3, 0)
    b1 = _row(gates, 3, 1)
    x00, t00 = _diagonal_inverse(_key_block(m, gates, 0, 0, LEFT, DOT), b0, DOT, PREC)
    x11, t11 = _diagonal_inverse(_key_block(m, gates, 1, 1, LEFT, DOT), b1, DOT, PREC)
    if not LATER:
        b2, x22, t22, d22 = _diagonal(m, gates, 2, LEFT, DOT, PREC)
        b3, x33, t33, d33 = _diagonal(m, gates, 3, LEFT, DOT, PREC)
    # d: beta multiplies the rows of m, that is the columns of the factor on its left; r: right
    d11 = (x11 * b1[:, None, :]).to(DOT)
    r00 = _turned(t00, DOT)
    r11 = _turned(t11, DOT)
    zero = tl.zeros_like(x00).to(TYPE)
    x00 = _finish(x00, b0, gates, 0, 0, GATED, TYPE)
    _store_row(tb, 0, x00, zero, zero, zero)
    y = tl.dot(d11, _key_block(m, gates, 1, 0, LEFT, DOT), input_precision=PREC)
    x10 = tl.dot(y.to(DOT), r00, input_precision=PREC)
    r10 = _turned(tl.dot(t00.to(DOT), _turned(y, DOT), input_precision=PREC), DOT)
    x10 = _finish(x10, b0, gates, 1, 0, GATED, TYPE)
    x11 = _finish(x11, b1, gates, 1, 1, GATED, TYPE)
    _store_row(tb, 1, x10, x11, zero, zero)
    if LATER:
        b2, x22, t22, d22 = _diagonal(m, gates, 2, LEFT, DOT, PREC)
    else:
        y = tl.dot(d33, _key_block(m, gates, 3, 2, LEFT, DOT), input_precision=PREC)
        x32 = tl.dot(y.to(DOT), _turned(t22, DOT), input_precision=PREC)
        d32 = (x32 * b2[:, None, :]).to(DOT)
    # the join of the two 32 x 32 halves, by 16 x 16 blocks: Y = D M, X = Y A
    m20 = _key_block(m, gates, 2, 0, LEFT, DOT)
    m21 = _key_block(m, gates, 2, 1, LEFT, DOT)
    y0 = tl.dot(d22, m20, input_precision=PREC).to(DOT)
    y1 = tl.dot(d22, m21, input_precision=PREC).to(DOT)
    x20 = tl.dot(y1, r10, tl.dot(y0, r00, input_precision=PREC), input_precision=PREC)
    x21 = tl.dot(y1, r11, input_precision=PREC)
    x20 = _finish(x20, b0, gates, 2, 0, GATED, TYPE)
    x21 = _finish(x21, b1, gates, 2, 1, GATED, TYPE)
    x22 = _finish(x22, b2, gates, 2, 2, GATED, TYPE)
    _store_row(tb, 2, x20, x21, x22, zero)
    if LATER:
        b3, x33, t33, d33 = _diagonal(m, gates, 3, LEFT, DOT, PREC)
        y = tl.dot(d33, _key_block(m, gates, 3, 2, LEFT, DOT), input_precision=PREC)
        x32 = tl.dot(y.to(DOT), _turned(t22, DOT), input_precision=PREC)
        d32 = (x32 * b2[:, None, :]).to(DOT)
        m20 = _key_block(m, gates, 2, 0, LEFT, DOT)
        m21 = _key_block(m, gates, 2, 1, LEFT, DOT)
    y0 = tl.dot(d32, m20, input_precision=PREC)
    y1 = tl.dot(d32, m21, input_precision=PREC)
    m30 = _key_block(m, gates, 3, 0, LEFT, DOT)
    m31 = _key_block(m, gates, 3, 1, LEFT, DOT)
    y0 = tl.dot(d33, m30, y0, input_precision=PREC).to(DOT)
    y1 = tl.dot(d33, m31, y1, input_precision=PREC).to(DOT)
    x30 = tl.dot(y1, r10, tl.dot(y0, r00, input_precision=PREC), input_precision=PREC)
    x31 = tl.dot(y1, r11, input_precision=PREC)
    x30 = _finish(x30, b0, gates, 3, 0, GATED, TYPE)
    x31 = _finish(x31, b1, gates, 3, 1, GATED, TYPE)
    x32 = _finish(x32, b2, gates, 3, 2, GATED, TYPE)
    x33 = _finish(x33, b3, gates, 3, 3, GATED, TYPE)
    _store_row(tb, 3, x30, x31, x32, x33)
