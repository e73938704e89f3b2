"""Both passes over the states for the gradient of Kimi Delta Attention, on Hopper (docs/kda.md).

Forward over the chunks, the state S before each and its deltas; backward over them, the gradient dS
of the state after each and that of V. The operands Kd, Qd and Ke of prepare hold the gates:

    X = V - Kd S    vt = Tb X    S <- gam S + Ke^T vt
    dvt = P^T dO + Ke dS    dV = Tb^T dvt    dS <- gam dS + Qd^T dO - Kd^T dV

It is gdn/hopper/gradient_states.py (a CTA owns a sequence, a value head, 64 columns of V and one
direction; tiles are transposed) but for the ring. Three operands of 16 KB leave no room for three
slots, so there are two rings: what a chunk reads until its delta is solved is given back there, and
what it reads until its state is complete, at the end. The product Qd^T dO needs neither the state
nor dV and is started before the solve.

Sizes: C = 64 tokens a chunk, K = V = D = 128, EARLY and late slots in the rings.
"""

from ...gdn.hopper.gradient_states import (
    STATE,
    TILE,
    chunk_at,
    diagonal,
    finish_pass,
    keep_state,
    keep_tokens,
    state_at,
    to_state,
)
from ...gdn.hopper.primitives import C, D, as_a, pin, sequence_at
from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record

EARLY = gl.constexpr(3)  # slots of the ring whose tiles are read until the solve


@record
class Pass:
    """Descriptors, rings and barriers of one CTA, and its place in the batch.

    The early ring has K, V or dO and, backward, Qd and P, where K is what multiplies the state: Kd,
    or backward Ke. The late one has Tb, gam and E, what multiplies the delta: Ke, or backward Kd.
    """

    k_desc: hw.tma.tensor_descriptor  # [.., .., tokens, HV, K] box [1, 1, C, 1, K]
    e_desc: hw.tma.tensor_descriptor  # likewise
    q_desc: hw.tma.tensor_descriptor  # likewise
    in_desc: hw.tma.tensor_descriptor  # V or dO [.., .., tokens, HV, V] box [1, 1, C, 1, 64]
    out_desc: hw.tma.tensor_descriptor  # vt or dV, likewise
    state_desc: hw.tma.tensor_descriptor  # S or dS of all chunks [rows * HV * K, V] box [K, 64]
    t_desc: hw.tma.tensor_descriptor  # Tb [rows * HV * C, C] box [C, C]
    p_desc: hw.tma.tensor_descriptor  # P, likewise
    f_desc: hw.tma.tensor_descriptor  # gam [rows * HV * K] fp32 box [K]
    k_smem: gl.shared_memory_descriptor  # [EARLY, C, K]
    q_smem: gl.shared_memory_descriptor  # [EARLY, C, K]
    in_smem: gl.shared_memory_descriptor  # [EARLY, C, 64]
    p_smem: gl.shared_memory_descriptor  # [EARLY, C, C]
    e_smem: gl.shared_memory_descriptor  # [LATE, C, K]
    t_smem: gl.shared_memory_descriptor  # [LATE, C, C]
    f_smem: gl.shared_memory_descriptor  # [LATE, K] fp32
    out_smem: gl.shared_memory_descriptor  # [C, 64]
    state_smem: gl.shared_memory_descriptor  # [K, 64]
    early_full: gl.shared_memory_descriptor  # [EARLY] mbarriers: the slot's loads are complete
    early_empty: gl.shared_memory_descriptor  # [EARLY] mbarriers: the slot has been read
    late_full: gl.shared_memory_descriptor  # [LATE] mbarriers
    late_empty: gl.shared_memory_descriptor  # [LATE] mbarriers
    batch: gl.tensor  # coordinates in the token descriptors: (batch, end, row, head, column)
    end: gl.tensor
    row: gl.tensor  # of the first token
    head: gl.tensor
    column: gl.tensor  # first column of V
    heads: gl.tensor  # HV
    block: gl.tensor  # of the first chunk: chunk row times HV plus the head
    chunks: gl.tensor
    LATE: gl.constexpr
    REVERSE: gl.constexpr


