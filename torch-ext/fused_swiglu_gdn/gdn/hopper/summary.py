"""The values that a rank sends for its local segments, on Hopper (docs/parallel.md).

They are N and M of S -> M S + N, the map from the state before a segment to the state after it:

    X = V - F0 (K S);   vt = Tb X;   S = gam_C S + K^T (F1 vt),

the scan without its outputs: N from the state before, or zeros, and M from the identity without V.
If decays prove that a segment's end does not depend on the state before its last chunks, only these
are run, from zeros. All is transposed, [V, *], as in scan.py.

Sizes: C = 64 tokens a chunk, K = V = D = 128, STAGES ring slots.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record
from ...runtime.primitives import sequence_bounds
from .primitives import (
    RAGGED_END,
    C,
    D,
    a_layout,
    acc_layout,
    as_a,
    decayed_state,
    pin,
    start_product,
)
from .scheduler import LOOK_BACK, warm_up

STAGES = gl.constexpr(3)
GROUPS = gl.constexpr(2)  # warpgroups, of 64 columns of V or of M each


@record
class Piece:
    """Descriptors, ring buffers and barriers of one CTA, and its place."""

    k_desc: hw.tma.tensor_descriptor  # [.., .., tokens, H, K] box [1, 1, C, 1, K]
    v_desc: hw.tma.tensor_descriptor  # [.., .., tokens, HV, V] box [1, 1, C, 1, 64]
    t_desc: hw.tma.tensor_descriptor  # Tb [rows * HV * C, C] box [C, C]
    f_desc: hw.tma.tensor_descriptor  # F [rows * HV * 4 * C] fp32 box [4 * C]
    k_smem: gl.shared_memory_descriptor  # [STAGES, C, K]
    v_smem: gl.shared_memory_descriptor  # [STAGES * GROUPS, C, 64]
    t_smem: gl.shared_memory_descriptor  # [STAGES, C, C]
    f_smem: gl.shared_memory_descriptor  # [STAGES, 4 * C] fp32
    full: gl.shared_memory_descriptor  # [STAGES] mbarriers: the slot's loads are complete
    empty: gl.shared_memory_descriptor  # [STAGES] mbarriers: both warpgroups are done with it
    end: gl.tensor  # of the segment, a token
    row: gl.tensor  # of its first token to run, in the coordinates of TMA
    head: gl.tensor  # value head
    key_head: gl.tensor
    column: gl.tensor  # of V, the first warpgroup's
    second: gl.tensor  # from there to the second one's: 64, or D where that one has columns of M
    heads: gl.tensor  # HV
    block: gl.tensor  # of the first chunk to run: chunk row times HV plus the head
    chunks: gl.tensor  # to run; 0 if nothing is sent
    source: gl.tensor  # the state before it, or -1 for zeros
    target: gl.tensor  # the row of the values to send


@gluon.jit
def _load_partition(u, start_ptr, sent_ptr):
    """Loads chunk after chunk into the ring, up to STAGES ahead; one warp."""
    BYTES: gl.constexpr = C * (D + 64 * GROUPS + C) * 2 + 4 * C * 4
    for c in range(u.chunks):
        s = c % STAGES
        full = u.full.index(s)
        hw.mbarrier.wait(u.empty.index(s), ((c // STAGES) & 1) ^ 1)  # first round: at once
        hw.mbarrier.expect(full, BYTES)
        row = u.row + c * C
        block = u.block + c * u.heads
        at = [RAGGED_END, u.end, row, u.key_head, 0]
        hw.tma_load(u.k_desc, at, full, hw.as_box(u.k_smem.index(s), u.k_desc))
        for w in gl.static_range(GROUPS):  # past the columns of V are zeros, as M wants
            at = [RAGGED_END, u.end, row, u.head, u.column + w * u.second]
            hw.tma_load(u.v_desc, at, full, hw.as_box(u.v_smem.index(s * GROUPS + w), u.v_desc))
        hw.tma_load(u.f_desc, [block * (4 * C)], full, u.f_smem.index(s))
        hw.tma_load(u.t_desc, [block * C, 0], full, u.t_smem.index(s))


@gluon.jit
def _offsets(column):
    """Offsets of S^T [64, K] of these columns of V, and then of M, in one head's [V + K, K]."""
    v = gl.expand_dims(column + gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout(D))), 1)
    return v * D + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, acc_layout(D))), 0)


