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

from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..parallel.context import CpContext, Local, Subset
from ..parallel.exchange import start_all_gather
from ..runtime.cache import CallCache, fast_path_ok
from ..runtime.device import is_gpu, multiprocessor_count
from ..runtime.operation import Operation
from ..runtime.ops import applying, differentiating_once, needs_grad
from .call import GdnBackward, GdnCall, GdnChain, GdnEntry, GdnPieces, GradientOptions
from .ops_train import CHUNK, GRADIENT, NONE
from .reference import chain

ROOM = 32  # SMs that the kernel of a collective takes at most

# parts of a call, which ordinary calls compute as well: there is no other definition
PIECES = Operation("gdn.pieces", "gdn_pieces_fwd", GdnPieces, None, schema=None)
ENTRY = Operation("gdn.pieces", "gdn_entry_bwd", GdnEntry, None, schema=None)
BEGUN = Operation("gdn.pieces", "gdn_begun_bwd", GdnBackward, None, schema=None)
CHAIN = Operation("gdn.chain", "gdn_chain_fwd", GdnChain, chain, schema=None)


class Rule(NamedTuple):
    """A rule in chunks whose states are mapped affinely."""

    chunk: Operation
    gradient: Operation


RULES: Dict[type, Rule] = {}  # by the types of calls of both


def add_rule(chunk: Operation, gradient: Operation) -> None:
    RULES[chunk.kind] = RULES[gradient.kind] = Rule(chunk, gradient)


add_rule(CHUNK, GRADIENT)


def _run(call: GdnCall) -> Tuple[Tensor, Tensor, Tuple[Tensor, ...]]:
    """o, the final states, and the prepared blocks if the call saves them."""
    launcher = RULES[type(call)].chunk.launcher
    o, states, _, *blocks = launcher((*call.tensors, *call.options))(*call.tensors)
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
    launcher = RULES[type(call)].gradient.launcher
    return launcher((*call.tensors, *call.options))(*call.tensors)


def _part(call: GdnCall, subset: Subset, start: Tensor) -> GdnCall:
    """The call on some of the local segments; start: their states."""
    q, k, v, g, beta = (subset.take(x) for x in (call.q, call.k, call.v, call.g, call.beta))
    return call._replace(
        q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=subset.cu_seqlens, initial_state=start,
        options=call.options._replace(save_blocks=False, state_dtype=None),
    )  # fmt: skip


def _transitions(call: GdnCall, middle: Subset, like: Tensor) -> Tensor:
    """M [middle, HV, K, K] of the segments that have others on both sides."""
    eye = torch.eye(call.K, dtype=like.dtype, device=like.device)
    eye = eye.repeat(len(middle.places), call.HV, 1, 1)
    nothing = call.v.new_zeros(1, 1, 1, 1).expand(*call.v.shape[:3], call.K)
    part = _part(call._replace(v=nothing), middle, eye)
    return _run(part._replace(v=part.v.contiguous()))[1]


def _to_fill(cp: CpContext, slots: int, like: Tensor, call: GdnCall) -> Tensor:
    """Send buffer of this rank, [slots, HV, V or V + K, K]: N^T or E, and M^T below it.

    Slots without a local segment are not read.
    """
    return like.new_empty((slots, call.HV, call.V + (call.K if cp.plan.has_middle else 0), call.K))


def _fill(cp: CpContext, HV: int, device: torch.device) -> bool:
    """True if kernels over the local segments take all SMs of a GPU.

    A collective's kernel that is launched before them then starts when they have ended, and all
    other ranks wait as long: it must have ended before they start.
    """
    if not is_gpu(device):
        return False
    return 2 * HV * len(cp.pieces) + ROOM > multiprocessor_count(device.index)


def _known_states(call: GdnCall, cp: CpContext, here: Local) -> Tensor:
    """The states before the local segments, contiguous; 0 for those that other ranks compute."""
    start = call.initial_state
    if start is None:
        v, sizes = call.v, (call.HV, call.K, call.V)
        return cp.once(("zeros", sizes, v.dtype, v.device), lambda: v.new_zeros(
            (len(cp.pieces), *sizes), dtype=torch.promote_types(v.dtype, torch.float32)
        ))  # fmt: skip
    if here.incoming.places:
        start = start.masked_fill(here.continued, 0)
    return start.contiguous()