@gluon.jit
def _load_partition(u, tb_ptr, first_ptr, last_ptr, first_strides, last_strides):
    """Loads chunk after chunk into both rings, as far ahead as they have slots; one warp."""
    EARLY_BYTES: gl.constexpr = C * (D + 64) * 2 + (C * (D + C) * 2 if u.REVERSE else 0)
    LATE_BYTES: gl.constexpr = C * (D + C) * 2 + D * 4
    for i in range(u.chunks):
        s = i % EARLY
        c = chunk_at(u, i)
        block = u.block + c * u.heads
        key = [u.batch, u.end, u.row + c * C, u.head, 0]
        value = [u.batch, u.end, u.row + c * C, u.head, u.column]
        full = u.early_full.index(s)
        hw.mbarrier.wait(u.early_empty.index(s), ((i // EARLY) & 1) ^ 1)  # the first round passes
        hw.mbarrier.expect(full, EARLY_BYTES)
        hw.tma_load(u.in_desc, value, full, hw.as_box(u.in_smem.index(s), u.in_desc))
        if u.REVERSE:
            hw.tma_load(u.p_desc, [block * C, 0], full, u.p_smem.index(s))
        hw.tma_load(u.k_desc, key, full, hw.as_box(u.k_smem.index(s), u.k_desc))
        if u.REVERSE:
            hw.tma_load(u.q_desc, key, full, hw.as_box(u.q_smem.index(s), u.q_desc))
        s = i % u.LATE
        full = u.late_full.index(s)
        hw.mbarrier.wait(u.late_empty.index(s), ((i // u.LATE) & 1) ^ 1)
        hw.mbarrier.expect(full, LATE_BYTES)
        hw.tma_load(u.f_desc, [block * D], full, u.f_smem.index(s))
        hw.tma_load(u.t_desc, [block * C, 0], full, u.t_smem.index(s))
        hw.tma_load(u.e_desc, key, full, hw.as_box(u.e_smem.index(s), u.e_desc))


@gluon.jit
def _solve(x, b, beta, DTYPE: gl.constexpr):
    """Starts x b [64, C]; the rounding error of x is compensated through the diagonal.

    Pinned, two numbers are rounded by one instruction; else LLVM rounds one at a time.
    """
    low = pin(x.to(DTYPE))
    lost = (x - low.to(gl.float32)) * gl.expand_dims(beta.to(gl.float32), 0)
    return hw.warpgroup_mma(as_a(low, DTYPE), b, lost, is_async=True)


@gluon.jit
def _state_partition(u, tb_ptr, first_ptr, last_ptr, first_strides, last_strides):
    """Carries S^T or dS^T of 64 columns of V through the chunks; one warpgroup."""
    DTYPE: gl.constexpr = u.k_desc.dtype
    S = gl.zeros((64, D), gl.float32, STATE)
    if first_ptr is not None:
        S = gl.load(state_at(first_ptr, first_strides, u)).to(gl.float32)
    beta = diagonal(u, tb_ptr, 0)
    for i in range(u.chunks):
        s, late = i % EARLY, i % u.LATE
        c = chunk_at(u, i)
        low = pin(S.to(DTYPE))
        hw.mbarrier.wait(u.early_full.index(s), (i // EARLY) & 1)
        given = u.in_smem.index(s).permute((1, 0))  # V^T or dO^T [64, C]
        keys = u.k_smem.index(s).permute((1, 0))
        y = gl.zeros((64, C), gl.float32, TILE)
        if u.REVERSE:
            y = hw.warpgroup_mma(given, u.p_smem.index(s), y, use_acc=False, is_async=True)
            y = hw.warpgroup_mma(as_a(low, DTYPE), keys, y, is_async=True)
        else:
            y = hw.warpgroup_mma(as_a(low, DTYPE), keys, y, use_acc=False, is_async=True)
        keep_state(u, low, c)
        hw.mbarrier.wait(u.late_full.index(late), (i // u.LATE) & 1)
        gam = u.f_smem.index(late).load(gl.SliceLayout(0, STATE))
        t = u.t_smem.index(late)
        S = pin(S * gl.expand_dims(gam, 0))
        if u.REVERSE:
            S = hw.warpgroup_mma(given, u.q_smem.index(s), S, is_async=True)
            y = hw.warpgroup_mma_wait(1, (y,))
            y = _solve(y, t, beta, DTYPE)
            beta = diagonal(u, tb_ptr, i + 1)
            y, S = hw.warpgroup_mma_wait(0, (y, S))
            more = -y
        else:
            x = given.load(TILE).to(gl.float32)
            y = hw.warpgroup_mma_wait(0, (y,))
            y = _solve(x - y, t.permute((1, 0)), beta, DTYPE)
            beta = diagonal(u, tb_ptr, i + 1)
            y = hw.warpgroup_mma_wait(0, (y,))
            more = y
        S = hw.warpgroup_mma(to_state(more, DTYPE), u.e_smem.index(late), S, is_async=True)
        hw.mbarrier.arrive(u.early_empty.index(s), count=1)
        keep_tokens(u, y.to(DTYPE), c)
        S = hw.warpgroup_mma_wait(0, (S,))
        hw.mbarrier.arrive(u.late_empty.index(late), count=1)
    finish_pass(u, S, last_ptr, last_strides)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """COUNT mbarriers that wait for one arrival each."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], hw.mbarrier.MBarrierLayout())
    for s in gl.static_range(COUNT):
        hw.mbarrier.init(found.index(s), count=1)
    return found


@gluon.jit(do_not_specialize=["T", "HV"])
def kda_states_kernel(
    k_desc, e_desc, q_desc, in_desc, out_desc, state_desc, t_desc, p_desc, f_desc,  # as in Pass
    tb_ptr,  # [rows, HV, C, C]
    first_ptr,  # [N, HV, K, V] the initial state, or the gradient of the final one; or None
    last_ptr,  # [N, HV, K, V] the gradient of the initial state, or None
    cu_ptr,  # [N + 1] token offsets, or None: N equal sequences of T tokens
    first_strides,  # of N, HV, K, V
    last_strides, T, HV,
    REVERSE: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """64 columns of V of one value head of one sequence, in one direction."""
    LAYOUT: gl.constexpr = t_desc.layout  # 128-byte swizzle, for every 16-bit tile
    LATE: gl.constexpr = 2 if REVERSE else 3
    QUERY: gl.constexpr = EARLY if REVERSE else 1
    if REVERSE:
        hw.launch_dependents()
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [EARLY, C, D], LAYOUT)
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [QUERY, C, D], LAYOUT)
    in_smem = gl.allocate_shared_memory(k_desc.dtype, [EARLY, C, 64], LAYOUT)
    p_smem = gl.allocate_shared_memory(k_desc.dtype, [QUERY, C, C], LAYOUT)
    e_smem = gl.allocate_shared_memory(k_desc.dtype, [LATE, C, D], LAYOUT)
    t_smem = gl.allocate_shared_memory(k_desc.dtype, [LATE, C, C], LAYOUT)
    f_smem = gl.allocate_shared_memory(gl.float32, [LATE, D], f_desc.layout)
    out_smem = gl.allocate_shared_memory(k_desc.dtype, [C, 64], LAYOUT)
    state_smem = gl.allocate_shared_memory(k_desc.dtype, [D, 64], LAYOUT)
    early_full, early_empty = _barriers(EARLY), _barriers(EARLY)
    late_full, late_empty = _barriers(LATE), _barriers(LATE)
    pid = gl.program_id(0)
    n, head, column = pid // (2 * HV), (pid // 2) % HV, (pid % 2) * 64
    batch, end, row, tokens, block = sequence_at(cu_ptr, n, T)
    u = Pass(
        k_desc, e_desc, q_desc, in_desc, out_desc, state_desc, t_desc, p_desc, f_desc, k_smem,
        q_smem, in_smem, p_smem, e_smem, t_smem, f_smem, out_smem, state_smem, early_full,
        early_empty, late_full, late_empty, batch, end, row, head, column, HV, block * HV + head,
        (tokens + C - 1) // C, LATE, REVERSE,
    )  # fmt: skip
    if first_ptr is not None:
        first_ptr += n.to(gl.int64) * first_strides[0]
    if last_ptr is not None:
        last_ptr += n.to(gl.int64) * last_strides[0]
    args = (u, tb_ptr, first_ptr, last_ptr, first_strides, last_strides)
    hw.barrier()
    hw.warp_specialize([_state_partition, _load_partition], args, [1], [LOAD_REGISTERS])
