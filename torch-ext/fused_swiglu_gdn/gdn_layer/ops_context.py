"""The short convolution over sequences that are split among ranks (docs/parallel.md).

A local segment starts from the W - 1 inputs before it. Ranks all-gather the last W - 1 inputs of
their outgoing segments, the *tails*; a segment of fewer tokens passes on inputs from before it. In
the backward they all-gather the gradients of the inputs they have read, and each rank adds those of
its own tokens. One autograd function contains all of it, for the reason given in
gdn/ops_context.py.
"""

from typing import Callable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..parallel.context import CpContext
from ..parallel.exchange import all_gather
from ..parallel.plan import Piece, Slot
from ..runtime.ops import applying, differentiating_once, needs_grad
from .call import Convolution
from .ops import CONVOLUTION, CONVOLUTION_GRADIENT


class Source(NamedTuple):
    """Columns of one segment's tail that are columns of a later segment's history."""

    piece: Piece
    tail: slice
    history: slice


def sources(before: List[Piece], taps: int) -> List[Source]:
    """Sources of the taps - 1 inputs before a segment; `before` are the earlier segments of its
    sequence."""
    found, have = [], taps - 1
    for at in range(len(before) - 1, -1, -1):
        # the tail of the first holds what came before the sequence, too
        count = min(have, before[at].length) if at else have
        tail = slice(taps - 1 - count, taps - 1)
        found.append(Source(before[at], tail, slice(have - count, have)))
        have -= count
    return [source for source in found if source.history.stop > source.history.start]


class Request(NamedTuple):
    """A later segment's request to a local tail: columns of the gradient of its history."""

    slot: Slot
    tail: slice
    history: slice


def _sources_of(cp: CpContext, place: int, taps: int) -> List[Source]:
    """Sources of the inputs before a local segment."""
    return cp.once(("sources", place, taps), lambda: sources(cp.chain(cp.pieces[place])[0], taps))


def _requests_of(cp: CpContext, place: int, taps: int) -> List[Request]:
    """Requests of later segments to a local segment."""
    piece = cp.pieces[place]

    def make() -> List[Request]:
        return [
            Request(cp.plan.incoming[other], source.tail, source.history)
            for other in cp.chain(piece)[1]
            for source in sources(cp.chain(other)[0], taps)
            if source.piece == piece
        ]

    return cp.once(("requests", place, taps), make)


def _histories(x: Tensor, taps: int, initial: Optional[Tensor], cp: CpContext) -> Optional[Tensor]:
    """The inputs before each local segment, [pieces, D, W - 1], from x [1, D, T]; None stands for
    zeros."""
    D, history = x.shape[1], None
    if initial is not None:
        history = initial.masked_fill(cp.here(x.device).continued[..., 0], 0).to(x.dtype)
    here = cp.here(x.device)
    last = cp.bounds[here.outgoing.places[0] + 1] if here.outgoing.places else 0
    if cp.plan.slots_out == 1 and len(cp.pieces) == 1 and last >= taps - 1:
        own = x.narrow(2, last - taps + 1, taps - 1)
    else:
        own = _tails(x, taps, history, cp)
    gathered = all_gather(own, cp.group)  # [P, slots, D, W - 1]
    incoming = here.incoming.places
    if not incoming:
        return history
    if len(cp.pieces) == len(_sources_of(cp, incoming[0], taps)) == 1:
        rank, number = cp.plan.outgoing[_sources_of(cp, 0, taps)[0].piece]
        return gathered[rank, number : number + 1]
    if history is None:
        history = x.new_zeros(len(cp.pieces), D, taps - 1)
    for place in incoming:
        for piece, tail, columns in _sources_of(cp, place, taps):
            rank, number = cp.plan.outgoing[piece]
            history[place, :, columns] = gathered[rank, number, :, tail]
    return history


def _tails(x: Tensor, taps: int, history: Optional[Tensor], cp: CpContext) -> Tensor:
    """The last inputs of the outgoing segments, [slots, D, W - 1]; slots of no segment are not
    read."""
    D = x.shape[1]
    own = x.new_empty(cp.plan.slots_out, D, taps - 1)
    for number, place in enumerate(cp.here(x.device).outgoing.places):
        start, stop = cp.bounds[place], cp.bounds[place + 1]
        tokens = x[0, :, max(start, stop - taps + 1) : stop]  # [D, up to W - 1]
        if stop - start < taps - 1:
            before = x.new_zeros(D, taps - 1) if history is None else history[place]
            tokens = torch.cat([before, tokens], -1)[:, 1 - taps :]
        own[number] = tokens
    return own


