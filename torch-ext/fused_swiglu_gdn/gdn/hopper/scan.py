"""The sequential half of Gated DeltaNet prefill on Hopper: a pass over the chunks of a sequence.

Per chunk of 64 tokens, with Tb, P and the row factors F from prepare (docs/gdn.md):

    X = V - F0 (K S);   vt = Tb X;   O = F2 (Q S) + P vt;   S = gam_C S + K^T (F1 vt).

A CTA owns one sequence (or a segment of one), one value head and 64 columns of V per state
warpgroup. Everything is computed transposed, [V, *], so that the fp32 state S^T [64, 128] is a
wgmma accumulator and, rounded, the next register operand A. docs/gdn_hopper.md has the timeline of
a chunk and shows why the kernel cannot deadlock.

Sizes: C = 64 tokens a chunk, K = V = 128, W state warpgroups a CTA, STAGES ring slots.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from ..portable.cuts import word_at_cut
from .primitives import C, D, a_layout, acc_layout, as_a, decayed_state, pin, start_product
from .scheduler import CARRY, Unit, place

STAGES = gl.constexpr(3)  # of the ring; with 2 a chunk takes 1.4 times as long (docs/notes/gdn.md)


@gluon.jit
def _load_partition(u, h0_ptr, hT_ptr, ck_ptr, o_ptr, V_FIRST: gl.constexpr):
    """Loads chunk after chunk into the ring, up to STAGES ahead; one warp."""
    FACTORS: gl.constexpr = u.f_smem.shape[1]
    OPERANDS: gl.constexpr = 2 if u.e_desc is None else 3
    BYTES: gl.constexpr = C * (OPERANDS * D + 64 * u.W + 2 * C) * 2 + FACTORS * 4
    LATE: gl.constexpr = 0 if u.e_desc is None else C * (D + 2 * C) * 2
    for c in range(u.chunks):
        s = c % STAGES
        full = u.full.index(s)
        hw.mbarrier.wait(u.empty.index(s), ((c // STAGES) & 1) ^ 1)  # first round: at once
        hw.mbarrier.expect(full, BYTES - LATE)
        row = u.row + c * C
        block = u.block + c * u.heads
        if u.e_desc is not None:  # then k and q are what prepare wrote
            if c == 0:
                hw.wait_for_predecessor()
        _load_tokens(u.k_desc, u, row, u.key_head, 0, u.k_smem.index(s), full)
        for w in gl.static_range(u.W):
            v_smem = u.v_smem.index(s * u.W + w)
            _load_tokens(u.v_desc, u, row, u.head, u.column + w * u.second, v_smem, full)
        _load_tokens(u.q_desc, u, row, u.key_head, 0, u.q_smem.index(s), full)
        if u.e_desc is None:
            if c == 0:
                hw.wait_for_predecessor()
        hw.tma_load(u.f_desc, [block * FACTORS], full, u.f_smem.index(s))
        if u.e_desc is not None:
            hw.mbarrier.wait(u.empty.index(STAGES + s), ((c // STAGES) & 1) ^ 1)
            full = u.full.index(STAGES + s)
            hw.mbarrier.expect(full, LATE)
        hw.tma_load(u.t_desc, [block * C, 0], full, u.t_smem.index(s))
        if u.e_desc is not None:
            _load_tokens(u.e_desc, u, row, u.key_head, 0, u.e_smem.index(s), full)
        hw.tma_load(u.p_desc, [block * C, 0], full, u.p_smem.index(s))
    if u.packed:
        _zero_padding(u, o_ptr)


@gluon.jit
def _zero_padding(u, o_ptr):
    """Zeroes this CTA's columns of tokens behind the last packed sequence; one warp, under the
    last chunks."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    t = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, ROWS)), 1)
    d = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS)), 0)
    zero = gl.zeros((4, 64), o_ptr.dtype.element_ty, ROWS)
    first = u.padding
    while first < u.tokens:
        for token in range(first, gl.minimum(first + C, u.tokens), 4):
            at = o_ptr + ((token + t).to(gl.int64) * u.heads + u.head) * D + u.column + d
            for w in gl.static_range(u.W):
                gl.store(at + w * u.second, zero, mask=token + t < u.tokens)
        first += u.padding_step


@gluon.jit
def _load_tokens(desc, u, row, head, column, smem, full):
    """Loads a tile [C, columns] of one head; rows past the sequence's end arrive as zeros."""
    hw.tma_load(desc, [u.batch, u.end, row, head, column], full, hw.as_box(smem, desc))