class Launches:
    """The kernels' functions for calls with the same facts, which the first of them has found.

    kind: the type of the calls. gradients: those for calls of the gradient of these calls.
    """

    __slots__ = ("kind", "pieces", "entry", "begun", "chain", "gradients")

    def __init__(self, kind: type = GdnCall):
        self.kind = kind
        self.pieces = self.entry = self.begun = self.chain = None
        self.gradients = CallCache()

    def chained(
        self, gathered: Tensor, links: Tensor, chained: Subset, given: Optional[Tensor], *options
    ) -> Tensor:
        tensors = (gathered, links, chained.rows, given)
        if self.chain is None:
            self.chain = CHAIN.launcher((*tensors, *options))
        return self.chain(*tensors)

    def of_gradient(self, tensors: tuple, options: tuple) -> "Launches":
        found = self.gradients.find(tensors, options, True)
        if found is None:
            found = Launches()
            if fast_path_ok():
                self.gradients.keep(tensors, options, found)
        return found


def _to_send(
    call: GdnCall, cp: CpContext, here: Local, start: Tensor, known: Launches
) -> Tuple[Tensor, Callable]:
    """The values to send for the outgoing segments, and a function that finishes the forward.

    The function takes the states before all local segments and returns o, the final states and the
    blocks. start: these states, but 0 for those that other ranks compute.
    """
    own, outgoing = _to_fill(cp, cp.plan.slots_out, start, call), here.outgoing
    given = call.initial_state is not None and here.slots is not None
    before = start.mT.contiguous() if given else None
    tensors = (*call.tensors[:7], start, call.cu_seqlens, here.slots, own, before)
    if known.pieces is None and cp.tokens and not call.channels:
        known.pieces = PIECES.serving(tensors, call.options)
    if known.pieces is not None:
        return own, known.pieces(*tensors)
    all_of_it = None if here.incoming.places else _run_here(call, cp, start)
    if outgoing.places:
        if all_of_it is None:
            states = _run(_part(call, outgoing, outgoing.rows_of(start)))[1]
        else:
            states = outgoing.rows_of(all_of_it[1])
        own[: len(outgoing.places), :, : call.V] = states.mT
    middle = here.middle.places
    for place, M in zip(middle, _transitions(call, here.middle, start) if middle else ()):
        own[outgoing.places.index(place), :, call.V :] = M.mT
    return own, lambda start: all_of_it or _run_here(call, cp, start)


def chunk_forward(call: GdnCall, cp: CpContext, known: Optional[Launches] = None) -> tuple:
    """o [1, T, HV, V], the state after each segment, and what the backward needs.

    That is the state before each segment; what has been sent, or None where no segment is in the
    middle; Tb, P, F of the chunks, where the call saves them.
    call: a batch of one whose sequences are the local segments; initial_state is read for segments
    that start their sequence. known: of calls with the same facts under this context.
    """
    start, known = call.initial_state, known or Launches()
    if not cp.plan.chains:
        o, states, blocks = _run_here(call, cp, start)
        return o, states, start, None, blocks
    here = cp.here(call.device)
    waits = bool(here.incoming.places)
    start = _known_states(call, cp, here)
    own, finish = _to_send(call, cp, here, start, known)
    exchanged = start_all_gather(own, cp.group, waits or _fill(cp, call.HV, call.device))
    results = None if waits else finish(start)
    gathered = exchanged()
    if waits:
        links = (here.before, here.incoming)
        start = known.chained(gathered, *links, call.initial_state, call.V, False)
        results = finish(start)
    o, states, blocks = results
    return o, states, start, own if here.middle.places else None, blocks or ()


def _gradients_here(call: GdnBackward, cp: CpContext) -> tuple:
    """Runs _gradients on all local tokens, if there are any."""
    if cp.tokens:
        return _gradients(call)
    zeros = [None if x is None else torch.zeros_like(x) for x in call.tensors[:7]]
    return *zeros, call.initial_state


