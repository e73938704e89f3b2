"""CpContext: one rank's view of a batch that is split among several."""

from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..runtime.cache import CallCache, fast_path_ok
from ..runtime.checks import is_int, is_tensor
from ..runtime.device import from_host
from . import exchange
from .plan import Piece, Plan, Slot, make_plan


class Subset(NamedTuple):
    """Some of the local segments, and their tokens as a packed batch of its own."""

    places: List[int]  # which pieces
    rows: Tensor  # the same on the device
    cu_seqlens: Tensor  # [places + 1]
    span: Optional[Tuple[int, int]]  # their tokens, if they lie side by side
    index: Optional[Tensor]  # else which these are

    def take(self, x: Tensor) -> Tensor:
        """Selects the subset's tokens of [1, tokens, ..]."""
        if self.span is None:
            return x.index_select(1, self.index)
        start, stop = self.span
        return x if stop - start == x.shape[1] else x[:, start:stop]

    def rows_of(self, x: Tensor) -> Tensor:
        """Selects the subset's rows of [pieces, ..]."""
        return x if len(self.places) == len(x) else x.index_select(0, self.rows)


class Local(NamedTuple):
    """The local segments that continue on other ranks, and their tables, on one device."""

    outgoing: Subset  # others continue them
    incoming: Subset  # they continue others
    middle: Subset  # both
    as_sent: bool  # the slots of those in the middle are the same in both directions
    slots: Optional[Tensor]  # [pieces] int32: the slot of each outgoing one, or -1; None if none is
    before: Tensor  # [pieces, 1 + most] int32: how many values of others come before, and whose
    behind: Tensor  # likewise of those behind them, the last first
    continued: Tensor  # [pieces, 1, 1, 1], True for incoming ones


def known_call(cp: object, tensors: tuple, options: tuple) -> Optional[Callable]:
    """The function of the tensors of an eager call like one before it under this context, or
    None."""
    run = cp.calls.find(tensors, options, True) if type(cp) is CpContext else None
    return None if run is None or exchange.agrees(cp.group) else run


