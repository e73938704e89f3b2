"""The chunk-parallel half of Kimi Delta Attention on Hopper, in one launch (docs/kda.md).

The results are those of `portable/prepare.py`: per chunk of 64 tokens and value head Tb, P, Kd, Qd,
Ke and gam. A CTA owns a chunk of a value head, each of its four warps a block of 16 tokens. It goes
through 32 channels at a time: a warp computes its own block of the diagonals of A and P by levels
(levels.py); then those of its row, of which it reads the earlier tokens' half from shared memory;
then its rows of the scan's operands. The inverse is made of such blocks, too.

Tensors are [4, 16, 16] or [4, 2, 8, 32]: block (warp), rows, columns. What all warps read of one
block has 1 in place of 4.
"""

from ...gdn.hopper.primitives import C, D, locate
from ...gdn.hopper.scheduler import before_cut
from ...gdn.portable.gates import LOG2_E, LOG2_E_REST, at_least, write_strength
from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from ...runtime.primitives import exact_exp2
from .decay import store_decay, tokens_of_rows
from .gates import exp2_short, rate_of, raw_log_decay
from .inverse import inverse, store_kept, store_tile
from .levels import (
    TILE,
    X,
    add_levels,
    halves_product,
    left,
    of_token,
    positions,
    right,
    tokens,
)

PANELS = gl.constexpr(4)  # of 32 channels
# Programs of a grid that runs at once: the scan's programs may begin where they end. On a larger
# one they would take the place of programs of this kernel.
SMALL_GRID = gl.constexpr(396)
PANEL = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
HALVES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
KEPT_SMEM = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]))
LEAST = gl.constexpr(-138.6294361119891)  # of gates: 2^-200 is 0 in fp32
# of sums over a block's tokens [4, 32]
TOTAL = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(1, X)))
# of the blocks' sums of all panels [4, 4, 32]: a channel a thread
SUMS = gl.constexpr(gl.BlockedLayout([1, 4, 1], [1, 1, 32], [4, 1, 1], [2, 1, 0]))


@gluon.jit
def _load(desc, smem, batch, end, row, head, full):
    """Starts the loads of a tile's panels."""
    for p in gl.static_range(PANELS):
        at = [batch, end, row, head, 32 * p]
        hw.tma_load(desc, at, full, hw.as_box(smem.index(p), desc))


@gluon.jit
def _keep(smem, x):
    """Stores x [4, 2, 8, 32] fp16 for the same lanes, as operands on the left have it."""
    x = x.reshape([4, 2, 8, 4, 2, 2, 2]).permute((0, 4, 2, 3, 5, 1, 6))
    smem.store(x.reshape([4, 2, 8, 4, 8]))


@gluon.jit
def _kept(smem):
    KEPT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 1, 0, 0, 0]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]],
        [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]],
        [],
        [4, 2, 8, 4, 8],
    )
    x = smem.load(KEPT).reshape([4, 2, 8, 4, 2, 2, 2]).permute((0, 5, 2, 3, 1, 4, 6))
    return gl.convert_layout(x.reshape([4, 2, 8, 32]), X)


@gluon.jit
def _panel(smem, p):
    """Panel p [4, 32] of numbers of channels [.., PANELS, 4, 32]."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    COUNT: gl.constexpr = 2 * PANELS if len(smem.shape) == 4 else PANELS
    return hw.as_tile(smem, smem.dtype, [COUNT, 4, 32], FLAT).index(p)


@gluon.jit
def _factors(smem, p):
    """Factors of a panel's blocks and channels, as [4, 1, 1, 32]."""
    return gl.expand_dims(gl.expand_dims(_panel(smem, p).load(TOTAL), 1), 1)


@gluon.jit
def _all(x):
    """x in [4, 2, 8, 32]."""
    x, _ = gl.broadcast(x, gl.zeros((4, 2, 8, 32), gl.float16, X))
    return x


@gluon.jit
def _by_block(x0, x1, x2, x3):
    """Four [PANELS, 32] as [PANELS, 4, 32]."""
    x = gl.join(gl.join(x0, x2), gl.join(x1, x3)).permute((0, 2, 3, 1))
    return x.reshape([PANELS, 4, 32])