@gluon.jit
def _state_partition(u, start_ptr, sent_ptr, GROUP: gl.constexpr):
    """Carries S^T of 64 columns through the chunks; one warpgroup. Tiles are [64, *]."""
    X_LAYOUT: gl.constexpr = acc_layout(C)
    TOKEN: gl.constexpr = gl.SliceLayout(0, X_LAYOUT)  # a factor per token, along the columns
    DTYPE: gl.constexpr = u.k_desc.dtype
    column = u.column + GROUP * u.second
    S = gl.zeros((64, D), gl.float32, acc_layout(D))
    if start_ptr is not None:
        if (u.source >= 0) & (column < D):
            start = start_ptr + (u.source.to(gl.int64) * u.heads + u.head) * (D * D)
            S = gl.load(start + _offsets(column))
    if column >= D:
        S = gl.where(_offsets(column - D) % (D + 1) == 0, 1.0, 0.0)
    Sa = as_a(S, DTYPE)
    hw.mbarrier.wait(u.full.index(0), 0, pred=u.chunks > 0)
    S = pin(decayed_state(S, u.f_smem.index(0), u.chunks > 0))
    for c in range(u.chunks):
        s, n = c % STAGES, (c + 1) % STAGES  # this chunk's slot and the next one's
        k, f = u.k_smem.index(s), u.f_smem.index(s)
        sk = start_product(Sa, k)
        hw.mbarrier.arrive(u.empty.index((c + STAGES - 1) % STAGES), count=1, pred=c > 0)
        f0 = f.slice(0, C).load(TOKEN)
        v = u.v_smem.index(s * GROUPS + GROUP).permute((1, 0)).load(X_LAYOUT)
        sk = hw.warpgroup_mma_wait(0, (sk,))
        x = v.to(gl.float32) - gl.expand_dims(f0, 0) * sk
        vt = start_product(as_a(x, DTYPE), u.t_smem.index(s))
        f1 = f.slice(C, C).load(TOKEN)
        vt, f1 = hw.warpgroup_mma_wait(0, (vt, f1))
        wa = as_a(vt * gl.expand_dims(f1, 0), DTYPE)
        wa = gl.convert_layout(wa, a_layout(D), assert_trivial=True)
        S = hw.warpgroup_mma(wa, k, S, is_async=True)
        more = c + 1 < u.chunks
        hw.mbarrier.wait(u.full.index(n), ((c + 1) // STAGES) & 1, pred=more)
        S = hw.warpgroup_mma_wait(0, (S,))
        Sa = pin(as_a(S, DTYPE))
        S = pin(decayed_state(S, u.f_smem.index(n), more))
    if u.chunks > 0:
        size = D * 2 * u.second  # of a head's [V, K] or [V + K, K]
        sent_ptr += (u.target.to(gl.int64) * u.heads + u.head) * size
        gl.store(sent_ptr + _offsets(column), S)


@gluon.jit
def _state_partition_0(u, start_ptr, sent_ptr):
    _state_partition(u, start_ptr, sent_ptr, 0)


@gluon.jit
def _state_partition_1(u, start_ptr, sent_ptr):
    _state_partition(u, start_ptr, sent_ptr, 1)


@gluon.jit
def _place(cu_ptr, rows_ptr, decay_ptr, T, HV, H, WITH_M: gl.constexpr):
    """The fields of Piece from `end` on, for this CTA."""
    SLICES: gl.constexpr = 2 if WITH_M else 1
    pid = gl.program_id(0)
    column = (pid % SLICES) * 64
    head = (pid // SLICES) % HV
    n = pid // (SLICES * HV)
    start, end = sequence_bounds(cu_ptr, n, T)
    start, end = start.to(gl.int32), end.to(gl.int32)
    tokens = end - start
    total = (tokens + C - 1) // C
    block = (start // C + n) * HV + head
    target = gl.load(rows_ptr + n).to(gl.int32)
    begin = total  # of the chunks to run
    if target >= 0:
        warm = warm_up(decay_ptr, block, HV, total, gl.minimum(total, LOOK_BACK))
        begin = gl.where(warm < 0, 0, total - warm)
    source = gl.where(begin > 0, -1, n)
    second = n * 0 + 64
    if WITH_M:
        second = n * 0 + D
    return (
        end, RAGGED_END - tokens + begin * C, head, head // (HV // H), column, second, HV,
        block + begin * HV, total - begin, source, target,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "HV", "H"])
def gdn_summary_kernel(
    k_desc, v_desc, t_desc, f_desc,  # as in Piece
    start_ptr,  # [N, HV, V, K] fp32: states before the segments, or None for zeros
    sent_ptr,  # [slots, HV, V or V + K, K] fp32: N^T and M^T
    rows_ptr,  # [N] int32: the slot of each segment, or negative
    cu_ptr,  # [N + 1] token offsets
    decay_ptr,  # [rows, HV] fp32: log2 of a bound of the norm of a chunk's transition
    T, HV, H,
    WITH_M: gl.constexpr,
    STATE_REGISTERS: gl.constexpr,  # of the second warpgroup
    LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Allocates the shared memory of a CTA and starts its partitions.

    A CTA has 128 columns of N, or 64 of N and 64 of M, of a head of a segment.
    """
    LAYOUT: gl.constexpr = t_desc.layout  # 128-byte swizzle, for every 16-bit tile
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, C, D], LAYOUT)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES * GROUPS, C, 64], LAYOUT)
    t_smem = gl.allocate_shared_memory(t_desc.dtype, [STAGES, C, C], LAYOUT)
    f_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], f_desc.layout)
    full, empty = hw.ring_barriers(STAGES, GROUPS)
    where = _place(cu_ptr, rows_ptr, decay_ptr, T, HV, H, WITH_M)
    u = Piece(
        k_desc, v_desc, t_desc, f_desc, k_smem, v_smem, t_smem, f_smem, full, empty, *where
    )  # fmt: skip
    args = (u, start_ptr, sent_ptr)
    # Triton passes args to the workers through memory that reductions above may still use.
    hw.barrier()
    hw.warp_specialize(
        [_state_partition_0, _state_partition_1, _load_partition], args,
        [4, 1], [STATE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
