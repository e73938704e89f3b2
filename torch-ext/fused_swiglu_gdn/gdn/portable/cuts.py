"""Memory for the states at the cuts of long sequences: rows of o that are not written yet.

A long sequence of few heads is cut into segments that run concurrently, which needs the state at
each cut. Such a state and the transition that leads to it take no memory of their own. Only the
scan writes o, after the kernels that compute those states, so they are stored in the rows of o of
the segment *after* the cut, and each is read before o overwrites it.

Programs of the scan share a segment by columns of V, and are not synchronised. So the state of a
program's `width` columns is stored in the bytes of those columns of o: a *slice* of a token's row,
`words` fp32 words. M is not read by then and is stored in the rows after.

Sizes: K and V head dims; HV value heads; o [B, T, HV, V] contiguous.
"""

import triton
import triton.language as tl

WIDEST = 32  # columns of a program of the portable scan, in any file of configs/
WHOLE = 1 << 24  # chunks in a segment that no sequence fills
FEWEST = 4  # of the shortest segments a sequence must have room for: cutting others gains nothing
_WHOLE, _FEWEST = tl.constexpr(WHOLE), tl.constexpr(FEWEST)
# log2 of the norm below which a transition has forgotten its start: fp32 has no digit of it left
FORGOTTEN = tl.constexpr(-30.0)


def words(width: int, size: int) -> int:
    """fp32 words in a slice of `width` columns of `size` bytes."""
    return width * size // 4


def tokens_at_cut(K: int, V: int, size: int) -> int:
    """Rows of o that N and M of a cut take, or 0 if they do not fit into slices.

    Computed for the widest slice, of `WIDEST` columns, because the width of a program depends on
    the batch, but the positions of cuts must not. Narrower slices take as many rows.
    """
    if V % WIDEST or K % words(WIDEST, size):
        return 0
    return (V + K + V - 1) // V * (4 * K // size)


@triton.jit
def word_at_cut(x, k, step, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr):
    """Offset in fp32 words from a head's part of a segment's first row to N^T[x, k], or M^T[x - V,
    k].

    step: words from a row of o to the next. W columns a slice of WORDS words.
    """
    row = (x // V * W + x % V % W) * (K // WORDS) + k // WORDS
    return row * step + x % V // W * WORDS + k % WORDS


def chunks_in_segment(chunks: int, shortest: int, longest: int) -> int:
    """Chunks in a segment of a sequence of `chunks` full chunks, for the portable kernels.

    A quarter of the sequence: shorter segments take more states to chain, longer ones more steps.
    """
    return WHOLE if chunks < FEWEST * shortest else min(chunks // FEWEST, longest)


@triton.jit
def segment_of(length, SHORTEST, LONGEST: tl.constexpr):
    """chunks_in_segment for a sequence of `length` tokens."""
    chunks = length // 64
    return tl.where(chunks < SHORTEST * _FEWEST, _WHOLE, tl.minimum(chunks // _FEWEST, LONGEST))


@triton.jit
def count_cuts(length, SPAN, BEHIND: tl.constexpr):
    """Cuts of a sequence cut every SPAN tokens: at least BEHIND tokens follow each."""
    return tl.maximum(length - BEHIND, 0) // SPAN


@triton.jit
def count_segments(length, most, SPAN: tl.constexpr):
    """Number of equal segments of a sequence on Hopper.

    At most `most`, and fewer if they had less than SPAN tokens.
    """
    return tl.where(length < _FEWEST * SPAN, 1, tl.minimum(most, length // SPAN))


@triton.jit
def chunk_at_cut(i, total, segments):
    """The first of a sequence's `total` chunks in segment i of equal segments."""
    return i * total // segments
