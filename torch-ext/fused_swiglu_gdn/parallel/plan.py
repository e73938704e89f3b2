"""The pieces (segments) of sequences on each rank and their order; computed on the host of every
rank.

Borders of sequences cut a rank's fragments into pieces, which are the sequences of its own calls.
The pieces of a sequence form a chain. A piece with a successor is *outgoing*, one with a
predecessor *incoming*; each has a slot in its rank's send buffer. A fragment has at most one of
either.
"""

import bisect
from typing import Dict, List, NamedTuple, Sequence, Tuple


class Piece(NamedTuple):
    sequence: int
    start: int  # in the stream
    stop: int
    rank: int  # the process
    place: int  # among that process's pieces

    @property
    def length(self) -> int:
        return self.stop - self.start


class Slot(NamedTuple):
    """Position of a piece's data in the all-gathered buffer."""

    rank: int
    number: int


class Plan(NamedTuple):
    pieces: List[List[Piece]]  # of each process, in the order of its tokens
    chains: Dict[int, List[Piece]]  # of each sequence that has several pieces
    outgoing: Dict[Piece, Slot]
    incoming: Dict[Piece, Slot]
    slots_out: int  # of a process, at most
    slots_in: int
    has_middle: bool  # some piece has a predecessor and a successor: its transition is needed


def make_plan(cu_seqlens: Sequence[int], layout: Sequence[Sequence[Tuple[int, int]]]) -> Plan:
    """The plan of a stream; cu_seqlens [N + 1] and layout are those of the whole stream."""
    pieces: List[List[Piece]] = []
    chains: Dict[int, List[Piece]] = {}
    for rank, fragments in enumerate(layout):
        mine: List[Piece] = []
        for start, stop in fragments:
            n = bisect.bisect_right(cu_seqlens, start) - 1
            while start < stop:
                end = min(cu_seqlens[n + 1], stop)
                if end > start:
                    mine.append(Piece(n, start, end, rank, len(mine)))
                    chains.setdefault(n, []).append(mine[-1])
                start, n = end, n + 1
        pieces.append(mine)
    chains = {n: sorted(chain, key=_start) for n, chain in chains.items() if len(chain) > 1}
    outgoing, slots_out = _slots(pieces, [p for chain in chains.values() for p in chain[:-1]])
    incoming, slots_in = _slots(pieces, [p for chain in chains.values() for p in chain[1:]])
    has_middle = any(len(chain) > 2 for chain in chains.values())
    return Plan(pieces, chains, outgoing, incoming, slots_out, slots_in, has_middle)


def _start(piece: Piece) -> int:
    return piece.start


def _slots(pieces: List[List[Piece]], chosen: List[Piece]) -> Tuple[Dict[Piece, Slot], int]:
    known, slots, most = set(chosen), {}, 0
    for mine in pieces:
        own = [piece for piece in mine if piece in known]
        slots.update((piece, Slot(piece.rank, i)) for i, piece in enumerate(own))
        most = max(most, len(own))
    return slots, most
