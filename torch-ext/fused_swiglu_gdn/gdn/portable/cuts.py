"""Where the states at the cuts of long sequences lie: in rows of o that nobody has written yet.

A long sequence of few heads is cut into segments that run at the same time, and one needs the state
at each cut. Such a state and the transition that leads to it take no memory of their own. The scan
alone writes o, after the kernels that find those states, so they lie in the rows of o of the
segment *behind* the cut, and every one is read before o takes its place.

Programs of the scan share a segment by columns of V, and do not wait for each other. So the state
of a program's `width` columns lies in the bytes of those columns of o: a *slice* of a token's row,
`words` fp32 words. M has no reader by then and lies in the rows behind.

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
    """fp32 words in the slice of `width` columns of `size` bytes."""
    return width * size // 4


def tokens_at_cut(K: int, V: int, size: int) -> int:
    """Rows of o that N and M of a cut take, or 0 where they do not fit into slices.

    Asked of the widest slice, of `WIDEST` columns, since the width of a program depends on the
    batch, but where a sequence is cut must not. Narrower ones take as many rows.
    """
    if V % WIDEST or K % words(WIDEST, size):
        return 0
    return (V + K + V - 1) // V * (4 * K // size)


@triton.jit
def word_at_cut(x, k, step, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr):
    """fp32 words from a head's part of a segment's first row to N^T[x, k], or M^T[x - V, k].

    step: words from a row of o to the next. W columns a slice of WORDS words.
    """
    row = (x // V * W + x % V % W) * (K // WORDS) + k // WORDS
    return row * step + x % V // W * WORDS + k % WORDS


def chunks_in_segment(chunks: int, shortest: int, longest: int) -> int:
    """Chunks in a segment of a sequence of so many full ones, on the portable path.

    A quarter of the sequence: shorter segments take more states to chain, longer ones more steps.
    """
    return WHOLE if chunks < FEWEST * shortest else min(chunks // FEWEST, longest)


@triton.jit
def segment_of(length, SHORTEST, LONGEST: tl.constexpr):
    """As chunks_in_segment, of a sequence's tokens."""
    chunks = length // 64
    return tl.where(chunks < SHORTEST * _FEWEST, _WHOLE, tl.minimum(chunks // _FEWEST, LONGEST))


@triton.jit
def count_cuts(length, SPAN, BEHIND: tl.constexpr):
    """Cuts of a sequence cut every SPAN tokens: each has BEHIND tokens behind it or more."""
    return tl.maximum(length - BEHIND, 0) // SPAN


@triton.jit
def count_segments(length, most, SPAN: tl.constexpr):
    """Segments of a sequence that is cut into `most` alike, or fewer if they had less than SPAN
    tokens, on Hopper."""
    return tl.where(length < _FEWEST * SPAN, 1, tl.minimum(most, length // SPAN))


@triton.jit
def chunk_at_cut(i, total, segments):
    """The first of a sequence's `total` chunks in segment i, where segments are alike."""
    return i * total // segments
