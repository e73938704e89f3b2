"""The chunk-parallel half of Gated DeltaNet prefill on Hopper, in fragments of mma.sync.

The results are those of `portable/prepare.py`: per chunk of 64 tokens and value head Tb, P, F and
decay. A CTA owns a chunk and some value heads of one key head, a warp one of these heads. The CTA
computes K K^T and Q K^T; then each warp works alone, in registers, on the 16 x 16 blocks of its
head's tiles, as docs/gdn_hopper_prepare.md describes.

Sizes: C = 64 tokens a chunk, D = 128, R = HV / H value heads a key head, W = 1, 2 or 4 warps, the
number of heads of a CTA.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from ...runtime.primitives import exact_exp2
from ..portable.gates import log2_decay, write_strength
from .blocks import Gates, inverse, operand, p_row, tb_row, tile_layout
from .primitives import C, D, locate

# Programs of a grid that runs at once; on a larger one early CTAs of the scan would take the place
# of CTAs of this kernel (docs/gdn_hopper.md)
SMALL_GRID = gl.constexpr(528)
ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # vectors, one a head
# fp32 tiles: rows of 8 fragments of a block fall into different banks
WORDS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))


@gluon.constexpr_function
def pair_layout(warps):
    """The layout of 32 rows of K K^T or Q K^T over all warps."""
    return gl.NVMMADistributedLayout([2, 0], [min(warps, 2), max(warps // 2, 1)], [16, 8])


@gluon.constexpr_function
def gate_layout(warps):
    """The layout of [W, C]: a warp has the tokens of its head, a lane two of them."""
    return gl.BlockedLayout([1, 2], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def _shared_gates(g, beta, W: gl.constexpr):
    """Allocates Gates from log2 decays g and beta, [W, C] fp32."""
    GATE: gl.constexpr = gate_layout(W)
    blocks = g.reshape([W, 4, 16])
    inside = gl.associative_scan(blocks, 2, hw.add)
    until = gl.exp2(gl.expand_dims(gl.sum(blocks, 2), 2) - inside)
    whole = gl.exp2(gl.expand_dims(gl.sum(blocks, 2), 2) + gl.zeros_like(inside))
    inside = gl.convert_layout(inside.reshape([W, C]), GATE)
    until = gl.convert_layout(until.reshape([W, C]), GATE)
    whole = gl.convert_layout(whole.reshape([W, C]), GATE)
    return Gates(
        gl.allocate_shared_memory(gl.float32, [W, C], ROWS, beta),
        gl.allocate_shared_memory(gl.float32, [W, C], ROWS, inside),
        gl.allocate_shared_memory(gl.float32, [W, C], ROWS, gl.exp2(inside)),
        gl.allocate_shared_memory(gl.float32, [W, C], ROWS, until),
        gl.allocate_shared_memory(gl.float32, [W, C], ROWS, whole),
        gl.allocate_shared_memory(gl.float32, [W, C], ROWS, beta * gl.exp2(g)),
    )


@gluon.jit
def _squares(smem, i, j, TILE: gl.constexpr):
    """|x|^2 [4, 16] of the rows of x [C, D]: the diagonals of four products of blocks.

    The tensor cores compute them with fewer instructions than a reduction takes.
    """
    BLOCKS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)  # of the same bytes
    x = hw.as_tile(smem, smem.dtype, [4, 16, D], BLOCKS).load(operand(0, TILE))
    xt = gl.convert_layout(x.permute((0, 2, 1)), operand(1, TILE), assert_trivial=True)
    xx = hw.mma_v2(x, xt, gl.zeros((4, 16, 16), gl.float32, TILE))
    return gl.sum(gl.where(i == j, xx, 0.0), 2)


@gluon.jit
def _shared_line(x):
    """Stores [4, 16] fp32 to shared memory, viewed as [C]."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return hw.as_tile(
        gl.allocate_shared_memory(gl.float32, [4, 16], ROWS, x), gl.float32, [C], LINE
    )


@gluon.jit
def _products(q_smem, k_smem, to_smem, rq_smem, rk_smem, FIRST: gl.constexpr, PAIR: gl.constexpr):
    """-K K^T and Q K^T, normalised, of 32 rows from FIRST on with the rows of to_smem."""
    N: gl.constexpr = to_smem.shape[0]
    STEP: gl.constexpr = 16  # operands of one mma at a time: more spill
    kk = gl.zeros((32, N), gl.float32, PAIR)
    qk = gl.zeros((32, N), gl.float32, PAIR)
    for d in gl.static_range(0, D, STEP):
        kt = to_smem.slice(d, STEP, 1).permute((1, 0)).load(operand(1, PAIR))
        k = k_smem.slice(FIRST, 32).slice(d, STEP, 1).load(operand(0, PAIR))
        q = q_smem.slice(FIRST, 32).slice(d, STEP, 1).load(operand(0, PAIR))
        kk, qk = hw.mma_v2(k, kt, kk), hw.mma_v2(q, kt, qk)
    rk = gl.expand_dims(rk_smem.slice(FIRST, 32).load(gl.SliceLayout(1, PAIR)), 1)
    rq = gl.expand_dims(rq_smem.slice(FIRST, 32).load(gl.SliceLayout(1, PAIR)), 1)
    to = gl.expand_dims(rk_smem.slice(0, N).load(gl.SliceLayout(0, PAIR)), 0)
    return kk * (-rk * to), qk * (rq * to)