@gluon.jit
def _store_totals(sums, before, behind, between, gam_ptr):
    """From sums of gates over blocks [PANELS, 4, 32] the factors of all blocks before a block and
    of all behind it, fp32; of those between it and the first, and the second, fp16; and gam."""
    x = sums.load(SUMS)
    p = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, SUMS))), 1)
    d = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS))), 0)
    whole = gl.sum(x.to(gl.float64), 1)
    gl.store(gam_ptr + p * 32 + d, exact_exp2(whole * LOG2_E + whole * LOG2_E_REST))
    even, odd = gl.split(exp2_short(x * LOG2_E).reshape([4, 2, 2, 32]).permute((0, 1, 3, 2)))
    t0, t2 = gl.split(even.permute((0, 2, 1)))
    t1, t3 = gl.split(odd.permute((0, 2, 1)))
    one = gl.full_like(t0, 1.0)
    before.store(_by_block(one, t0, t0 * t1, t0 * t1 * t2))
    behind.store(_by_block(t1 * t2 * t3, t2 * t3, t3, one))
    between.index(0).store(_by_block(one, one, t1, t1 * t2).to(gl.float16))
    between.index(1).store(_by_block(one, one, one, t2).to(gl.float16))


@gluon.jit
def _block_positions():
    """Row and column in a block, and the block, of accumulators."""
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, TILE)))
    i, j = gl.expand_dims(gl.expand_dims(i, 0), 2), gl.expand_dims(gl.expand_dims(j, 0), 1)
    return i, j, gl.expand_dims(gl.expand_dims(b, 1), 2)


@gluon.jit
def _lengths(smem, i, j):
    """1 / |x| [4, 16] of the rows of x [PANELS, C, 32]; the tensor cores square."""
    xx = gl.zeros((4, 16, 16), gl.float32, TILE)
    for p in gl.static_range(PANELS):
        x = tokens(smem.index(p))
        xx = hw.mma_v2(left(x), right(x), xx)
    return gl.rsqrt(gl.sum(gl.where(i == j, xx, 0.0), 2) + 1e-6)


@gluon.jit
def _store_lengths(ptr, x):
    """Stores x [4, 16] of a chunk's tokens."""
    b = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, x.type.layout)), 1)
    t = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, x.type.layout)), 0)
    gl.store(ptr + 16 * b + t, x)


@gluon.jit
def _beta(ptr, stride, rest, BETA_MAX: gl.constexpr, DTYPE: gl.constexpr):
    """beta [4, 16], rounded as by _store_lengths of portable/prepare.py; `rest` tokens are left."""
    t = tokens_of_rows()
    beta = gl.load(ptr + t * stride, mask=t < rest, other=0.0)
    beta = gl.where(t < rest, write_strength(beta, BETA_MAX), 0.0)
    if DTYPE == gl.bfloat16:
        beta = beta.to(DTYPE).to(gl.float32)
    return beta