@gluon.jit
def _store_tokens(u, o_smem, o, c, W_INDEX: gl.constexpr):
    """Stores O^T [64, C] of chunk c; TMA drops rows past the sequence's end."""
    hw.tma_store_wait(0)  # the previous store has finished reading o_smem
    o_smem.permute((1, 0)).store(o)
    hw.fence_async_shared()
    where = [u.batch, u.end, u.row + c * C, u.head, u.column + W_INDEX * u.second]
    hw.tma_store(u.o_desc, where, hw.as_box(o_smem, u.o_desc))


@gluon.jit
def _opaque(x):
    """x, hidden from the optimiser, which would keep offsets of the initial state live over the
    loop."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _state_offsets(column, V_FIRST: gl.constexpr):
    """Offsets of S^T [64, K] of columns column.. in one head's state, [K, V] or [V, K]."""
    v = _opaque(gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout(D))))
    v = gl.expand_dims(column + v, 1)
    k = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, acc_layout(D))), 0)
    if V_FIRST:
        offsets = v * D + k
    else:
        offsets = k * D + v
    return offsets


@gluon.jit
def _at_cut(u, o_ptr, column):
    """Addresses in o of S^T [64, K] of columns column.. of V, then of M, before o is written
    there."""
    WORDS: gl.constexpr = D // 2  # fp32 words in a head's row of o; half of them in a slice
    x = _opaque(gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout(D))))
    x = gl.expand_dims(column + x, 1)
    k = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, acc_layout(D))), 0)
    at = o_ptr.to(gl.pointer_type(gl.float32))
    at += (u.carry.to(gl.int64) * u.heads + u.head) * WORDS
    return at + word_at_cut(x, k, u.heads * WORDS, D, D, 64, WORDS // 2)


@gluon.jit
def _initial_state(u, h0_ptr, o_ptr, column, W_INDEX: gl.constexpr, V_FIRST: gl.constexpr):
    """Loads S^T [64, K] fp32."""
    S = gl.zeros((64, D), gl.float32, acc_layout(D))
    if h0_ptr is not None:
        if (u.source >= 0) & (column < D):  # of M there is no state
            h0 = h0_ptr + u.source.to(gl.int64) * u.source_step + u.head * (D * D)
            S = gl.load(h0 + _state_offsets(column, V_FIRST)).to(gl.float32)
    if u.source == CARRY:
        S = gl.load(_at_cut(u, o_ptr, column))
        # TMA writes O over it, through another proxy, on behalf of another thread: the
        # barrier before a store orders threads, only this fence the proxies.
        hw.fence_async_global()
    if W_INDEX == 1 or u.e_desc is not None:
        if column >= D:  # M: from the identity
            S = gl.where(_state_offsets(column - D, True) % (D + 1) == 0, 1.0, 0.0)
    return S


@gluon.jit
def _decayed(u, S, slot, more):
    """gam_C S for the chunk in a slot of the ring; S if there is none."""
    f = u.f_smem.index(slot)
    if u.e_desc is None:
        S = decayed_state(S, f, more)
    else:
        gam = f.load(gl.SliceLayout(0, acc_layout(D)))
        S = S * gl.expand_dims(gl.where(more, gam, 1.0), 0)
    return S


@gluon.jit
def _last_keys(u, s):
    """K as the update takes it."""
    if u.e_desc is None:
        return u.k_smem.index(s)
    else:
        return u.e_smem.index(s)


@gluon.jit
def _state_partition(
    u, h0_ptr, hT_ptr, ck_ptr, o_ptr, W_INDEX: gl.constexpr, V_FIRST: gl.constexpr
):
    """Carries S^T of 64 columns of V through the chunks; one warpgroup. Tiles are [64, *]."""
    X_LAYOUT: gl.constexpr = acc_layout(C)
    TOKEN: gl.constexpr = gl.SliceLayout(0, X_LAYOUT)  # a factor per token, along the columns
    DTYPE: gl.constexpr = u.q_desc.dtype
    LAST: gl.constexpr = 0 if u.e_desc is None else STAGES  # of what a chunk reads until its end
    column = u.column + W_INDEX * u.second
    o_smem = u.o_smem.index(W_INDEX)
    S = _initial_state(u, h0_ptr, o_ptr, column, W_INDEX, V_FIRST)
    Sa = as_a(S, DTYPE)
    ob = gl.zeros((64, C), DTYPE, X_LAYOUT)
    next_ck, ck_row = u.next_ck, u.ck_row
    hw.mbarrier.wait(u.full.index(0), 0, pred=u.chunks > 0)
    S = pin(_decayed(u, S, 0, u.chunks > 0))
    for c in range(u.chunks):
        s, n = c % STAGES, (c + 1) % STAGES  # this chunk's slot and the next one's
        k, f, end = u.k_smem.index(s), u.f_smem.index(s), _last_keys(u, s)
        sk = start_product(Sa, k)
        o1 = start_product(Sa, u.q_smem.index(s))
        # Under these two: give the previous slot back, send the previous O out, fetch V and F0.
        hw.mbarrier.arrive(u.empty.index(LAST + (c + STAGES - 1) % STAGES), count=1, pred=c > 0)
        if c > u.warm:
            _store_tokens(u, o_smem, ob, c - 1, W_INDEX)
        if u.e_desc is None:
            f0 = f.slice(0, C).load(TOKEN)
        v = u.v_smem.index(s * u.W + W_INDEX).permute((1, 0)).load(X_LAYOUT)
        sk = hw.warpgroup_mma_wait(1, (sk,))
        if u.e_desc is None:
            x = v.to(gl.float32) - gl.expand_dims(f0, 0) * sk
            vt = start_product(as_a(x, DTYPE), u.t_smem.index(s))
            # Under the Tb product: scale O.
            o1 = hw.warpgroup_mma_wait(1, (o1,))
            o1 = o1 * gl.expand_dims(f.slice(2 * C, C).load(TOKEN), 0)
            f1 = f.slice(C, C).load(TOKEN)
            vt, o1, f1 = hw.warpgroup_mma_wait(0, (vt, o1, f1))  # all named: none moves past it
            wa = as_a(vt * gl.expand_dims(f1, 0), DTYPE)
        else:  # the factors are in the operands
            hw.mbarrier.wait(u.full.index(STAGES + s), (c // STAGES) & 1)
            vt = start_product(as_a(v.to(gl.float32) - sk, DTYPE), u.t_smem.index(s))
            vt, o1 = hw.warpgroup_mma_wait(0, (vt, o1))
            wa = as_a(vt, DTYPE)
        wa = gl.convert_layout(wa, a_layout(D), assert_trivial=True)
        S = hw.warpgroup_mma(wa, end, S, is_async=True)
        p = u.p_smem.index(s).permute((1, 0))
        o = hw.warpgroup_mma(as_a(vt, DTYPE), p, o1, is_async=True)
        more = c + 1 < u.chunks
        if u.e_desc is not None:
            hw.mbarrier.arrive(u.empty.index(s), count=1)
        hw.mbarrier.wait(u.full.index(n), ((c + 1) // STAGES) & 1, pred=more)
        S = hw.warpgroup_mma_wait(1, (S,))
        # Under the P product: round S, and scale it for the next chunk.
        Sa = pin(as_a(S, DTYPE))
        if ck_ptr is None:
            S = _decayed(u, S, n, more)
            if u.e_desc is not None:
                # passes at once: ptxas moves none of the above past it, to where P vt has ended
                hw.mbarrier.wait(u.full.index(n), ((c + 1) // STAGES) & 1, pred=more)
        # ptxas lets no wgmma cross the back edge if a plain instruction reads its result later.
        o, S = hw.warpgroup_mma_wait(0, (o, S))
        ob = pin(o.to(DTYPE))
        if ck_ptr is not None:
            if (c == next_ck) & (c < u.whole):
                ck = ck_ptr + ck_row.to(gl.int64) * (D * D)
                gl.store(ck + _state_offsets(column, V_FIRST), S.to(ck_ptr.dtype.element_ty))
                next_ck += u.every
                ck_row += u.heads
            S = _decayed(u, S, n, more)
    if u.chunks > u.warm:
        _store_tokens(u, o_smem, ob, u.chunks - 1, W_INDEX)
    # Also where no chunk was: this kernel must not end before prepare does, nor write o before the
    # launches that use it are complete.
    hw.wait_for_predecessor()
    for c in range(u.zeros):
        _store_tokens(u, o_smem, gl.zeros((64, C), DTYPE, X_LAYOUT), c, W_INDEX)
    if hT_ptr is not None:
        if u.target >= 0:
            hT = hT_ptr + u.target.to(gl.int64) * u.target_step + u.head * (D * D)
            gl.store(hT + _state_offsets(column, V_FIRST), S.to(hT_ptr.dtype.element_ty))
    if u.target == CARRY:
        gl.store(_at_cut(u, o_ptr, column), S)
    hw.tma_store_wait(0)


@gluon.jit
def _state_partition_0(u, h0_ptr, hT_ptr, ck_ptr, o_ptr, V_FIRST: gl.constexpr):
    _state_partition(u, h0_ptr, hT_ptr, ck_ptr, o_ptr, 0, V_FIRST)


@gluon.jit
def _state_partition_1(u, h0_ptr, hT_ptr, ck_ptr, o_ptr, V_FIRST: gl.constexpr):
    _state_partition(u, h0_ptr, hT_ptr, ck_ptr, o_ptr, 1, V_FIRST)


@gluon.jit(do_not_specialize=["T", "HV", "H", "N", "every", "split", "pool_step", "transition"])
def gdn_scan_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, t_desc, p_desc, f_desc, e_desc,  # as in Unit
    h0_ptr,  # [N or pool, HV, K, V] fp32 or 16 bits, or None
    hT_ptr,  # likewise; h0_ptr if IN_PLACE
    ck_ptr,  # [checkpoint rows, HV, K, V] likewise, or None
    index_ptr,  # [N] rows of the pool, or None
    cu_ptr,  # [N + 1] token offsets, or None: N equal sequences of T tokens
    decay_ptr,  # [rows, HV] fp32: log2 of a bound of the norm of a chunk's transition
    warm_ptr,  # [slots, HV] fp32: chunks that warm a segment up, -1: it starts from o's rows; None:
    # no launch before this one finds states
    o_ptr,  # [B, T, HV, V]; before that the states at the cuts, fp32, where word_at_cut says
    T, HV, H, N,
    every,  # chunks between checkpoints
    split,  # the most segments of a sequence
    pool_step,  # elements from one initial state to the next
    transition,  # 1: the launch that finds the states at the cuts
    IN_PLACE: gl.constexpr,  # a final state goes where its initial state was
    W: gl.constexpr,
    V_FIRST: gl.constexpr,  # states are [V, K]
    STATE_REGISTERS: gl.constexpr,  # of the second state warpgroup
    LOAD_REGISTERS: gl.constexpr,
    BY_LENGTHS: gl.constexpr,  # launched with both W, of which cu_seqlens chooses one
    LONE: gl.constexpr,  # tokens: sequences of which no launch finds states are cut, too, by their
    # decays, into segments of so many or more; 0: they are not
):  # fmt: skip
    """X = V - F0 (K S); vt = Tb X; O = F2 (Q S) + P vt; S = gam_C S + K^T (F1 vt), by chunks.

    One program computes 64 W columns of one value head of one sequence or segment.
    """
    LAYOUT: gl.constexpr = t_desc.layout  # 128-byte swizzle, for every 16-bit tile
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, C, D], LAYOUT)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES * W, C, 64], LAYOUT)
    t_smem = gl.allocate_shared_memory(t_desc.dtype, [STAGES, C, C], LAYOUT)
    FACTORS: gl.constexpr = f_desc.block_type.shape[0]
    f_smem = gl.allocate_shared_memory(gl.float32, [STAGES, FACTORS], f_desc.layout)
    e_smem: gl.constexpr = None
    if e_desc is not None:
        e_smem = gl.allocate_shared_memory(e_desc.dtype, [STAGES, C, D], LAYOUT)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, C, D], LAYOUT)
    p_smem = gl.allocate_shared_memory(p_desc.dtype, [STAGES, C, C], LAYOUT)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [W, C, 64], LAYOUT)
    # Ke, Tb and P have a ring of their own: they come later, and stay until the end of a chunk
    SLOTS: gl.constexpr = STAGES if e_desc is None else 2 * STAGES
    full, empty = hw.ring_barriers(SLOTS, W)
    PACKED: gl.constexpr = cu_ptr is not None
    if transition != 0:
        hw.launch_dependents()
    where = place(
        cu_ptr, index_ptr, decay_ptr, warm_ptr, T, HV, H, N, every, split, pool_step, transition,
        IN_PLACE, W, BY_LENGTHS, LONE,
    )  # fmt: skip
    u = Unit(
        q_desc, k_desc, v_desc, o_desc, t_desc, p_desc, f_desc, e_desc, q_smem, k_smem, v_smem,
        t_smem, p_smem, f_smem, e_smem, o_smem, full, empty, *where, PACKED, W,
    )  # fmt: skip
    args = (u, h0_ptr, hT_ptr, ck_ptr, o_ptr, V_FIRST)
    # Triton passes args to the workers through memory that the reductions in `place` may still use.
    hw.barrier()
    if W == 2:
        hw.warp_specialize(
            [_state_partition_0, _state_partition_1, _load_partition], args,
            [4, 1], [STATE_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
    else:
        hw.warp_specialize([_state_partition_0, _load_partition], args, [1], [LOAD_REGISTERS])