@gluon.jit
def _store_factors(f_ptr, decay_ptr, g, beta, ok, w, token, rq, rk, k2):
    """Stores F, and log2 of a bound of the norm of the chunk's transition; all [W, C] or a part of
    it."""
    G = gl.associative_scan(g, 1, hw.add)
    exact = gl.expand_dims(gl.sum(g.to(gl.float64), 1), 1)
    G_end = exact.to(gl.float32)
    at = f_ptr + w * (4 * C) + token
    gl.store(at, gl.where(ok, gl.exp2(G) * rk, 0.0))
    gl.store(at + C, gl.where(ok, gl.exp2(gl.minimum(G_end - G, 0.0)) * rk, 0.0))
    gl.store(at + 2 * C, gl.where(ok, gl.exp2(G) * rq, 0.0))
    gl.store(at + 3 * C, exact_exp2(exact) + gl.zeros_like(G))
    # a token's a (I - beta k k^T) stretches nothing by more than a max(1, |1 - beta |k|^2|)
    stretch = gl.sum(gl.log2(gl.maximum(gl.abs(1.0 - beta * k2), 1.0)), 1)
    gl.store(decay_ptr + w, G_end + gl.expand_dims(stretch, 1))


@gluon.jit
def _store(desc, row, scratch, r0, r1, r2, r3):
    """Stores tiles of W heads, each four rows of four blocks, to rows `row`.. of desc.

    They pass through the first tiles of the buffer `scratch`.
    """
    W: gl.constexpr = r0[0].shape[0]
    t0 = gl.join(gl.join(r0[0], r0[2]), gl.join(r0[1], r0[3]))  # [W, 16, 16, 2, 2]
    t1 = gl.join(gl.join(r1[0], r1[2]), gl.join(r1[1], r1[3]))
    t2 = gl.join(gl.join(r2[0], r2[2]), gl.join(r2[1], r2[3]))
    t3 = gl.join(gl.join(r3[0], r3[2]), gl.join(r3[1], r3[3]))
    tile = gl.join(gl.join(t0, t2), gl.join(t1, t3))  # [W, 16, 16, 2 2 (columns), 2 2 (rows)]
    tile = tile.permute((0, 5, 6, 1, 3, 4, 2)).reshape([W * C, C])
    scratch.slice(0, W * C).store(tile)
    tiles = hw.as_tile(scratch, desc.dtype, [scratch.shape[0] // C, C, C], desc.layout)
    hw.fence_async_shared()
    for w in gl.static_range(W):
        hw.tma_store(desc, [row + w * C, 0], tiles.index(w))
    hw.barrier()  # ptxas would put the stores off until the next one


@gluon.jit(do_not_specialize=["T", "N", "NT"])
def gdn_prepare_fwd_kernel(
    q_desc,  # [.., .., tokens, H, K] box [1, 1, C, 1, K]
    k_desc,  # likewise
    t_desc,  # Tb [rows * HV * C, C] box [C, C]
    p_desc,  # P, likewise
    g_ptr,  # [B, T, HV]
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    cu_ptr,  # [N + 1] or None
    f_ptr,  # [rows, HV, 4, C] fp32
    decay_ptr,  # [rows, HV] fp32
    g_strides,  # of B, T, HV
    beta_strides,
    T, N,
    NT,  # ceil(T / C), equal length
    scale,
    HV: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
    BETA_MAX: gl.constexpr,  # beta is a logit, and BETA_MAX * sigmoid(beta) is meant; 0: as given
):  # fmt: skip
    """Tb, P, F and decay of one chunk and W of the R value heads of one key head."""
    TILE: gl.constexpr = tile_layout(W)
    PAIR: gl.constexpr = pair_layout(W)
    GATE: gl.constexpr = gate_layout(W)
    DTYPE: gl.constexpr = q_desc.dtype
    if gl.num_programs(0) <= SMALL_GRID:
        hw.launch_dependents()
    row = gl.program_id(0) // (HV // W)
    hv0 = gl.program_id(0) % (HV // W) * W
    batch, end, first, c, length = locate(row, cu_ptr, T, N, NT)
    if c * C >= length:
        return
    full = gl.allocate_shared_memory(gl.int64, [1], hw.mbarrier.MBarrierLayout())
    # q and k; later Q K^T, in the buffer of outgoing tiles, and K K^T after it
    TILES: gl.constexpr = W if W * C > D else D // C
    scratch = gl.allocate_shared_memory(DTYPE, [TILES * C, C], t_desc.layout)
    behind = gl.allocate_shared_memory(DTYPE, [C, D], t_desc.layout)
    halves = hw.as_tile(scratch, DTYPE, [TILES * C // D, C, D], t_desc.layout)
    q_smem, k_smem = halves.index(0), behind
    if TILES * C > D:
        k_smem = halves.index(1)
    hw.mbarrier.init(full, count=1)
    hw.mbarrier.expect(full, 2 * C * D * 2)
    at = [batch, end, first + c * C, hv0 // R, 0]
    hw.tma_load(k_desc, at, full, hw.as_box(k_smem, k_desc))
    hw.tma_load(q_desc, at, full, hw.as_box(q_smem, q_desc))
    hw.barrier()  # ptxas would put the loads off until the next one

    # While they come
    w = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, GATE)), 1)
    token = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, GATE)), 0)
    ok = token < length - c * C
    hv = hv0 + w
    if cu_ptr is None:
        b, start = end.to(gl.int64), c * C
    else:
        b, start = row.to(gl.int64) * 0, end - length + c * C
    g_ptr += b * g_strides[0] + start.to(gl.int64) * g_strides[1]
    beta_ptr += b * beta_strides[0] + start.to(gl.int64) * beta_strides[1]
    g = gl.load(g_ptr + token * g_strides[1] + hv * g_strides[2], mask=ok, other=0.0)
    beta = gl.load(beta_ptr + token * beta_strides[1] + hv * beta_strides[2], mask=ok, other=0.0)
    g = gl.where(ok, log2_decay(g, A_log_ptr, dt_bias_ptr, hv), 0.0)  # [W, C]
    beta = gl.where(ok, write_strength(beta, BETA_MAX), 0.0)  # [W, C]
    if DTYPE == gl.bfloat16:  # see _store_factors in gdn/portable/prepare.py
        beta = beta.to(DTYPE).to(gl.float32)
    gates = _shared_gates(g, beta, W)

    # By all warps: norms, and the products of q and k, without what lies right of 32-row blocks
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
    i = gl.expand_dims(gl.expand_dims(i, 0), 2)  # [1, 16, 1]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
    j = gl.expand_dims(gl.expand_dims(j, 0), 1)  # [1, 1, 16]
    hw.mbarrier.wait(full, 0)
    rq = gl.rsqrt(_squares(q_smem, i, j, TILE) + 1e-6) * scale
    k2 = _squares(k_smem, i, j, TILE)
    rk = gl.rsqrt(k2 + 1e-6)
    rq_smem = _shared_line(rq)
    rk_smem = _shared_line(rk)
    k2_smem = _shared_line(k2 * rk * rk)
    kk0, qk0 = _products(q_smem, k_smem, k_smem.slice(0, 32), rq_smem, rk_smem, 0, PAIR)
    kk1, qk1 = _products(q_smem, k_smem, k_smem, rq_smem, rk_smem, 32, PAIR)
    kk_smem = hw.as_tile(behind, gl.float32, [C, C], WORDS)
    qk_smem = hw.as_tile(halves.index(0), gl.float32, [C, C], WORDS)
    kk_smem.slice(0, 32).slice(0, 32, 1).store(kk0)
    qk_smem.slice(0, 32).slice(0, 32, 1).store(qk0)
    kk_smem.slice(32, 32).store(kk1)
    qk_smem.slice(32, 32).store(qk1)

    unit = row.to(gl.int64) * HV + hv0
    rq = gl.expand_dims(rq_smem.load(gl.SliceLayout(0, GATE)), 0)
    rk = gl.expand_dims(rk_smem.load(gl.SliceLayout(0, GATE)), 0)
    k2 = gl.expand_dims(k2_smem.load(gl.SliceLayout(0, GATE)), 0)
    f_ptr += unit * (4 * C)
    _store_factors(f_ptr, decay_ptr + unit, g, beta, ok, w, token, rq, rk, k2)

    # By each warp for its head
    to = (unit * C).to(gl.int32)
    p0 = p_row(qk_smem, gates, i, j, 0, DTYPE, TILE)
    p1 = p_row(qk_smem, gates, i, j, 1, DTYPE, TILE)
    p2 = p_row(qk_smem, gates, i, j, 2, DTYPE, TILE)
    p3 = p_row(qk_smem, gates, i, j, 3, DTYPE, TILE)
    _store(p_desc, to, scratch, p0, p1, p2, p3)
    x0, x1, x2, x3 = inverse(kk_smem, gates, i, j, TILE)
    t0 = tb_row(x0, gates, DTYPE, TILE)
    t1 = tb_row(x1, gates, DTYPE, TILE)
    t2 = tb_row(x2, gates, DTYPE, TILE)
    t3 = tb_row(x3, gates, DTYPE, TILE)
    hw.barrier()  # ptxas would wait for P's way out before all this
    hw.tma_store_wait(0)
    _store(t_desc, to, scratch, t0, t1, t2, t3)
    hw.tma_store_wait(0)
    # Till here the barrier has its memory to itself: PTX allows no other use of it before this.
    hw.mbarrier.invalidate(full)
