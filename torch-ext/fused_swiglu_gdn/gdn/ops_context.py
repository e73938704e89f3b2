"""The gated delta rule over sequences that are split among ranks (docs/parallel.md).

A local segment maps the state before it to the state after it, S_out = M S_in + N. Ranks all-gather
N (and M for segments with others on both sides); each rank then knows the initial states of its
segments and runs the ordinary kernel. In the backward they all-gather E = dS_in of a segment for
dS_out = 0, and the chain runs the other way, with M^T.

One autograd function contains the exchange and all that depends on it, so that every rank reaches
every collective, in the backward as well, even if its own tokens need no state of another rank.
Work that needs no such state is launched before the exchange ends. The family gdn.pieces computes
the values to send, if it supports the call; otherwise ordinary calls do, and the results of a call
that needs no other rank's state contain the values to send.

States are [pieces, HV, K, V] here, in fp32 or fp64.
"""

from typing import Callable, List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..parallel.context import CpContext
from ..parallel.exchange import start_all_gather
from ..parallel.plan import Slot
from ..runtime.operation import Operation
from ..runtime.ops import needs_grad
from .call import GdnBackward, GdnCall, GdnPieces, GradientOptions
from .ops_train import CHUNK, GRADIENT, NONE

# parts of a call, which ordinary calls compute as well: there is no other definition
PIECES = Operation("gdn.pieces", "gdn_pieces_fwd", GdnPieces, None, schema=None)
ENTRY = Operation("gdn.pieces", "gdn_entry_bwd", GdnBackward, None, schema=None)


def _run(call: GdnCall) -> Tuple[Tensor, Tensor, Tuple[Tensor, ...]]:
    """o, the final states, and the prepared blocks if the call saves them."""
    o, states, _, *blocks = CHUNK.launcher((*call.tensors, *call.options))(*call.tensors)
    return o, states, tuple(blocks) if call.options.save_blocks else ()


def _run_here(call: GdnCall, cp: CpContext, start: Optional[Tensor]) -> tuple:
    """Runs _run on all local tokens, if there are any."""
    if cp.tokens:
        return _run(call._replace(initial_state=start))
    wide = torch.promote_types(call.v.dtype, torch.float32)
    states = call.v.new_empty(0, call.HV, call.K, call.V, dtype=wide)
    return torch.empty_like(call.v), states, ()


def _gradients(call: GdnBackward) -> tuple:
    """Gradients of the first seven tensors of a call, and of its initial state."""
    return GRADIENT.launcher((*call.tensors, *call.options))(*call.tensors)


def _part(call, cp: CpContext, name: str, start: Tensor):
    """The call, or that of its gradient, on some of the local segments; start: their states."""
    subset = cp.subset(name, call.device)
    q, k, v, g, beta = (subset.take(x) for x in (call.q, call.k, call.v, call.g, call.beta))
    return call._replace(
        q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=subset.cu_seqlens, initial_state=start,
        options=call.options._replace(save_blocks=False, state_dtype=None),
    )  # fmt: skip


def _transitions(call: GdnCall, cp: CpContext, like: Tensor) -> Tensor:
    """M [middle, HV, K, K] of the segments that have others on both sides."""
    middle = cp.subset("middle", call.device).places
    eye = torch.eye(call.K, dtype=like.dtype, device=like.device)
    eye = eye.repeat(len(middle), call.HV, 1, 1)
    nothing = call.v.new_zeros(1, 1, 1, 1).expand(*call.v.shape[:3], call.K)
    part = _part(call._replace(v=nothing), cp, "middle", eye)
    return _run(part._replace(v=part.v.contiguous()))[1]


def _rows(cp: CpContext, slots: int, like: Tensor, call: GdnCall) -> Tensor:
    """Send buffer of this rank, [slots, HV, V or V + K, K]: N^T or E^T, and M^T below it.

    Slots without a local segment are not read.
    """
    return like.new_empty(slots, call.HV, call.V + (call.K if cp.plan.has_middle else 0), call.K)


