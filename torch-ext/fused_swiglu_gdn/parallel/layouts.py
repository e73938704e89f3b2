"""Layouts of a stream: the fragments (start, stop) of tokens that each rank holds."""

from operator import index
from typing import List, Sequence, Tuple, Union

Fragments = List[Tuple[int, int]]
NAMES = ("contiguous", "zigzag", "torch")


def fragments_of(layout: Union[str, Sequence], length: int, P: int) -> List[Fragments]:
    """The fragments of each of P ranks; adjacent ones on one rank are joined.

    "contiguous" is one fragment each; "zigzag" blocks r and 2 P - 1 - r of 2 P, which gives every
    rank the same share of causal attention; "torch" the layout of torch's context_parallel.
    """
    if not isinstance(layout, str):
        return _explicit(layout, length, P)
    if layout not in NAMES:
        names = ", ".join(map(repr, NAMES))
        raise ValueError(f"layout must be one of {names}, or fragments, got {layout!r}")
    if layout == "torch" and length % (2 * P):
        size = -(-length // P)  # torch.chunk
        return [_joined([(min(r * size, length), min((r + 1) * size, length))]) for r in range(P)]
    if layout == "contiguous":
        return [_joined([(r * length // P, (r + 1) * length // P)]) for r in range(P)]
    cuts = [i * length // (2 * P) for i in range(2 * P + 1)]
    blocks = list(zip(cuts, cuts[1:]))
    return [_joined([blocks[r], blocks[2 * P - 1 - r]]) for r in range(P)]


def _joined(fragments: Sequence) -> Fragments:
    """The fragments without empty ones, and with adjacent ones joined."""
    found: Fragments = []
    for start, stop in fragments:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _explicit(layout: Sequence, length: int, P: int) -> List[Fragments]:
    try:
        given = [[(index(a), index(b)) for a, b in fragments] for fragments in layout]
    except (TypeError, ValueError):
        raise ValueError(
            f"layout must be a name or, for each process, a list of (start, stop), got {layout!r}"
        ) from None
    if len(given) != P:
        raise ValueError(f"layout must have fragments for {P} processes, got {len(given)}")
    ends = 0
    for start, stop in sorted(fragment for fragments in given for fragment in fragments):
        if start != ends or stop < start:
            raise ValueError(
                f"layout must hold each of the {length} tokens once, got ({start}, {stop}) where "
                f"{ends} comes next"
            )
        ends = stop
    if ends != length:
        raise ValueError(f"layout must hold each of the {length} tokens once, got {ends}")
    return [_joined(fragments) for fragments in given]