@gluon.jit(do_not_specialize=["T", "N", "NT", "split", "shortest", "look_back"])
def kda_prepare_fwd_kernel(
    q_desc,  # [.., .., tokens, H, K] box [1, 1, C, 1, 32]
    k_desc,  # likewise
    g_desc,  # [.., .., tokens, HV, K] box [1, 1, C, 1, 32]
    t_desc,  # Tb [rows * HV * C, C] box [C, C]
    p_desc,  # P, likewise
    a_desc,  # -A in fp16, likewise, or None
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV, K] or None
    cu_ptr,  # [N + 1] or None
    kd_ptr,  # [B, T, HV, K]
    qd_ptr,  # [B, T, HV, K]
    ke_ptr,  # [B, T, HV, K]
    gam_ptr,  # [rows, HV, K] fp32
    decay_ptr,  # [rows, HV] fp32: log2 of a bound of the norm of a chunk's transition; or None
    lengths_ptr,  # [rows, HV, 3, C] fp32: 1 / |k| and 1 / |q|; or None
    beta_strides, T, N,
    NT,  # ceil(T / C), equal length
    split,  # the most segments of a sequence
    shortest,  # tokens of one, at least
    look_back,  # chunks before a cut whose decay is read
    scale,
    HV: gl.constexpr, R: gl.constexpr,
    BETA_MAX: gl.constexpr,  # beta is a logit, and BETA_MAX * sigmoid(beta) is meant; 0: as given
    LOWER: gl.constexpr,  # of a bounded gate, or None
):  # fmt: skip
    """Tb, P, Kd, Qd, Ke, gam and decay of one chunk and value head, and what the gradient wants."""
    DTYPE: gl.constexpr = q_desc.dtype
    WIDTH: gl.constexpr = g_desc.dtype.primitive_bitwidth
    GATES: gl.constexpr = gl.NVMMASharedLayout(4 * WIDTH, WIDTH, 2)
    STEP: gl.constexpr = WIDTH // 16  # panels of fp16 in the place of one of g
    if gl.num_programs(0) <= SMALL_GRID:
        hw.launch_dependents()
    row, hv = gl.program_id(0) // HV, gl.program_id(0) % HV
    batch, end, first, c, length = locate(row, cu_ptr, T, N, NT)
    if c * C >= length:
        return
    full = gl.allocate_shared_memory(gl.int64, [2, 1], hw.mbarrier.MBarrierLayout())  # q, k; g
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, C, C], t_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [2, C, C], t_desc.layout)
    q_smem = hw.as_tile(q_tiles, DTYPE, [PANELS, C, 32], PANEL)
    k_smem = hw.as_tile(k_tiles, DTYPE, [PANELS, C, 32], PANEL)
    g_smem = gl.allocate_shared_memory(g_desc.dtype, [PANELS, C, 32], GATES)
    sums = gl.allocate_shared_memory(gl.float32, [PANELS, 4, 32], BLOCKS)
    before = gl.allocate_shared_memory(gl.float32, [PANELS, 4, 32], BLOCKS)
    behind = gl.allocate_shared_memory(gl.float32, [PANELS, 4, 32], BLOCKS)
    between = gl.allocate_shared_memory(gl.float16, [2, PANELS, 4, 32], BLOCKS)
    # what a panel was becomes what it is made into
    k_kept = hw.as_tile(k_tiles, gl.float16, [PANELS, 4, 2, 8, 4, 8], KEPT_SMEM)
    q_kept = hw.as_tile(q_tiles, gl.float16, [PANELS, 4, 2, 8, 4, 8], KEPT_SMEM)
    until_smem = hw.as_tile(g_smem, gl.float16, [STEP * PANELS, 4, 2, 8, 32], HALVES)
    for x in gl.static_range(2):
        hw.mbarrier.init(full.index(x), count=1)
        hw.mbarrier.expect(full.index(x), C * D * (4 if x == 0 else WIDTH // 8))
    _load(k_desc, k_smem, batch, end, first + c * C, hv // R, full.index(0))
    _load(q_desc, q_smem, batch, end, first + c * C, hv // R, full.index(0))
    _load(g_desc, g_smem, batch, end, first + c * C, hv, full.index(1))
    hw.barrier()  # ptxas would put the loads off until the next one

    if cu_ptr is None:
        batch_of, start = end.to(gl.int64), (c * C).to(gl.int64)
    else:
        batch_of, start = row.to(gl.int64) * 0, (end - length + c * C).to(gl.int64)
    rest = length - c * C
    unit = row.to(gl.int64) * HV + hv
    beta_ptr += batch_of * beta_strides[0] + start * beta_strides[1] + hv * beta_strides[2]
    beta = _beta(beta_ptr, beta_strides[1], rest, BETA_MAX, DTYPE)  # comes meanwhile
    out = ((batch_of * T + start) * HV + hv) * D
    kd_ptr, qd_ptr, ke_ptr = kd_ptr + out, qd_ptr + out, ke_ptr + out
    block, half, t, d = positions()
    t += 16 * block + 8 * half
    ok = (t < rest) & (d >= 0)
    out_at = t * (HV * D) + d
    i, j, b = _block_positions()
    zero = gl.zeros((4, 16, 16), gl.float32, TILE)
    kk, qk = zero, zero
    hw.mbarrier.wait(full.index(0), 0)
    rk, rq = _lengths(k_smem, i, j), _lengths(q_smem, i, j)
    if lengths_ptr is not None:
        _store_lengths(lengths_ptr + unit * (3 * C), rk)
        _store_lengths(lengths_ptr + unit * (3 * C) + C, rq)
    rk, rq, rate = of_token(rk), of_token(rq), rate_of(A_log_ptr, hv)
    RAW: gl.constexpr = A_log_ptr is not None or LOWER is not None
    hw.mbarrier.wait(full.index(1), 0)
    if decay_ptr is not None and before_cut(c, length, split, shortest, look_back):
        store_decay(decay_ptr + unit, g_smem, beta, rest, rate, dt_bias_ptr, hv, RAW, LOWER)
    for p in range(PANELS):
        g = tokens(g_smem.index(p)).to(gl.float32)
        if RAW:
            g = raw_log_decay(g, rate, dt_bias_ptr, hv * D + 32 * p + d, LOWER)
            g = gl.where(ok, g, 0.0)
        g = at_least(g, LEAST)
        k = (tokens(k_smem.index(p)).to(gl.float32) * rk).to(gl.float16)
        q = (tokens(q_smem.index(p)).to(gl.float32) * rq).to(gl.float16)
        total = gl.sum(gl.sum(g, 1), 1)  # [4, 32]
        if not RAW:  # passes at once: ptxas moves nothing past it, and spills less
            hw.mbarrier.wait(full.index(1), 0)
        kk, qk, since, until = add_levels(kk, qk, k, q, exp2_short(g * LOG2_E), i, j)
        if RAW:  # likewise
            hw.mbarrier.wait(full.index(1), 0)
        since, until = since.to(gl.float16), until.to(gl.float16)
        _keep(k_kept.index(p), halves_product(k, since))
        _keep(q_kept.index(p), halves_product(q, since))
        until_smem.index(STEP * p).store(halves_product(k, until))
        _panel(sums, p).store(total)
    hw.barrier()
    _store_totals(sums, before, behind, between, gam_ptr + unit * D)
    hw.barrier()
    k0, q0, k1, q1, k2, q2 = zero, zero, zero, zero, zero, zero
    for p in range(PANELS):
        until = until_smem.index(STEP * p)
        k, q = _kept(k_kept.index(p)), _kept(q_kept.index(p))
        kb, qb = left(k), left(q)
        kt = right(_all(until.slice(2, 1).load(X)))
        k2, q2 = hw.mma_v2(kb, kt, k2), hw.mma_v2(qb, kt, q2)
        f = _all(_factors(between, PANELS + p))
        kt = right(halves_product(_all(until.slice(1, 1).load(X)), f))
        k1, q1 = hw.mma_v2(kb, kt, k1), hw.mma_v2(qb, kt, q1)
        f = _all(_factors(between, p))
        kt = right(halves_product(_all(until.slice(0, 1).load(X)), f))
        k0, q0 = hw.mma_v2(kb, kt, k0), hw.mma_v2(qb, kt, q0)
        to = 32 * p + out_at
        f = _factors(before, p)
        gl.store(kd_ptr + to, (k.to(gl.float32) * f).to(DTYPE), mask=ok)
        gl.store(qd_ptr + to, (q.to(gl.float32) * (f * scale)).to(DTYPE), mask=ok)
        f = _factors(behind, p)
        gl.store(ke_ptr + to, (until.load(X).to(gl.float32) * f).to(DTYPE), mask=ok)
    hw.barrier()  # k and q are read
    # Till here the barrier has its memory to itself: PTX allows no other use of it before this.
    hw.mbarrier.invalidate(full.index(0))
    hw.mbarrier.invalidate(full.index(1))
    at = (unit * C).to(gl.int32)
    q0 = gl.where(b == 0, gl.where(i >= j, qk, 0.0), q0) * scale
    q1 = gl.where(b == 1, gl.where(i >= j, qk, 0.0), gl.where(b > 1, q1, 0.0)) * scale
    q2 = gl.where(b == 2, gl.where(i >= j, qk, 0.0), gl.where(b > 2, q2, 0.0)) * scale
    q3 = gl.where((b == 3) & (i >= j), qk, 0.0) * scale
    store_tile(p_desc, at, k_tiles.index(0), q0, q1, q2, q3)
    if a_desc is not None:
        a_smem = hw.as_tile(q_tiles.index(1), gl.float16, [C, C], a_desc.layout)
        a0, a1 = gl.where(b == 0, kk, k0), gl.where(b == 1, kk, k1)
        store_kept(a_desc, at, a_smem, -a0, -a1, -gl.where(b == 2, kk, k2), -kk)
    column = gl.expand_dims(gl.convert_layout(beta, gl.SliceLayout(1, TILE)), 1)
    beta = gl.expand_dims(gl.convert_layout(beta, gl.SliceLayout(2, TILE)), 2)
    smem = hw.as_tile(q_tiles.index(0), gl.float16, [4, 4, 16, 16], BLOCKS)
    t0, t1, t2, t3 = inverse(smem, kk, k0, k1, k2, beta, column, i, j, b)
    store_tile(t_desc, at, k_tiles.index(1), t0, t1, t2, t3)
    hw.tma_store_wait(0)