def _chained(gathered: Tensor, slots: List[Slot], V: int, transposed: bool) -> Tensor:
    """N_n + M_n (N_(n-1) + M_(n-1) (.. N_0)) of these slots, with M^T if `transposed`.

    In fp64: torch may compute products in TF32, which is too coarse for a chain of states.
    """
    first = gathered[slots[0].rank, slots[0].number, :, :V]
    if len(slots) == 1:
        return first.mT
    S = first.double()  # S^T
    for rank, number in slots[1:]:
        N, M = gathered[rank, number].double().split([V, gathered.shape[-2] - V], -2)
        S = N + S @ (M.mT if transposed else M)
    return S.mT.to(gathered.dtype)


def _to_send(call: GdnCall, cp: CpContext, start: Tensor) -> Tuple[Tensor, Callable]:
    """The values to send for the outgoing segments, and a function that finishes the forward.

    The function takes the states before all local segments and returns o, the final states and the
    blocks. start: these states, but 0 for those that other ranks compute.
    """
    own = _rows(cp, cp.plan.slots_out, start, call)
    outgoing = cp.subset("outgoing", call.device)
    before = None if call.initial_state is None else start.mT.contiguous()
    rows = cp.slots_on(call.device) if outgoing.places else None
    tensors = (*call.tensors[:7], start, call.cu_seqlens, rows, own, before)
    launch = PIECES.serving(tensors, call.options) if cp.tokens else None
    if launch is not None:
        return own, launch(*tensors)
    known = None if cp.subset("incoming", call.device).places else _run_here(call, cp, start)
    if outgoing.places:
        if known is None:
            part = _part(call, cp, "outgoing", outgoing.rows_of(start))
            states = _run(part)[1]
        else:
            states = outgoing.rows_of(known[1])
        own[: len(outgoing.places), :, : call.V] = states.mT
    middle = cp.subset("middle", call.device).places
    for place, M in zip(middle, _transitions(call, cp, start) if middle else ()):
        own[outgoing.places.index(place), :, call.V :] = M.mT
    return own, lambda start: known or _run_here(call, cp, start)


def chunk_forward(call: GdnCall, cp: CpContext) -> tuple:
    """o [1, T, HV, V], the state after each segment, and what the backward needs.

    That is the state before each segment; M^T [slots, HV, K, K] of the outgoing ones, of those in
    the middle at least, or None where none is; Tb, P, F of the chunks, where the call saves them.
    call: a batch of one whose sequences are the local segments; initial_state is read for segments
    that start their sequence.
    """
    start = call.initial_state
    if not cp.plan.chains:
        o, states, blocks = _run_here(call, cp, start)
        return o, states, start, None, blocks
    if start is None:
        wide = torch.promote_types(call.v.dtype, torch.float32)
        start = call.v.new_zeros(len(cp.pieces), call.HV, call.K, call.V, dtype=wide)
    else:
        first = cp.marks(cp.plan.incoming, call.device).view(-1, 1, 1, 1)
        start = start.masked_fill(~first, 0)
    own, finish = _to_send(call, cp, start)
    exchanged = start_all_gather(own, cp.group)
    incoming, transitions = cp.subset("incoming", call.device).places, None
    results = None if incoming else finish(start)
    gathered = exchanged()
    if cp.subset("middle", call.device).places:
        transitions = own[:, :, call.V :].contiguous()
    for place in incoming:
        before, _ = cp.chain(cp.pieces[place])
        slots = [cp.plan.outgoing[piece] for piece in before]
        start[place] = _chained(gathered, slots, call.V, False)
    o, states, blocks = results or finish(start)
    return o, states, start, transitions, blocks or ()


def _gradients_here(call: GdnBackward, cp: CpContext) -> tuple:
    """Runs _gradients on all local tokens, if there are any."""
    if cp.tokens:
        return _gradients(call)
    zeros = [None if x is None else torch.zeros_like(x) for x in call.tensors[:7]]
    return *zeros, call.initial_state