class CpContext:
    """One batch over the ranks of a group, seen from one of them; build_cp_context makes it.

    A stream of packed sequences is cut into the fragments that the ranks hold, and the borders of
    sequences cut these into *pieces*: the local segments, which are the sequences of a rank's own
    calls.

    Attributes:
        group, rank, size: the process group, this rank, and the number of ranks.
        tokens: the number of local tokens, over all rows of the batch.
        cu_seqlens: [pieces + 1], int32, cumulative lengths of the local segments.
        position_ids: [batch_size, tokens / batch_size], the position of each local token in its
            sequence.
        sequences: [pieces], the index of each segment's sequence in the stream.
        starts_here: [pieces], True for the first of its sequence: its initial state is read.
        ends_here: [pieces], True for the last one: its final state is the sequence's.
    """

    @torch.inference_mode(False)  # its tensors are to serve training as well
    def __init__(self, cu: Sequence[int], group, layout: Sequence, batch_size: int, device):
        self.group, self.rank, self.size = group, exchange.rank(group), exchange.size(group)
        self.device, self.batch_size = device, batch_size
        self.lengths, self.layout = list(cu), layout  # of the whole stream; of each of its rows
        self.row = cu[-1] // batch_size  # tokens of a row, over all processes
        rows = [n * self.row for n in range(batch_size)] if self.row else []
        self.plan: Plan = make_plan(
            cu, [[(row + a, row + b) for row in rows for a, b in mine] for mine in layout]
        )
        self.pieces: List[Piece] = self.plan.pieces[self.rank]
        self.bounds = [0]
        for piece in self.pieces:
            self.bounds.append(self.bounds[-1] + piece.length)
        self.tokens = self.bounds[-1]
        self._known: Dict[tuple, object] = {}  # what was made for a device
        self.calls = CallCache()  # what computes calls that have passed the checks
        self.cu_seqlens = self.lengths_on(device)
        sequences = torch.tensor([p.sequence for p in self.pieces], dtype=torch.int64)
        self.sequences = from_host(sequences, device)
        self.starts_here = self.marks(self.plan.incoming, device)
        self.ends_here = self.marks(self.plan.outgoing, device)
        self.position_ids = from_host(self._positions().view(batch_size, -1), device)

    def keep(self, tensors: tuple, options: tuple, run: Callable) -> None:
        """Keeps what computes eager calls like this one, which need no checks then."""
        if fast_path_ok() and not exchange.agrees(self.group):
            self.calls.keep(tensors, options, run)

    def _positions(self) -> Tensor:
        starts = [p.start - self.lengths[p.sequence] for p in self.pieces]
        spans = [torch.arange(s, s + p.length) for s, p in zip(starts, self.pieces)]
        return torch.cat(spans) if spans else torch.arange(0)

    @torch.compiler.disable
    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The local tokens of x, which holds the rows of the whole batch along `dim`."""
        _has_tokens(x, dim, self.row, "a row")
        return x.index_select(dim, self.columns(x.device))

    @torch.compiler.disable
    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tokens of all ranks in their order, from the local ones: the inverse of shard.

        Every rank calls it, in the backward as well, where gradients are summed over ranks.
        """
        own = self.tokens // self.batch_size
        _has_tokens(x, dim, own, "a row here")
        return _Unshard.apply(x, self, dim)

    def columns(self, device) -> Tensor:
        """Indices of the local tokens of a row, in order."""
        return self._once("columns", device, lambda: _columns(self.layout[self.rank]))

    def gathered(self, device) -> Tensor:
        """Index of each token of a row in the all-gathered padded shards."""

        def make():
            places, most = torch.empty(self.row, dtype=torch.int64), self.most
            for rank, fragments in enumerate(self.layout):
                columns = _columns(fragments)
                places[columns] = rank * most + torch.arange(len(columns))
            return places

        return self._once("gathered", device, make)

    @property
    def most(self) -> int:
        """Tokens of a row in the rank that has most."""
        return max(sum(b - a for a, b in fragments) for fragments in self.layout)

    def lengths_on(self, device) -> Tensor:
        """cu_seqlens on a device."""
        return self._once("lengths", device, lambda: torch.tensor(self.bounds, dtype=torch.int32))

    def here(self, device) -> Local:
        """The local segments that continue on other ranks, with their tables on a device."""
        found = self._known.get(device)
        if found is None:
            with torch.inference_mode(False):
                found = self._known[device] = self._local(device)
        return found

    def _local(self, device) -> Local:
        plan, pieces = self.plan, self.pieces
        slots = [plan.outgoing.get(piece, (0, -1))[1] for piece in pieces]
        before = [[plan.outgoing[x] for x in self.chain(piece)[0]] for piece in pieces]
        behind = [[plan.incoming[x] for x in self.chain(piece)[1][::-1]] for piece in pieces]
        outgoing, incoming, middle = map(
            partial(self._subset, device=device),
            ([plan.outgoing], [plan.incoming], [plan.outgoing, plan.incoming]),
        )
        return Local(
            outgoing, incoming, middle, bool(middle.places) and self._as_sent(middle),
            _on(device, slots) if outgoing.places else None,
            _on(device, _linked(before, plan.slots_out)),
            _on(device, _linked(behind, plan.slots_in)),
            ~self.marks(plan.incoming, device).view(-1, 1, 1, 1),
        )  # fmt: skip

    def _as_sent(self, middle: Subset) -> bool:
        plan, pieces = self.plan, [self.pieces[place] for place in middle.places]
        alike = all(plan.incoming[x].number == plan.outgoing[x].number for x in pieces)
        return alike and plan.slots_in == plan.slots_out

    def lengths_alone(self, x: object, dim: int) -> Optional[Tensor]:
        """cu_seqlens for an equivalent ordinary call on x, whose dimension `dim` is tokens, or
        None.

        There is one if no sequence is shared and the ranks do not compare their arguments.
        """
        if torch.compiler.is_compiling() or self.plan.chains or not self.tokens:
            return None
        fits = isinstance(x, Tensor) and x.ndim > dim and x.shape[0] == 1
        if not fits or x.shape[dim] != self.tokens or exchange.agrees(self.group):
            return None
        return self.lengths_on(x.device)

    def marks(self, others: Dict[Piece, Slot], device) -> Tensor:
        """[pieces], True for segments that are not in others, which is plan.incoming or
        plan.outgoing."""
        name = "starts" if others is self.plan.incoming else "ends"
        return self._once(name, device, lambda: torch.tensor(
            [piece not in others for piece in self.pieces], dtype=torch.bool
        ))  # fmt: skip

    def _subset(self, kinds: List[Dict[Piece, Slot]], device) -> Subset:
        """The local segments that are in all of these."""
        places = [i for i, piece in enumerate(self.pieces) if all(piece in x for x in kinds)]
        spans = [(self.bounds[i], self.bounds[i + 1]) for i in places]
        bounds = [0]
        for start, stop in spans:
            bounds.append(bounds[-1] + stop - start)
        side_by_side = all(a[1] == b[0] for a, b in zip(spans, spans[1:]))
        rows = from_host(torch.tensor(places, dtype=torch.int64), device)
        if side_by_side:
            whole = (spans[0][0], spans[-1][1]) if spans else (0, 0)
            return Subset(places, rows, _on(device, bounds), whole, None)
        return Subset(
            places, rows, _on(device, bounds), None, from_host(_columns(spans), device)
        )  # fmt: skip

    def chain(self, piece: Piece) -> Tuple[List[Piece], List[Piece]]:
        """The segments of a sequence before one of its segments, and those after it, in order."""
        chain = self.plan.chains.get(piece.sequence, [piece])
        at = chain.index(piece)
        return chain[:at], chain[at + 1 :]

    def once(self, name: object, make):
        """Returns make(), which may depend only on this context and the name, from a cache."""
        return self._once(name, None, make)

    def _once(self, name: object, device, make):
        key = (name, device)
        if key not in self._known:
            with torch.inference_mode(False):
                made = make()
                if device is not None and isinstance(made, Tensor):
                    made = from_host(made, device)
                self._known[key] = made
        return self._known[key]


