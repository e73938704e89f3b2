"""Assigns work to each CTA of the scan: sequence, head, columns and, if heads are few, segment.

A long sequence of few heads is cut into segments, by its own length and head count alone, so that a
result does not depend on the batch. If the decays prove that the state before some chunks has no
effect, a segment starts from zero at those chunks. Otherwise a launch before this one has computed
the state at the cut, or the program before goes on through it: "Segments" in docs/gdn_hopper.md.
The device decides, per head.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record
from ...runtime.primitives import sequence_bounds
from ..portable.cuts import FEWEST, FORGOTTEN, chunk_at_cut, count_segments
from ..portable.padding import first_padding
from .primitives import RAGGED_END, C, D

# chunks: with 32, 2/8 heads and 4096 tokens take 1.4 times as long (docs/notes/gdn.md)
MIN_SEGMENT = gl.constexpr(16)
LOOK_BACK = gl.constexpr(128)  # chunks: the longest warm-up
FEWEST_SEGMENTS = gl.constexpr(FEWEST)  # of a sequence of which a launch finds states
LONE_LOOK_BACK = gl.constexpr(8)  # the same where no launch finds states
VECTOR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # each warp has the whole of it
# `source` and `target` of a Unit that are no row of the caller's states
NOWHERE = gl.constexpr(-1)  # zeros
CARRY = gl.constexpr(-2)  # the rows of o from token `carry` on


@record
class Unit:
    """Descriptors, ring buffers and barriers of one CTA, and its place in the batch."""

    q_desc: hw.tma.tensor_descriptor  # [.., .., tokens, H, K] box [1, 1, C, 1, K]
    k_desc: hw.tma.tensor_descriptor  # likewise
    v_desc: hw.tma.tensor_descriptor  # [.., .., tokens, HV, V] box [1, 1, C, 1, 64]
    o_desc: hw.tma.tensor_descriptor  # likewise
    t_desc: hw.tma.tensor_descriptor  # Tb [rows * HV * C, C] box [C, C]
    p_desc: hw.tma.tensor_descriptor  # P, likewise
    f_desc: hw.tma.tensor_descriptor  # F [rows * HV * 4 * C] fp32 box [4 * C]; gam with e_desc
    e_desc: object  # Ke like k, of Kimi Delta Attention, or None
    q_smem: gl.shared_memory_descriptor  # [STAGES, C, K]
    k_smem: gl.shared_memory_descriptor  # [STAGES, C, K]
    v_smem: gl.shared_memory_descriptor  # [STAGES * W, C, 64]
    t_smem: gl.shared_memory_descriptor  # [STAGES, C, C]
    p_smem: gl.shared_memory_descriptor  # [STAGES, C, C]
    f_smem: gl.shared_memory_descriptor  # [STAGES, 4 * C] fp32; [STAGES, K] with e_desc
    e_smem: object  # [STAGES, C, K], or None
    o_smem: gl.shared_memory_descriptor  # [W, C, 64]
    full: gl.shared_memory_descriptor  # [STAGES] mbarriers: the slot's loads are complete; with
    # e_desc as many of q, k, v and f, then of e, t and p
    empty: gl.shared_memory_descriptor  # likewise: all state warpgroups are done with it
    batch: gl.tensor  # coordinates in the token descriptors: (batch, end, row, head, column)
    end: gl.tensor
    row: gl.tensor  # of the first token
    head: gl.tensor  # value head
    key_head: gl.tensor
    column: gl.tensor  # first column of V
    second: gl.tensor  # from there to the second warpgroup's; D where that one has columns of M
    heads: gl.tensor  # HV
    block: gl.tensor  # chunk row of the first chunk times HV plus the head: index into Tb, P and F
    chunks: gl.tensor  # to compute; 0 for a skipped or empty sequence
    warm: gl.tensor  # of these, how many only bring the state up and write nothing
    zeros: gl.tensor  # chunks of a skipped sequence, whose o is zero
    source: gl.tensor  # where in h0 the initial state is, or one of the above
    target: gl.tensor  # where in hT the final state goes, or one of the above
    source_step: gl.tensor  # elements from one such place to the next
    target_step: gl.tensor
    whole: gl.tensor  # of `chunks`, how many have all 64 tokens: only these end at a checkpoint
    every: gl.tensor  # chunks from one checkpoint to the next
    next_ck: gl.tensor  # the chunk at whose end the first checkpoint is due
    ck_row: gl.tensor  # its row times HV plus the head
    carry: gl.tensor  # the token behind the cut whose state is read or written
    padding: gl.tensor  # the first token behind all sequences that this CTA zeroes
    padding_step: gl.tensor  # from there to the next 64 of them
    tokens: gl.tensor  # of a row of the batch
    packed: gl.constexpr
    W: gl.constexpr  # state warpgroups


@gluon.jit
def warm_up(decay_ptr, block, heads, c, limit):
    """The fewest chunks before chunk c whose joint transition has a norm below 2^-30.

    -1 if `limit` chunks are not enough.
    """
    i = gl.arange(0, LOOK_BACK, layout=VECTOR)
    past = decay_ptr + block + (c - 1 - i) * heads
    decay = gl.load(past, mask=i < gl.minimum(limit, c), other=0.0)
    return _fewest(decay, i, limit)


@gluon.jit
def reach(decay_ptr, block, heads, limit):
    """warm_up for the chunks from the first on: how far the state before a sequence has an
    effect."""
    i = gl.arange(0, LOOK_BACK, layout=VECTOR)
    decay = gl.load(decay_ptr + block + i * heads, mask=i < limit, other=0.0)
    return _fewest(decay, i, limit)


@gluon.jit
def _fewest(decay, i, limit):
    forgotten = gl.associative_scan(decay, 0, hw.add) < FORGOTTEN
    fewest = gl.min(gl.where(forgotten, i + 1, LOOK_BACK + 1), 0)
    return gl.where(fewest <= limit, fewest, -1)


@gluon.jit
def _sequence(cu_ptr, slot, N, SPAN: gl.constexpr):
    """(sequence, segment) of a slot: sequence n owns the slots from cu[n] // SPAN + n on, SPAN
    tokens being the shortest segment."""
    n = slot * 0 - 1
    i = gl.arange(0, LOOK_BACK, layout=VECTOR)
    for j in range(0, N, LOOK_BACK):
        start = gl.maximum(gl.load(cu_ptr + j + i, mask=j + i < N, other=0), 0).to(gl.int32)
        n += gl.sum(((start // SPAN + j + i <= slot) & (j + i < N)).to(gl.int32), 0)
    n = gl.maximum(n, 0)
    start = gl.maximum(gl.load(cu_ptr + n), 0).to(gl.int32)
    return n, gl.maximum(slot - start // SPAN - n, 0)  # cu may be wrong


@gluon.jit
def _long_sequence(cu_ptr, k, N):
    """The k-th of the sequences of which a launch finds states; N if there are fewer."""
    n, before = k * 0, k * 0
    i = gl.arange(0, LOOK_BACK, layout=VECTOR)
    for j in range(0, N, LOOK_BACK):
        start = gl.load(cu_ptr + j + i, mask=j + i < N, other=0)
        stop = gl.load(cu_ptr + j + i + 1, mask=j + i < N, other=0)
        is_long = (stop - start >= FEWEST_SEGMENTS * MIN_SEGMENT * C).to(gl.int32)
        count = before + gl.associative_scan(is_long, 0, hw.add)
        n += gl.sum(((count <= k) & (j + i < N)).to(gl.int32), 0)
        before = gl.max(count, 0)
    return n


@gluon.jit
def _packed(cu_ptr, slot, T, N, split, transition, SPAN: gl.constexpr):
    """(sequence, segment, slot, first token, end, length) of a slot of the scan; of the launch
    before it, which has `split` slots for each long sequence, as the scan's slots are."""
    n, i = slot // split, slot % split
    evenly, present = N * split <= N + T // SPAN, slot >= 0
    if transition != 0:
        n = _long_sequence(cu_ptr, n, N)
        present = n < N
        n = gl.minimum(n, N - 1)
    elif evenly == 0:
        n, i = _sequence(cu_ptr, slot, N, SPAN)
    start, end = sequence_bounds(cu_ptr, n, T)
    start, end = start.to(gl.int32), end.to(gl.int32)
    if transition != 0:  # a last slot's successor is written, of wrong offsets, too
        highest = gl.minimum(N * split, N + T // SPAN) - 2
        slot = gl.minimum(gl.where(evenly, n * split, start // SPAN + n) + i, highest)
    return n, i, slot, start, end, gl.where(present, end - start, 0)


@gluon.jit
def _segment(decay_ptr, warm_ptr, block, heads, row, i, total, segments, transition):
    """(first chunk, end, warm-up or -1, whether the state at the end is needed) of segment i.

    The transition launch reads the decays before each cut and stores the warm-ups for the next
    launch.
    """
    begin = chunk_at_cut(gl.minimum(i, segments), total, segments)
    end = chunk_at_cut(gl.minimum(i + 1, segments), total, segments)
    hw.wait_for_predecessor()  # decay, or what the launches in between made of it
    warm, needed = i * 0, i < 0
    if transition != 0:
        limit = gl.minimum(total // segments, LOOK_BACK)
        if end < total:
            after = warm_up(decay_ptr, block, heads, end, limit)
            gl.store(warm_ptr + row + heads, after.to(gl.float32))
            needed = after < 0
        if needed & (i > 0):
            warm = warm_up(decay_ptr, block, heads, begin, limit)
    elif (i > 0) & (begin < total):
        # not written if offsets are wrong
        warm = gl.minimum(gl.load(warm_ptr + row), begin.to(gl.float32)).to(gl.int32)
    return begin, end, warm, needed


@gluon.jit
def lone_segments(tokens, split, shortest):
    """Segments, of `shortest` tokens or more, of a sequence where no launch finds states, so that
    none needs room for them."""
    return gl.maximum(gl.minimum(split, tokens // shortest), 1)


@gluon.jit
def before_cut(c, tokens, split, shortest, look_back):
    """True if one of the `look_back` chunks after chunk c begins a segment, or there are fewer."""
    total = (tokens + C - 1) // C
    segments = lone_segments(tokens, split, shortest)
    # cuts up to chunk c: j total // segments <= c
    return ((c + look_back + 1) * segments - 1) // total > ((c + 1) * segments - 1) // total


@gluon.jit
def _lone_segment(decay_ptr, block, heads, i, total, segments):
    """(first chunk, end, warm-up, whether it is the last) of segment i, without a launch before
    that finds states: where a cut needs one, the segment before goes on to the next cut."""
    j = gl.arange(0, LOOK_BACK, layout=VECTOR)  # of all cuts at once
    at = chunk_at_cut(gl.minimum(j, segments), total, segments)
    hw.wait_for_predecessor()  # decay
    lost, warm = gl.zeros_like(j).to(gl.float32), j * 0 - 1
    for n in gl.static_range(1, LONE_LOOK_BACK + 1):
        past = decay_ptr + block + (at - n) * heads
        lost += gl.load(past, mask=(j > 0) & (j < segments) & (n <= at), other=0.0)
        warm = gl.where((warm < 0) & (lost < FORGOTTEN), n, warm)
    own = gl.sum(gl.where(j == i, warm, 0), 0)
    begins = (i == 0) | (own >= 0) & (i < segments)
    later = gl.min(gl.where((j > i) & (warm >= 0), j, segments), 0)
    begin = chunk_at_cut(gl.minimum(i, segments), total, segments)
    end = gl.where(begins, chunk_at_cut(later, total, segments), begin)
    return begin, end, gl.maximum(own, 0), begins & (later == segments)


@gluon.jit
def _one_is_long(cu_ptr, N, T):
    """True if one sequence is longer than the rest together; takes at most LOOK_BACK sequences."""
    i = gl.arange(0, LOOK_BACK, layout=VECTOR)
    start = gl.load(cu_ptr + i, mask=i < N, other=0)
    stop = gl.load(cu_ptr + i + 1, mask=i < N, other=0)
    return gl.max((stop - start).to(gl.int32), 0) > T // 2


@gluon.jit
def place(
    cu_ptr, index_ptr, decay_ptr, warm_ptr, T, HV, H, N, every, split, pool_step, transition,
    IN_PLACE: gl.constexpr, W: gl.constexpr, BY_LENGTHS: gl.constexpr, LONE: gl.constexpr,
):  # fmt: skip
    """The fields of Unit from `batch` to `tokens` for this CTA; arguments as for the kernel."""
    SPAN: gl.constexpr = LONE if LONE else MIN_SEGMENT * C
    # of sequences with fewer tokens no launch finds states
    SHORT: gl.constexpr = 1 << 30 if warm_ptr is None else FEWEST_SEGMENTS * MIN_SEGMENT * C
    second = gl.where(transition != 0, D, 64)
    slices = second * 2 // (64 * W)
    pid = gl.program_id(0)
    column = pid % slices * 64
    head = (pid // slices) % HV
    slot = pid // (slices * HV)
    if cu_ptr is None:
        n, i = slot // split, slot % split
        tokens = T
        start = n * T
        batch, end, row = n * 0, n, n * 0
        padding = T
        block = n * ((T + C - 1) // C)
        checkpoint = n * (T // (every * C))
    else:
        padding = first_padding(cu_ptr, T, N).to(gl.int32) + slot * C
        padding = gl.where(transition != 0, T, padding)
        n, i, slot, start, end, tokens = _packed(cu_ptr, slot, T, N, split, transition, SPAN)
        batch, row = n * 0 + RAGGED_END, RAGGED_END - tokens
        block = start // C + n
        checkpoint = start // (every * C)
    block = block * HV + head
    total = (tokens + C - 1) // C
    segments, lone = count_segments(tokens, split, MIN_SEGMENT * C), i < 0
    if LONE:
        lone = tokens < SHORT
        segments = gl.where(lone, lone_segments(tokens, split, LONE), segments)
    begin, stop, warm, needed = n * 0, gl.where(i == 0, total, 0), n * 0, i < 0
    last = i == segments - 1
    if decay_ptr is not None:
        if segments > 1:
            if LONE:
                if lone & (transition == 0):
                    begin, stop, warm, last = _lone_segment(
                        decay_ptr, block, HV, i, total, segments
                    )
            if warm_ptr is not None:
                if lone == 0:
                    begin, stop, warm, needed = _segment(
                        decay_ptr, warm_ptr, block, HV, slot * HV + head, i, total, segments,
                        transition,
                    )  # fmt: skip
    work = stop - begin
    source = n
    if index_ptr is not None:
        source = gl.load(index_ptr + n).to(gl.int32)
    skipped = source < 0
    unknown = warm < 0  # the state before this segment
    warm = gl.maximum(warm, 0)
    zeros = gl.where(skipped, work, 0)
    work = gl.where(skipped, 0, work)
    target = gl.where(last & (source >= 0), source if IN_PLACE else n, NOWHERE)
    if IN_PLACE:  # the carry launch took the pool's row to o, since the last segment writes it
        unknown |= (i == 0) & (segments > 1) & (transition == 0) & (source >= 0)
    source = gl.where(unknown, CARRY, gl.where(i == 0, gl.maximum(source, NOWHERE), NOWHERE))
    whole = tokens // C
    carry = start + begin * C
    if transition != 0:  # from zero, or from the state if it is known
        carry = start + stop * C
        work = gl.where(needed, work, 0)
        source = gl.where(unknown | (work == 0), NOWHERE, source)
        target = gl.where(work > 0, CARRY, NOWHERE)
        zeros, whole = n * 0, n * 0
    if BY_LENGTHS:  # else it is the launch with the other W that works
        idle = _one_is_long(cu_ptr, N, T) != (W == 1)
        work, zeros = gl.where(idle, 0, work), gl.where(idle, 0, zeros)
        target = gl.where(idle, NOWHERE, target)
    warm = gl.where(work > 0, warm, 0)
    first = begin - warm
    silent = gl.where(transition != 0, work + warm, warm)
    passed = begin // every  # checkpoints before this segment
    return (
        batch, end, row + first * C, head, head // (HV // H), column, second, HV,
        block + first * HV,
        work + warm, silent, zeros, source, target, pool_step,
        pool_step if IN_PLACE else HV * (D * D), whole - first, every,
        (passed + 1) * every - 1 - first, (checkpoint + passed) * HV + head, carry,
        padding, gl.num_programs(0) // (slices * HV) * C, T,
    )  # fmt: skip