def _return(
    d_history: Optional[Tensor], dx: Tensor, taps: int, cp: CpContext, needs_initial: bool
) -> Tuple[Tensor, Optional[Tensor]]:
    """Adds the gradients that other segments have for local tails to dx [1, D, T].

    Returns dx and the gradient of the initial states [pieces, D, W - 1], if requested.
    """
    incoming = cp.here(dx.device).incoming
    if len(incoming.places) == len(cp.pieces) == cp.plan.slots_in:
        own = d_history
    else:
        own = dx.new_empty(cp.plan.slots_in, dx.shape[1], taps - 1)
        if incoming.places:
            own[: len(incoming.places)] = incoming.rows_of(d_history)
    gathered = all_gather(own, cp.group)  # [P, slots, D, W - 1]
    d_initial = None
    if needs_initial:
        d_initial = d_history.masked_fill(cp.here(dx.device).continued[..., 0], 0)
    for place in cp.here(dx.device).outgoing.places:
        start, stop = cp.bounds[place], cp.bounds[place + 1]
        everything = _requests_of(cp, place, taps)
        if len(everything) == 1 and stop - start >= taps - 1:
            (rank, number), tail, columns = everything[0]
            asked, count = gathered[rank, number], tail.stop - tail.start
            asked = asked if count == taps - 1 else asked[:, columns]
            dx[0].narrow(1, stop - taps + 1 + tail.start, count).add_(asked)
            continue
        asked = gathered.new_zeros(
            gathered.shape[2:], dtype=torch.promote_types(dx.dtype, torch.float32)
        )
        for (rank, number), tail, columns in everything:
            asked[:, tail] += gathered[rank, number, :, columns]
        count = min(stop - start, taps - 1)
        latest = dx[0, :, stop - count : stop]
        latest.copy_(latest + asked[:, taps - 1 - count :])
        if d_initial is not None and place not in incoming.places and count < taps - 1:
            d_initial[place, :, count:] += asked[:, : taps - 1 - count].to(d_initial.dtype)
    return dx, d_initial


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cp, activation, has_final, x, weight, bias, initial):
        y, final, history = conv_forward(cp, activation, has_final, x, weight, bias, initial)
        ctx.cp, ctx.activation = cp, activation
        ctx.save_for_backward(x, weight, bias, history)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @differentiating_once("causal_conv1d_fn over ranks")
    def backward(ctx, dy, d_final):
        x, weight, bias, history = ctx.saved_tensors
        dy = torch.zeros_like(x) if dy is None else dy
        args = (x, weight, bias, ctx.activation, dy, d_final)
        _, _, _, *need = ctx.needs_input_grad
        dx, dweight, dbias, d_initial = conv_backward(ctx.cp, history, need[3], *args)
        grads = (dx, dweight, dbias, d_initial)
        return (None, None, None, *(d if want else None for d, want in zip(grads, need)))


def _lengths(cp: CpContext, x: Tensor) -> Optional[Tensor]:
    """cu_seqlens of the local segments, or None for a single one."""
    return cp.lengths_on(x.device) if len(cp.pieces) > 1 else None


def conv_forward(cp, activation, has_final, x, weight, bias, initial) -> tuple:
    """y [1, D, T], the last inputs of each segment or None, and the inputs before each segment."""
    taps, history = weight.shape[1], initial
    if cp.plan.chains:
        history = _histories(x, taps, initial, cp)
    if not cp.tokens:
        final = x.new_empty(0, x.shape[1], taps - 1) if has_final else None
        return torch.empty_like(x), final, history
    tensors = (x, weight, bias, None, _lengths(cp, x), history)
    y, final = CONVOLUTION.launcher((*tensors, activation, has_final))(*tensors)
    return y, final, history


def conv_backward(cp, history, needs_initial, x, weight, bias, activation, dy, d_final) -> tuple:
    """Gradients of x, weight, bias and the initial states."""
    taps = weight.shape[1]
    if cp.tokens:
        tensors = (x, weight, bias, None, _lengths(cp, x), history, dy, d_final)
        gradients = CONVOLUTION_GRADIENT.launcher((*tensors, activation))
        dx, dweight, dbias, d_history = gradients(*tensors)
    else:
        dx, dweight, d_history = torch.empty_like(x), torch.zeros_like(weight), history
        dbias = None if bias is None else torch.zeros_like(bias)
    if cp.plan.chains:
        dx, d_history = _return(d_history, dx, taps, cp, needs_initial)
    return dx, dweight, dbias, d_history


def prepare_causal_conv1d(call: Convolution, cp: CpContext) -> Callable:
    """The tensors of calls like this one -> y [1, D, T], and the last inputs of each local segment
    or None."""
    options = (cp, *call.options)
    if needs_grad(call):
        apply = applying(_Convolution, call[:6])
        return lambda x, weight, bias, _, __, initial: apply(*options, x, weight, bias, initial)
    return lambda x, weight, bias, _, __, initial: conv_forward(*options, x, weight, bias, initial)[
        :2
    ]