def _has_tokens(x: object, dim: object, tokens: int, where: str) -> None:
    is_tensor("x", x)
    is_int("dim", dim, -x.ndim, x.ndim - 1, ", a dimension of x")
    if x.shape[dim] != tokens:
        raise ValueError(f"x must have the {tokens} tokens of {where}, got {x.shape[dim]}")


def _columns(fragments: Sequence[Tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in fragments)])


def _on(device, numbers: list) -> Tensor:
    return from_host(torch.tensor(numbers, dtype=torch.int32), device)


def _linked(chains: List[List[Slot]], slots: int) -> List[List[int]]:
    """The rows of Local.before or behind, of these chains of slots, `slots` a rank."""
    most = max(map(len, chains), default=0)
    rows = [[rank * slots + number for rank, number in chain] for chain in chains]
    return [[len(row), *row, *[0] * (most - len(row))] for row in rows]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cp, dim):
        ctx.cp, ctx.dim = cp, dim
        own = x.movedim(dim, 0)
        padded = own.new_zeros(cp.most, *own.shape[1:])
        padded[: len(own)] = own
        everyone = exchange.all_gather(padded, cp.group).flatten(0, 1)
        return everyone.index_select(0, cp.gathered(x.device)).movedim(0, dim)

    @staticmethod
    def backward(ctx, gradient):
        cp, gradient = ctx.cp, gradient.movedim(ctx.dim, 0)
        parts = gradient.new_zeros(cp.size * cp.most, *gradient.shape[1:])
        parts[cp.gathered(gradient.device)] = gradient
        own = exchange.sum_scatter(parts.unflatten(0, (cp.size, cp.most)), cp.group)
        return own[: cp.tokens // cp.batch_size].movedim(0, ctx.dim), None, None