def _to_send_back(
    call: GdnBackward, cp: CpContext, here: Local, sent: Optional[Tensor], known: Launches
) -> Tuple[Tensor, GdnBackward, Optional[tuple]]:
    """The values to send for the incoming segments, the call with what has been computed of it, and
    its gradients where that was all of it."""
    incoming, grads = here.incoming, None
    own = sent if here.as_sent else _to_fill(cp, cp.plan.slots_in, call.initial_state, call)
    if not incoming.places:
        return own, call, None
    asked = call.d_final_state
    tensors = (
        *map(incoming.take, call[:5]), *call[5:7], incoming.rows_of(call.initial_state),
        incoming.cu_seqlens, incoming.take(call.do),
        asked if asked is None else incoming.rows_of(asked),
    )  # fmt: skip
    options = call.options._replace(values_only=True, save_blocks=False, state_dtype=None)
    if known.entry is None and not call.channels:
        known.entry = ENTRY.serving((*tensors, own), options)
    if known.entry is not None:
        blocks = known.entry(*tensors, own)
        if tensors[0] is call.q and call.tb is None:  # its chunks are those of the call
            call = call._replace(tb=blocks[0], p=blocks[1], f=blocks[2])
    else:
        if own is sent:  # autograd would notice what is written
            own = torch.empty_like(sent)
        if here.outgoing.places:
            E = _gradients(type(call)(*tensors, *NONE, options))[7]
        else:
            grads = _gradients_here(call, cp)
            E = incoming.rows_of(grads[7])
        own[: len(E), :, : call.V] = E.reshape(len(E), call.HV, call.V, call.K)  # as it lies
    for place in here.middle.places if own is not sent else ():
        piece = cp.pieces[place]
        at, out = cp.plan.incoming[piece].number, cp.plan.outgoing[piece].number
        own[at, :, call.V :] = sent[out, :, call.V :]
    return own, call, grads


def chunk_backward(
    call: GdnBackward, cp: CpContext, sent: Optional[Tensor], needs_initial: bool,
    known: Optional[Launches] = None,
) -> tuple:  # fmt: skip
    """Gradients of the first seven tensors of the call, and of its initial state if requested.

    Its initial_state and `sent` are those that the forward saved. known: of calls with the same
    facts under this context.
    """
    if not cp.plan.chains:
        return _gradients_here(call, cp)
    known, here = known or Launches(), cp.here(call.device)
    own, call, grads = _to_send_back(call, cp, here, sent, known)
    full = _fill(cp, call.HV, call.device)
    if here.outgoing.places:
        asked = call.d_final_state
        tensors = (*call[:10], call.initial_state, *call[11:14])  # one of the layout of the chain's
        if known.begun is None and not call.channels:
            known.begun = BEGUN.serving(tensors, call.options)
        exchanged = start_all_gather(own, cp.group, known.begun is None or full)
        finish = known.begun and known.begun(*tensors)
        d_states = known.chained(exchanged(), here.behind, here.outgoing, asked, call.V, True)
        if finish is not None:
            grads = finish(d_states)
        else:
            grads = _gradients_here(call._replace(d_final_state=d_states), cp)
    else:
        exchanged = start_all_gather(own, cp.group, full)
        grads = grads or _gradients_here(call, cp)
        exchanged()
    *grads, d_start = grads
    return (*grads, d_start.masked_fill(here.continued, 0) if needs_initial else d_start)


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cp, options, known, lengths, *tensors):
        call = known.kind(*tensors, None, lengths, options)
        o, states, start, sent, blocks = chunk_forward(call, cp, known)
        ctx.cp, ctx.options, ctx.known, ctx.lengths = cp, options, known, lengths
        ctx.save_for_backward(*tensors[:7], start, sent, *blocks)
        ctx.set_materialize_grads(False)
        return o, states

    @staticmethod
    @differentiating_once("chunk_gated_delta_rule over ranks")
    def backward(ctx, do, d_states):
        (*tensors, start, sent), blocks = (kept := ctx.saved_tensors)[:9], kept[9:]
        do = torch.zeros_like(tensors[2]) if do is None else do
        q, k, _, g, beta, A_log, dt_bias, _ = wanted = ctx.needs_input_grad[4:]
        options = GradientOptions(not any((q, k, g, beta, A_log, dt_bias)), *ctx.options)
        kind = RULES[ctx.known.kind].gradient.kind
        call = kind(*tensors, start, ctx.lengths, do, d_states, *(blocks or NONE), options)
        known = ctx.known.of_gradient((*call.tensors, sent), options)
        grads = chunk_backward(call, ctx.cp, sent, wanted[-1], known)
        return (*(None,) * 4, *(x if want else None for x, want in zip(grads, wanted)))


def prepare_chunk(cp: CpContext, made: GdnCall) -> Callable:
    """The first eight tensors of a call -> o [1, T, HV, V], and the state after each local segment
    [pieces, HV, K, V]; for calls with the facts of `made`."""
    options = made.options._replace(
        state_v_first=False, output_final_state=True, state_dtype=None
    )  # fmt: skip
    kind = type(made)
    lengths, known = cp.lengths_on(made.device), Launches(kind)
    if needs_grad(made.tensors):
        apply, own = applying(_Chunk, made.tensors), (cp, options, known, lengths)
        return lambda *tensors: apply(*own, *tensors)
    return lambda *tensors: chunk_forward(kind(*tensors, None, lengths, options), cp, known)[:2]
