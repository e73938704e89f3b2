"""Both passes over the states for the gradient, on Hopper (docs/gdn_backward.md).

Forward over the chunks, the state S before each and its deltas; backward over them, the gradient dS
of the state after each and that of V:

    X = V - F0 (K S)    vt = Tb X    S <- gam_C S + K^T (F1 vt)
    dvt = F1 (K dS) + P^T dO    dV = Tb^T dvt    dS <- gam_C dS + Q^T (F2 dO) - K^T (F0 dV)

A CTA owns a sequence, a value head, 64 columns of V and one direction. As in scan.py all is
computed transposed, [V, *], so that an accumulator, rounded, is the next product's register
operand; one warp loads. The rounding error of X or dvt is compensated through Tb's diagonal. The
directions are two launches; the second, forward, does not wait for the first. If the chunks' decays
are given, the backward launch computes the gradient of the initial state only (pieces.py): it
stores nothing else, and starts after the first chunks once these forget the state before them.

Sizes: C = 64 tokens a chunk, K = V = D = 128, STAGES ring slots.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record
from .primitives import RAGGED_END, C, D, acc_layout, as_a, pin, sequence_at, start_product
from .scheduler import LOOK_BACK, reach

STAGES = gl.constexpr(3)
TILE = gl.constexpr(acc_layout(64))  # [64 columns of V, C] fp32
STATE = gl.constexpr(acc_layout(128))  # [64 columns of V, K] fp32
TOKEN = gl.constexpr(gl.SliceLayout(0, acc_layout(64)))  # a factor for each token


@record
class Pass:
    """Descriptors, ring buffers and barriers of one CTA, and its place in the batch."""

    k_desc: hw.tma.tensor_descriptor  # [.., .., tokens, H, K] box [1, 1, C, 1, K]
    q_desc: hw.tma.tensor_descriptor  # likewise
    in_desc: hw.tma.tensor_descriptor  # V or dO [.., .., tokens, HV, V] box [1, 1, C, 1, 64]
    out_desc: hw.tma.tensor_descriptor  # vt or dV, likewise
    state_desc: hw.tma.tensor_descriptor  # S or dS of all chunks [rows * HV * K, V] box [K, 64]
    t_desc: hw.tma.tensor_descriptor  # Tb [rows * HV * C, C] box [C, C]
    p_desc: hw.tma.tensor_descriptor  # P, likewise
    f_desc: hw.tma.tensor_descriptor  # F [rows * HV * 4 * C] fp32 box [4 * C]
    k_smem: gl.shared_memory_descriptor  # [STAGES, C, K]
    q_smem: gl.shared_memory_descriptor  # [STAGES, C, K]
    in_smem: gl.shared_memory_descriptor  # [STAGES, C, 64]
    t_smem: gl.shared_memory_descriptor  # [STAGES, C, C]
    p_smem: gl.shared_memory_descriptor  # [STAGES, C, C]
    f_smem: gl.shared_memory_descriptor  # [STAGES, 4 * C] fp32
    out_smem: gl.shared_memory_descriptor  # [C, 64]
    state_smem: gl.shared_memory_descriptor  # [K, 64]
    full: gl.shared_memory_descriptor  # [STAGES] mbarriers: the slot's loads are complete
    empty: gl.shared_memory_descriptor  # [STAGES] mbarriers: the slot has been read
    batch: gl.tensor  # coordinates in the token descriptors: (batch, end, row, head, column)
    end: gl.tensor
    row: gl.tensor  # of the first token
    head: gl.tensor  # value head
    key_head: gl.tensor
    column: gl.tensor  # first column of V
    heads: gl.tensor  # HV
    block: gl.tensor  # of the first chunk: chunk row times HV plus the head
    chunks: gl.tensor
    REVERSE: gl.constexpr


@gluon.jit
def chunk_at(u, i):
    """Index of the i-th chunk in the order of the pass."""
    return u.chunks - 1 - i if u.REVERSE else i


@gluon.jit
def _load_partition(u, tb_ptr, first_ptr, last_ptr, first_strides, last_strides, decay_ptr):
    """Loads chunk after chunk into the ring, up to STAGES ahead; one warp."""
    ALWAYS: gl.constexpr = C * (D + 64 + C) * 2 + 4 * C * 4
    BYTES: gl.constexpr = ALWAYS + (C * (D + C) * 2 if u.REVERSE else 0)
    for i in range(u.chunks):
        s = i % STAGES
        c = chunk_at(u, i)
        full = u.full.index(s)
        block = u.block + c * u.heads
        hw.mbarrier.wait(u.empty.index(s), ((i // STAGES) & 1) ^ 1)  # first round: at once
        hw.mbarrier.expect(full, BYTES)
        at = [u.batch, u.end, u.row + c * C, u.key_head, 0]
        hw.tma_load(u.k_desc, at, full, hw.as_box(u.k_smem.index(s), u.k_desc))
        if u.REVERSE:
            hw.tma_load(u.p_desc, [block * C, 0], full, u.p_smem.index(s))
            hw.tma_load(u.q_desc, at, full, hw.as_box(u.q_smem.index(s), u.q_desc))
        at = [u.batch, u.end, u.row + c * C, u.head, u.column]
        hw.tma_load(u.in_desc, at, full, hw.as_box(u.in_smem.index(s), u.in_desc))
        hw.tma_load(u.f_desc, [block * (4 * C)], full, u.f_smem.index(s))
        hw.tma_load(u.t_desc, [block * C, 0], full, u.t_smem.index(s))


@gluon.jit
def state_at(ptr, strides, u):
    """Addresses of this CTA's S^T [64, K] in a tensor of states with strides of head, K and V."""
    v = gl.expand_dims(u.column + gl.arange(0, 64, layout=gl.SliceLayout(1, STATE)), 1)
    k = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, STATE)), 0)
    return ptr + u.head * strides[1] + v * strides[3] + k * strides[2]