def _to_send_back(
    call: GdnBackward, cp: CpContext, transitions: Optional[Tensor]
) -> Tuple[Tensor, Callable]:
    """The values to send for the incoming segments, and a function that finishes the backward.

    The function takes the gradients of the states after all segments and returns all local
    gradients. call: with these, but without the contributions of other ranks.
    """
    own = _rows(cp, cp.plan.slots_in, call.initial_state, call)
    incoming, known = cp.subset("incoming", call.device), None
    if incoming.places:
        part = _part(call, cp, "incoming", incoming.rows_of(call.initial_state))
        part = part._replace(
            do=incoming.take(call.do), d_final_state=incoming.rows_of(call.d_final_state),
            tb=None, p=None, f=None, options=part.options._replace(values_only=True),
        )  # fmt: skip
        launch = ENTRY.serving(part.tensors, part.options)
        if launch is not None:
            E, (tb, p, f) = launch(*part.tensors)
            if part.T == call.T and call.tb is None:  # its chunks are those of the call
                call = call._replace(tb=tb, p=p, f=f)
        elif cp.subset("outgoing", call.device).places:
            E = _gradients(part)[7]
        else:
            known = _gradients_here(call, cp)
            E = incoming.rows_of(known[7])
        own[: len(incoming.places), :, : call.V] = E.mT
    for place in cp.subset("middle", call.device).places:
        piece = cp.pieces[place]
        at, out = cp.plan.incoming[piece].number, cp.plan.outgoing[piece].number
        own[at, :, call.V :] = transitions[out]
    return own, lambda d_states: known or _gradients_here(call._replace(d_final_state=d_states), cp)


def chunk_backward(
    call: GdnBackward, cp: CpContext, transitions: Optional[Tensor], needs_initial: bool
) -> tuple:
    """Gradients of the first seven tensors of the call, and of its initial state if requested.

    Its initial_state and `transitions` are those that the forward saved.
    """
    if not cp.plan.chains:
        return _gradients_here(call, cp)
    asked = call.d_final_state
    d_states = torch.zeros_like(call.initial_state) if asked is None else asked.clone()
    own, finish = _to_send_back(call._replace(d_final_state=d_states), cp, transitions)
    exchanged = start_all_gather(own, cp.group)
    outgoing = cp.subset("outgoing", call.device).places
    grads = None if outgoing else finish(d_states)
    gathered = exchanged()
    for place in outgoing:
        _, behind = cp.chain(cp.pieces[place])
        slots = [cp.plan.incoming[piece] for piece in reversed(behind)]
        d_states[place].add_(_chained(gathered, slots, call.V, True))
    *grads, d_start = grads or finish(d_states)
    if needs_initial:
        first = cp.marks(cp.plan.incoming, call.device).view(-1, 1, 1, 1)
        d_start = d_start.masked_fill(~first, 0)
    return (*grads, d_start)


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cp, options, *tensors):
        call = GdnCall(*tensors, None, cp.lengths_on(tensors[0].device), options)
        o, states, start, transitions, blocks = chunk_forward(call, cp)
        ctx.cp, ctx.options = cp, options
        ctx.save_for_backward(*tensors[:7], start, transitions, *blocks)
        ctx.set_materialize_grads(False)
        return o, states

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_states):
        cp, kept = ctx.cp, ctx.saved_tensors
        (*tensors, start, transitions), blocks = kept[:9], kept[9:]
        lengths = cp.lengths_on(tensors[0].device)
        do = torch.zeros_like(tensors[2]) if do is None else do
        q, k, _, g, beta, A_log, dt_bias, _ = wanted = ctx.needs_input_grad[2:]
        options = GradientOptions(not any((q, k, g, beta, A_log, dt_bias)), *ctx.options)
        call = GdnBackward(*tensors, start, lengths, do, d_states, *(blocks or NONE), options)
        grads = chunk_backward(call, cp, transitions, wanted[-1])
        return (None, None, *(x if want else None for x, want in zip(grads, wanted)))


def gdn_chunk_context(call: GdnCall, cp: CpContext) -> Tuple[Tensor, Tensor]:
    """o [1, T, HV, V], and the state after each local segment [pieces, HV, K, V]."""
    tensors = call.tensors[:8]
    if needs_grad(tensors):
        return _Chunk.apply(cp, call.options, *tensors)
    return chunk_forward(call, cp)[:2]
