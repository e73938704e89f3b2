"""dQ and dK of chunks, and their terms of the gates' gradient, on Hopper (docs/gdn_backward.md).

From the states before each chunk, the gradients of those after it, vt and dV (backward_states.py):

    dP = scale lower(Gam dO vt^T)       dQ = F2 (dO S^T) + dP K
    N = -strict_lower(Gam dV vt^T)      dK = -F0 (dV S^T) + F1 (vt dS^T) + (N + N^T) K + dP^T Q

A CTA takes chunk after chunk of a key head, with all its R value heads. One warp loads tiles, a
warpgroup computes dQ, another dK, and two warps <S, dS>, all from the same tiles in shared memory.
dP is passed from one warpgroup to the other through shared memory, and is read transposed from
there.

Sizes: C = 64 tokens a chunk, K = V = D = 128, R = HV / H, STAGES ring slots of half a value head.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from .gradient_tiles import (
    TILE,
    add_rows,
    by_column,
    by_row,
    cumulative_gates,
    decay,
    finish,
    first_token,
    half_of,
    inverse_norm,
    line,
    product,
    rows_of,
    store_line,
)
from .gradient_work import Work, place
from .primitives import C, D, as_a, pin

STAGES = gl.constexpr(3)
HALF = gl.constexpr(64)  # columns of V in a slot


@gluon.jit
def _load_partition(
    w, g_strides, scale, g_ptr, A_log_ptr, dt_bias_ptr, cu_ptr, f_ptr, dq_ptr, dk_ptr, G_ptr,
    by_query_ptr, by_key_ptr, ends_ptr,
):  # fmt: skip
    """Loads tiles of value heads by halves, up to STAGES ahead, and of q and k; one warp."""
    BYTES: gl.constexpr = (3 * C + 2 * D) * HALF * 2
    PAIR_AT: gl.constexpr = min(STAGES, 2 * w.R) - 1  # slots before q and k, which come late
    it = 0
    pairs = 0
    for number in hw.own_range(gl.program_id(0), w.count, gl.num_programs(0), disable_licm=True):
        row, head, batch, end, first, c, length = place(w, number, cu_ptr)
        if c * C < length:
            token = first + c * C
            for step in range(2 * w.R):
                s = it % STAGES
                hv = head * w.R + step // 2
                column = step % 2 * HALF
                full = w.full.index(s)
                hw.mbarrier.wait(w.empty.index(s), ((it // STAGES) & 1) ^ 1)
                hw.mbarrier.expect(full, BYTES)
                at = [batch, end, token, hv, column]
                state = [(row * (w.H * w.R) + hv) * D, column]
                hw.tma_load(w.do_desc, at, full, hw.as_box(w.do_smem.index(s), w.do_desc))
                hw.tma_load(w.vt_desc, at, full, hw.as_box(w.vt_smem.index(s), w.vt_desc))
                hw.tma_load(w.s_desc, state, full, w.s_smem.index(s))
                hw.tma_load(w.dv_desc, at, full, hw.as_box(w.dv_smem.index(s), w.dv_desc))
                hw.tma_load(w.ds_desc, state, full, w.ds_smem.index(s))
                it += 1
                if step == PAIR_AT:
                    hw.mbarrier.wait(w.pair_empty, (pairs & 1) ^ 1)
                    hw.mbarrier.expect(w.pair_full, 2 * C * D * 2)
                    at = [batch, end, token, head, 0]
                    hw.tma_load(w.q_desc, at, w.pair_full, hw.as_box(w.q_smem, w.q_desc))
                    hw.tma_load(w.k_desc, at, w.pair_full, hw.as_box(w.k_smem, w.k_desc))
            pairs += 1


@gluon.jit
def _query_partition(
    w, g_strides, scale, g_ptr, A_log_ptr, dt_bias_ptr, cu_ptr, f_ptr, dq_ptr, dk_ptr, G_ptr,
    by_query_ptr, by_key_ptr, ends_ptr,
):  # fmt: skip
    """Computes dP, dQ and the first three vectors of gdn/portable/backward_gates.py; one
    warpgroup."""
    DTYPE: gl.constexpr = w.q_desc.dtype
    i = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, TILE)), 1)
    j = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, TILE)), 0)
    it = 0
    pairs = 0
    for number in hw.own_range(gl.program_id(0), w.count, gl.num_programs(0), disable_licm=True):
        row, head, batch, end, first, c, length = place(w, number, cu_ptr)
        if c * C < length:
            left = length - c * C
            b, token = first_token(cu_ptr, end, c, length)
            unit = (row.to(gl.int64) * w.H + head) * w.R
            g_at = g_ptr + b * g_strides[0] + token * g_strides[1]
            hw.mbarrier.wait(w.pair_full, pairs & 1)
            rq = inverse_norm(w.q_smem, w.NORM)
            rk = inverse_norm(w.k_smem, w.NORM)
            dq0 = gl.zeros((C, 64), gl.float32, TILE)  # rq times the gradient of the normalised q
            dq1 = gl.zeros((C, 64), gl.float32, TILE)
            dp = gl.zeros((C, C), gl.float32, TILE)  # summed over the group, without norms
            for r in hw.own_range(0, w.R, 1, disable_licm=True):
                f2 = line(f_ptr + (unit + r) * (4 * C) + 2 * C)
                own = gl.zeros((C, C), gl.float32, TILE)
                dots = f2 * 0.0
                for _ in range(2):
                    s = it % STAGES
                    hw.mbarrier.wait(w.full.index(s), (it // STAGES) & 1)
                    do, state = w.do_smem.index(s), w.s_smem.index(s)
                    own += product(do, w.vt_smem.index(s))
                    wide0 = product(do, rows_of(state, 0))
                    dq0, dots = add_rows(dq0, dots, wide0, f2, half_of(w.q_smem, 0))
                    wide1 = product(do, rows_of(state, 1))
                    hw.mbarrier.arrive(w.empty.index(s), count=1)
                    dq1, dots = add_rows(dq1, dots, wide1, f2, half_of(w.q_smem, 1))
                    it += 1
                G = cumulative_gates(g_at, g_strides, A_log_ptr, dt_bias_ptr, head * w.R + r, left)
                store_line(G_ptr + (unit + r) * C, G)
                part = by_query_ptr + (unit + r) * (8 * C)
                store_line(part + 2 * C, f2 * dots)
                own = gl.where(i >= j, own * decay(G), 0.0)
                dp += own
                qk = product(w.q_smem, w.k_smem) * by_row(rq * scale) * by_column(rk)
                own = gl.where(i > j, own * qk, 0.0)
                store_line(part, gl.sum(own, 1))
                store_line(part + C, gl.sum(own, 0))
            dp = dp * by_row(rq * scale) * by_column(rk)
            hw.mbarrier.wait(w.dp_empty, (pairs & 1) ^ 1)
            w.dp_smem.store(dp.to(DTYPE))
            hw.fence_async_shared()
            hw.mbarrier.arrive(w.dp_full, count=1)
            dp = as_a(dp, DTYPE)
            dq0 = hw.warpgroup_mma(dp, half_of(w.k_smem, 0), dq0, is_async=True)
            dq1 = hw.warpgroup_mma(dp, half_of(w.k_smem, 1), dq1, is_async=True)
            dq0, dq1 = hw.warpgroup_mma_wait(0, (dq0, dq1))
            at = dq_ptr + ((b * w.T + token) * w.H + head) * D
            finish(dq0, dq1, w.q_smem, rq, at, left, w.NORM, w.H)
            hw.mbarrier.arrive(w.pair_empty, count=1)
            pairs += 1


@gluon.jit
def _add_products(dk, n, w, d: gl.constexpr):
    """Starts dk + (N + N^T) K + dP^T Q of half of the columns."""
    dk = hw.warpgroup_mma(n, half_of(w.k_smem, d), dk, is_async=True)
    dk = hw.warpgroup_mma(w.n_smem.permute((1, 0)), half_of(w.k_smem, d), dk, is_async=True)
    return hw.warpgroup_mma(w.dp_smem.permute((1, 0)), half_of(w.q_smem, d), dk, is_async=True)


@gluon.jit
def _key_partition(
    w, g_strides, scale, g_ptr, A_log_ptr, dt_bias_ptr, cu_ptr, f_ptr, dq_ptr, dk_ptr, G_ptr,
    by_query_ptr, by_key_ptr, ends_ptr,
):  # fmt: skip
    """Computes N, dK and the other five vectors; one warpgroup."""
    DTYPE: gl.constexpr = w.q_desc.dtype
    i = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, TILE)), 1)
    j = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, TILE)), 0)
    it = 0
    pairs = 0
    for number in hw.own_range(gl.program_id(0), w.count, gl.num_programs(0), disable_licm=True):
        row, head, batch, end, first, c, length = place(w, number, cu_ptr)
        if c * C < length:
            left = length - c * C
            b, token = first_token(cu_ptr, end, c, length)
            unit = (row.to(gl.int64) * w.H + head) * w.R
            g_at = g_ptr + b * g_strides[0] + token * g_strides[1]
            hw.mbarrier.wait(w.pair_full, pairs & 1)
            rk = inverse_norm(w.k_smem, w.NORM)
            dk0 = gl.zeros((C, 64), gl.float32, TILE)  # rk times the gradient of the normalised k
            dk1 = gl.zeros((C, 64), gl.float32, TILE)
            dn = gl.zeros((C, C), gl.float32, TILE)  # -N summed over the group, without norms
            for r in hw.own_range(0, w.R, 1, disable_licm=True):
                f_at = f_ptr + (unit + r) * (4 * C)
                f0 = line(f_at)
                f1 = line(f_at + C)
                own = gl.zeros((C, C), gl.float32, TILE)
                before = f0 * 0.0
                after = f1 * 0.0
                for _ in range(2):
                    s = it % STAGES
                    hw.mbarrier.wait(w.full.index(s), (it // STAGES) & 1)
                    dv, vt = w.dv_smem.index(s), w.vt_smem.index(s)
                    state, d_state = w.s_smem.index(s), w.ds_smem.index(s)
                    own += product(dv, vt)
                    wide0 = product(dv, rows_of(state, 0))
                    dk0, before = add_rows(dk0, before, wide0, -f0, half_of(w.k_smem, 0))
                    wide1 = product(dv, rows_of(state, 1))
                    dk1, before = add_rows(dk1, before, wide1, -f0, half_of(w.k_smem, 1))
                    wide0 = product(vt, rows_of(d_state, 0))
                    dk0, after = add_rows(dk0, after, wide0, f1, half_of(w.k_smem, 0))
                    wide1 = product(vt, rows_of(d_state, 1))
                    hw.mbarrier.arrive(w.empty.index(s), count=1)
                    dk1, after = add_rows(dk1, after, wide1, f1, half_of(w.k_smem, 1))
                    it += 1
                G = cumulative_gates(g_at, g_strides, A_log_ptr, dt_bias_ptr, head * w.R + r, left)
                part = by_key_ptr + (unit + r) * (8 * C)
                store_line(part + 6 * C, f0 * before)
                store_line(part + 7 * C, f1 * after)
                store_line(part + 3 * C, gl.sum(gl.where(i == j, own, 0.0), 1))
                own = gl.where(i > j, own * decay(G), 0.0)
                dn += own
                own *= product(w.k_smem, w.k_smem) * by_row(rk) * by_column(rk)
                store_line(part + 4 * C, gl.sum(own, 1))
                store_line(part + 5 * C, gl.sum(own, 0))
            dn = (dn * -by_row(rk) * by_column(rk)).to(DTYPE)
            w.n_smem.store(dn)
            hw.fence_async_shared()
            dn = as_a(dn, DTYPE)
            hw.mbarrier.wait(w.dp_full, pairs & 1)
            dk0 = _add_products(dk0, dn, w, 0)
            dk1 = _add_products(dk1, dn, w, 1)
            dk0, dk1 = hw.warpgroup_mma_wait(0, (dk0, dk1))
            hw.mbarrier.arrive(w.dp_empty, count=1)
            at = dk_ptr + ((b * w.T + token) * w.H + head) * D
            finish(dk0, dk1, w.k_smem, rk, at, left, w.NORM, w.H)
            hw.mbarrier.arrive(w.pair_empty, count=1)
            pairs += 1


@gluon.jit
def _ends_partition(
    w, g_strides, scale, g_ptr, A_log_ptr, dt_bias_ptr, cu_ptr, f_ptr, dq_ptr, dk_ptr, G_ptr,
    by_query_ptr, by_key_ptr, ends_ptr,
):  # fmt: skip
    """Computes <S, dS> of each value head; two warps."""
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    it = 0
    for number in hw.own_range(gl.program_id(0), w.count, gl.num_programs(0), disable_licm=True):
        row, head, batch, end, first, c, length = place(w, number, cu_ptr)
        if c * C < length:
            unit = (row.to(gl.int64) * w.H + head) * w.R
            for r in hw.own_range(0, w.R, 1, disable_licm=True):
                total = gl.zeros((8, HALF), gl.float32, VECTORS)
                for _ in range(2):
                    s = it % STAGES
                    hw.mbarrier.wait(w.full.index(s), (it // STAGES) & 1)
                    for k in gl.static_range(0, D, 8):
                        x = w.s_smem.index(s).slice(k, 8).load(VECTORS).to(gl.float32)
                        total += x * w.ds_smem.index(s).slice(k, 8).load(VECTORS).to(gl.float32)
                        if hw.LOADS_FIRST:
                            total = pin(total)
                    hw.mbarrier.arrive(w.empty.index(s), count=1)
                    it += 1
                gl.store(ends_ptr + unit + r, gl.sum(gl.sum(total, 1), 0))


@gluon.jit(do_not_specialize=["T", "N", "NT", "count"])
def gdn_gradient_kernel(
    q_desc, k_desc, do_desc, vt_desc, dv_desc, s_desc, ds_desc,  # as in Work
    g_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    cu_ptr,  # [N + 1] or None
    f_ptr,  # [rows, HV, 4, C] fp32
    dq_ptr,  # [B, T, H, K]
    dk_ptr,  # [B, T, H, K]
    G_ptr,  # [rows, HV, C] fp32: cumsum(g) in log2
    by_query_ptr,  # [rows, HV, 8, C] fp32, as in gdn/portable/backward_gates.py
    by_key_ptr,  # [rows, HV, 8, C] fp32
    ends_ptr,  # [rows, HV] fp32: <S, dS>
    g_strides,  # of B, T, HV
    T, N,
    NT,  # ceil(T / C), equal length
    scale,
    count,  # chunk rows times H
    H: gl.constexpr, R: gl.constexpr, NORM: gl.constexpr, KEY_REGISTERS: gl.constexpr,
    FEW_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Allocates the shared memory of a CTA and starts its partitions."""
    LAYOUT: gl.constexpr = s_desc.layout  # 128-byte swizzle, for every tile
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [C, D], LAYOUT)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [C, D], LAYOUT)
    do_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, C, HALF], LAYOUT)
    vt_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, C, HALF], LAYOUT)
    dv_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, C, HALF], LAYOUT)
    s_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, D, HALF], LAYOUT)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, D, HALF], LAYOUT)
    dp_smem = gl.allocate_shared_memory(q_desc.dtype, [C, C], LAYOUT)
    n_smem = gl.allocate_shared_memory(q_desc.dtype, [C, C], LAYOUT)
    full, empty = hw.ring_barriers(STAGES, 3)
    single = gl.allocate_shared_memory(gl.int64, [4, 1], hw.mbarrier.MBarrierLayout())
    for s in gl.static_range(4):
        hw.mbarrier.init(single.index(s), count=2 if s == 1 else 1)
    w = Work(
        q_desc, k_desc, do_desc, vt_desc, dv_desc, s_desc, ds_desc, q_smem, k_smem, do_smem,
        vt_smem, dv_smem, s_smem, ds_smem, dp_smem, n_smem, full, empty, single.index(0),
        single.index(1), single.index(2), single.index(3), T, N, NT, count, H, R, NORM,
    )  # fmt: skip
    args = (
        w, g_strides, scale, g_ptr, A_log_ptr, dt_bias_ptr, cu_ptr, f_ptr, dq_ptr, dk_ptr, G_ptr,
        by_query_ptr, by_key_ptr, ends_ptr,
    )  # fmt: skip
    hw.barrier()
    hw.warp_specialize(
        [_query_partition, _key_partition, _ends_partition, _load_partition], args,
        [4, 2, 1], [KEY_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