@gluon.jit
def finish_pass(u, S, last_ptr, last_strides):
    """Stores the state at the end of a pass, if it is wanted, and waits for all stores."""
    if last_ptr is not None:
        gl.store(state_at(last_ptr, last_strides, u), S.to(last_ptr.dtype.element_ty))
    hw.tma_store_wait(0)
    if not u.REVERSE:
        hw.wait_for_predecessor()  # launches after this one then come after both


@gluon.jit
def diagonal(u, tb_ptr, i):
    """beta as on the diagonal of Tb, for the i-th chunk in the order of the pass [C] fp32."""
    c = gl.maximum(chunk_at(u, gl.minimum(i, u.chunks - 1)), 0)
    at = tb_ptr + (u.block + c * u.heads).to(gl.int64) * (C * C)
    return gl.load(at + gl.arange(0, C, layout=TOKEN) * (C + 1))


@gluon.jit
def _factor(u, s, n: gl.constexpr):
    """Row n of F in slot s, broadcastable over the tokens of a tile."""
    return gl.expand_dims(u.f_smem.index(s).slice(n * C, C).load(TOKEN), 0)


@gluon.jit
def keep_state(u, S, c):
    """Stores S^T, rounded, for chunk c, once the previous store from the buffer has finished."""
    hw.tma_store_wait(0)
    u.state_smem.permute((1, 0)).store(S)
    hw.fence_async_shared()
    hw.tma_store(u.state_desc, [(u.block + c * u.heads) * D, u.column], u.state_smem)


@gluon.jit
def keep_tokens(u, x, c):
    """Stores a tile [64, C], rounded, to the tokens of chunk c; rows past the sequence are
    dropped."""
    u.out_smem.permute((1, 0)).store(x)
    hw.fence_async_shared()
    at = [u.batch, u.end, u.row + c * C, u.head, u.column]
    hw.tma_store(u.out_desc, at, hw.as_box(u.out_smem, u.out_desc))


@gluon.jit
def _solve(x, b, beta, DTYPE: gl.constexpr):
    """Starts x b [64, C]; the rounding error of x is compensated through the diagonal."""
    low = hw.rounded(x, DTYPE)
    lost = (x - low.to(gl.float32)) * gl.expand_dims(beta.to(gl.float32), 0)
    return hw.warpgroup_mma(as_a(low, DTYPE), b, lost, is_async=True)


@gluon.jit
def to_state(x, DTYPE: gl.constexpr):
    """Converts a tile to the left operand of a product with columns of K."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    return gl.convert_layout(as_a(x, DTYPE), LAYOUT, assert_trivial=True)


@gluon.jit
def _state_partition(u, tb_ptr, first_ptr, last_ptr, first_strides, last_strides, decay_ptr):
    """Carries S^T or dS^T of 64 columns of V through the chunks; one warpgroup.

    With decay_ptr it stores nothing on its way, and starts from zeros if its chunks are only the
    first of a packed sequence.
    """
    DTYPE: gl.constexpr = u.k_desc.dtype
    S = gl.zeros((64, D), gl.float32, STATE)
    if first_ptr is not None:
        S = gl.load(state_at(first_ptr, first_strides, u)).to(gl.float32)
        if decay_ptr is not None:
            S = gl.where(u.chunks * C >= RAGGED_END - u.row, S, 0.0)
    beta = diagonal(u, tb_ptr, 0)
    for i in range(u.chunks):
        s = i % STAGES
        c = chunk_at(u, i)
        k = u.k_smem.index(s)
        low = pin(S.to(DTYPE))
        hw.mbarrier.wait(u.full.index(s), (i // STAGES) & 1)
        y = start_product(as_a(low, DTYPE), k)  # S^T K^T
        if u.REVERSE:
            do = u.in_smem.index(s).permute((1, 0))
            zero = gl.zeros((64, C), gl.float32, TILE)
            z = hw.warpgroup_mma(do, u.p_smem.index(s), zero, use_acc=False, is_async=True)
        if decay_ptr is None:
            keep_state(u, low, c)
        x = u.in_smem.index(s).permute((1, 0)).load(TILE).to(gl.float32)
        gam = u.f_smem.index(s).slice(3 * C, C).load(gl.SliceLayout(1, STATE))
        if u.REVERSE:
            y, z = hw.warpgroup_mma_wait(0, (y, z))
            y = _solve(z + _factor(u, s, 1) * y, u.t_smem.index(s), beta, DTYPE)
            S = pin(S * gl.expand_dims(gam, 1))
            S = hw.warpgroup_mma(
                to_state(x * _factor(u, s, 2), DTYPE), u.q_smem.index(s), S, is_async=True
            )
            beta = diagonal(u, tb_ptr, i + 1)
            y, S = hw.warpgroup_mma_wait(0, (y, S))
            more = -y * _factor(u, s, 0)
        else:
            y = hw.warpgroup_mma_wait(0, (y,))
            y = _solve(x - _factor(u, s, 0) * y, u.t_smem.index(s).permute((1, 0)), beta, DTYPE)
            beta = diagonal(u, tb_ptr, i + 1)
            y = hw.warpgroup_mma_wait(0, (y,))
            S = pin(S * gl.expand_dims(gam, 1))
            more = y * _factor(u, s, 1)
        S = hw.warpgroup_mma(to_state(more, DTYPE), k, S, is_async=True)
        if decay_ptr is None:
            keep_tokens(u, y.to(DTYPE), c)
        S = hw.warpgroup_mma_wait(0, (S,))
        hw.mbarrier.arrive(u.empty.index(s), count=1)
    finish_pass(u, S, last_ptr, last_strides)


@gluon.jit(do_not_specialize=["T", "HV", "H"])
def gdn_states_kernel(
    k_desc, q_desc, in_desc, out_desc, state_desc, t_desc, p_desc, f_desc,  # as in Pass
    tb_ptr,  # [rows, HV, C, C]
    first_ptr,  # [N, HV, K, V] the initial state, or the gradient of the final one; or None
    last_ptr,  # [N, HV, K, V] the gradient of the initial state, or None
    cu_ptr,  # [N + 1] token offsets, or None: N equal sequences of T tokens
    decay_ptr,  # [rows, HV] fp32: log2 of a bound of the norm of a chunk's transition; or None
    first_strides,  # of N, HV, K, V
    last_strides,
    T, HV, H,
    REVERSE: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """64 columns of V of one value head of one sequence, in one direction."""
    if REVERSE:
        hw.launch_dependents()
    pid = gl.program_id(0)
    n, head, column = pid // (2 * HV), (pid // 2) % HV, (pid % 2) * 64
    LAYOUT: gl.constexpr = t_desc.layout  # 128-byte swizzle, for every 16-bit tile
    QUERY: gl.constexpr = STAGES if REVERSE else 1
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, C, D], LAYOUT)
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [QUERY, C, D], LAYOUT)
    in_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, C, 64], LAYOUT)
    t_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, C, C], LAYOUT)
    p_smem = gl.allocate_shared_memory(k_desc.dtype, [QUERY, C, C], LAYOUT)
    f_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], f_desc.layout)
    out_smem = gl.allocate_shared_memory(k_desc.dtype, [C, 64], LAYOUT)
    state_smem = gl.allocate_shared_memory(k_desc.dtype, [D, 64], LAYOUT)
    full, empty = hw.ring_barriers(STAGES, 1)
    batch, end, row, tokens, block = sequence_at(cu_ptr, n, T)
    key_head = head // (HV // H)
    block = block * HV + head
    chunks = (tokens + C - 1) // C
    if decay_ptr is not None:
        needed = reach(decay_ptr, block, HV, gl.minimum(chunks, LOOK_BACK))
        chunks = gl.where(needed < 0, chunks, needed)
    u = Pass(
        k_desc, q_desc, in_desc, out_desc, state_desc, t_desc, p_desc, f_desc, k_smem, q_smem,
        in_smem, t_smem, p_smem, f_smem, out_smem, state_smem, full, empty, batch, end, row, head,
        key_head, column, HV, block, chunks, REVERSE,
    )  # fmt: skip
    if first_ptr is not None:
        first_ptr += n.to(gl.int64) * first_strides[0]
    if last_ptr is not None:
        last_ptr += n.to(gl.int64) * last_strides[0]
    args = (u, tb_ptr, first_ptr, last_ptr, first_strides, last_strides, decay_ptr)
    hw.barrier()
    hw.warp_specialize([_state_partition, _load_partition], args, [1], [LOAD_REGISTERS])
