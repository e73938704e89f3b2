"""The chunk-parallel half of Gated DeltaNet prefill on Hopper, in registers (docs/gdn_hopper.md).

Same results as `common/gdn_prepare.py`: per chunk of 64 tokens and value head Tb, P, F and decay.
A CTA owns one chunk and one key head, a warp one of its R value heads. The CTA makes K K^T and
Q K^T together; from there on each warp works alone, on 16 x 16 blocks in the fragment layout of
mma.sync.

Sizes: C = 64 tokens a chunk, D = 128, R = HV / H value heads a key head, rows = chunk rows.
"""

from .gdn_place import RAGGED_END, C, D
from .gluon_compat import (
    as_box,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    tma_load,
    tma_store,
    tma_store_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
# Programs of a grid that runs at once: see common/gdn_prepare.py
STEP = gl.constexpr(32)
SMALL_GRID = gl.constexpr(1024)


@gluon.constexpr_function
def tile_layout(warps):
    """Tiles [R, 16, 16], one a warp, as fragments of mma.sync."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def operand(index, layout):
    return gl.DotOperandLayout(index, layout, 2)


@gluon.constexpr_function
def gate_layout(warps):
    """[R, C]: a warp has the tokens of its head, a lane two of them."""
    return gl.BlockedLayout([1, 2], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _locate(row, cu_ptr, T, N, NT):
    """Chunk row -> (sequence, chunk, length, batch, end, first row): the last three are coordinates
    in the token descriptors. Rows of sequence n start at cu[n] // C + n (n * NT at equal length).
    """
    if cu_ptr is None:
        n = row // NT
        return n, row % NT, T, n * 0, n, n * 0
    else:
        n = row * 0
        end = N
        while end - n > 1:
            mid = (n + end) // 2
            left = gl.load(cu_ptr + mid).to(gl.int32) // C + mid > row
            end = gl.where(left, mid, end)
            n = gl.where(left, n, mid)
        # clamped, so that wrong values cannot read or write out of bounds
        start = gl.minimum(gl.maximum(gl.load(cu_ptr + n), 0), T).to(gl.int32)
        stop = gl.maximum(gl.minimum(gl.load(cu_ptr + n + 1), T).to(gl.int32), start)
        length = stop - start
        return n, row - start // C - n, length, n * 0 + RAGGED_END, stop, RAGGED_END - length


@gluon.jit
def _product(a, b, acc):
    """a b^T + acc of tiles [R, 16, 16], each where the last product left it: nothing moves.

    A fragment of C is one of A, and one of B of the transpose.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    a = gl.convert_layout(a.to(gl.float16), operand(0, LAYOUT), assert_trivial=True)
    b = b.to(gl.float16).permute((0, 2, 1))
    b = gl.convert_layout(b, operand(1, LAYOUT), assert_trivial=True)
    return mma_v2(a, b, acc)


@gluon.jit
def _level(i, j, S: gl.constexpr):
    """Where the blocks below the diagonal lie that join two S x S blocks into one of 2S x 2S."""
    return (i // S == j // S + 1) & ((j // S) % 2 == 0)


@gluon.jit
def _inverse_16(m, mt1, i, j):
    """(I - m)^-1 and its transpose, [R, 16, 16] fp32, of a tile that is used below its diagonal.

    mt1: the transpose of m, where m joins pairs of rows.
    """
    x = gl.where(i == j, 1.0, gl.where(_level(i, j, 1), m, 0.0))
    xt = gl.where(i == j, 1.0, gl.where(_level(j, i, 1), mt1, 0.0))
    m = m.to(gl.float16)
    zero = gl.zeros_like(x)
    for s in gl.static_range(1, 4):
        low = m * _level(i, j, 2**s).to(gl.float16)
        yt = _product(xt, low, zero)  # (low x)^T
        x, xt = _product(x, yt, x), _product(yt, x, xt)
    return x, xt


@gluon.jit
def _rows(smem, b: gl.constexpr, TILE: gl.constexpr):
    return smem.slice(16 * b, 16, 1).load(gl.SliceLayout(2, TILE))


@gluon.jit
def _columns(smem, b: gl.constexpr, TILE: gl.constexpr):
    return smem.slice(16 * b, 16, 1).load(gl.SliceLayout(1, TILE))


@gluon.jit
def _block(smem, bi: gl.constexpr, bj: gl.constexpr, TILE: gl.constexpr):
    block = smem.slice(16 * bi, 16, 0).slice(16 * bj, 16, 1)
    return gl.expand_dims(block.load(gl.SliceLayout(0, TILE)), 0)


@gluon.jit
def _decay_inside(G_smem, b: gl.constexpr, i, j, TILE: gl.constexpr):
    Gi = gl.expand_dims(_rows(G_smem, b, TILE), 2)
    Gj = gl.expand_dims(_columns(G_smem, b, TILE), 1)
    return gl.where(i >= j, gl.exp2(Gi - Gj), 0.0)


@gluon.jit
def _decay_between(since_smem, until_smem, whole_smem, bi: gl.constexpr, bj: gl.constexpr, TILE: gl.constexpr):
    since = gl.expand_dims(_rows(since_smem, bi, TILE), 2)
    until = gl.expand_dims(_columns(until_smem, bj, TILE), 1)
    for b in gl.static_range(bj + 1, bi):
        since = since * gl.expand_dims(_rows(whole_smem, b, TILE), 2)
    return since, until


@gluon.jit
def _full_tile(b, R: gl.constexpr):
    """[R C, C] of blocks [R, 16, 16], a tuple by rows of four blocks."""
    r0 = gl.join(gl.join(b[0], b[2]), gl.join(b[1], b[3]))  # [R, 16, 16, 2, 2]
    r1 = gl.join(gl.join(b[4], b[6]), gl.join(b[5], b[7]))
    r2 = gl.join(gl.join(b[8], b[10]), gl.join(b[9], b[11]))
    r3 = gl.join(gl.join(b[12], b[14]), gl.join(b[13], b[15]))
    t = gl.join(gl.join(r0, r2), gl.join(r1, r3))  # [R, i, j, bj1, bj0, bi1, bi0]
    t = t.permute((0, 5, 6, 1, 3, 4, 2))
    return t.reshape([R * C, C])


@gluon.jit(do_not_specialize=["T", "N", "NT"])
def gdn_prepare_fwd_kernel(
    q_desc,  # [.., .., tokens, H, K] box [1, 1, C, 1, K]
    k_desc,  # likewise
    t_desc,  # Tb [rows * HV * C, C] box [R C, C]
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
    T,
    N,
    NT,  # ceil(T / C), equal length
    scale,
    H: gl.constexpr,
    R: gl.constexpr,
    BETA_MAX: gl.constexpr,  # beta is a logit, and BETA_MAX * sigmoid(beta) is meant; 0: as given
):
    """Tb, P, F and decay of one chunk and the R value heads of one key head."""
    TILE: gl.constexpr = tile_layout(R)
    PAIR: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [R, 1], [16, 8])
    GATE: gl.constexpr = gate_layout(R)
    DTYPE: gl.constexpr = q_desc.dtype
    if gl.num_programs(0) <= SMALL_GRID:
        launch_dependents()
    h = gl.program_id(0) % H
    row = gl.program_id(0) // H
    n, c, length, batch, end, first = _locate(row, cu_ptr, T, N, NT)
    if c * C < length:
        landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(landed, count=1)
        mbarrier.expect(landed, 2 * C * D * 2)
        qk_smem = gl.allocate_shared_memory(DTYPE, [2, C, D], t_desc.layout)
        q_smem = qk_smem.index(0)
        k_smem = qk_smem.index(1)
        where = [batch, end, first + c * C, h, 0]
        tma_load(k_desc, where, landed, as_box(k_smem, k_desc))
        tma_load(q_desc, where, landed, as_box(q_smem, q_desc))

        # The gates, while q and k come
        unit = row.to(gl.int64) * (H * R) + h * R
        token = gl.arange(0, C, layout=gl.SliceLayout(0, GATE))
        ok = gl.expand_dims(token < length - c * C, 0)
        token = gl.expand_dims(token, 0)
        r = gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(1, GATE)), 1)
        hv = h * R + r
        if cu_ptr is None:
            b, start = n.to(gl.int64), (c * C).to(gl.int64)
        else:
            b, start = n.to(gl.int64) * 0, (end - length + c * C).to(gl.int64)
        g_at = g_ptr + b * g_strides[0] + start * g_strides[1]
        beta_at = beta_ptr + b * beta_strides[0] + start * beta_strides[1]
        g = gl.load(g_at + token * g_strides[1] + hv * g_strides[2], mask=ok, other=0.0)
        beta = gl.load(beta_at + token * beta_strides[1] + hv * beta_strides[2], mask=ok, other=0.0)
        g = _log2_decay(g.to(gl.float32), A_log_ptr, dt_bias_ptr, hv)
        g = gl.where(ok, g, 0.0)  # [R, C]
        beta = beta.to(gl.float32)
        if BETA_MAX > 0.0:
            beta = BETA_MAX / (1.0 + gl.exp2(-LOG2_E * beta))
        beta = gl.where(ok, beta, 0.0)  # [R, C]
        G = gl.associative_scan(g, 1, _add)  # [R, C]
        # Sums inside blocks of 16, and exps of them: from the block's start and to its end
        part = g.reshape([R, 4, 16])
        local = gl.associative_scan(part, 2, _add)
        total = gl.expand_dims(gl.sum(part, 2), 2)
        to_end = gl.convert_layout((total - local).reshape([R, C]), GATE)
        local = gl.convert_layout(local.reshape([R, C]), GATE)
        total = gl.convert_layout((total + local.reshape([R, 4, 16]) * 0.0).reshape([R, C]), GATE)
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        G_smem = gl.allocate_shared_memory(gl.float32, [R, C], FLAT, local)
        beta_smem = gl.allocate_shared_memory(gl.float32, [R, C], FLAT, beta)
        step_smem = gl.allocate_shared_memory(gl.float32, [R, C], FLAT, beta * gl.exp2(g))
        since_smem = gl.allocate_shared_memory(gl.float32, [R, C], FLAT, gl.exp2(local))
        until_smem = gl.allocate_shared_memory(gl.float32, [R, C], FLAT, gl.exp2(to_end))
        whole_smem = gl.allocate_shared_memory(gl.float32, [R, C], FLAT, gl.exp2(total))

        mbarrier.wait(landed, 0)
        kk = gl.zeros((C, C), gl.float32, PAIR)
        qk = gl.zeros((C, C), gl.float32, PAIR)
        q2 = gl.zeros((C,), gl.float32, gl.SliceLayout(1, PAIR))
        k2 = gl.zeros((C,), gl.float32, gl.SliceLayout(1, PAIR))
        for d in gl.static_range(0, D, STEP):
            kt = k_smem.slice(d, STEP, 1).permute((1, 0)).load(operand(1, PAIR))
            q = q_smem.slice(d, STEP, 1).load(operand(0, PAIR))
            k = k_smem.slice(d, STEP, 1).load(operand(0, PAIR))
            kk = mma_v2(k, kt, kk)
            qk = mma_v2(q, kt, qk)
            q = q.to(gl.float32)
            k = k.to(gl.float32)
            q2 += gl.convert_layout(gl.sum(q * q, 1), gl.SliceLayout(1, PAIR))
            k2 += gl.convert_layout(gl.sum(k * k, 1), gl.SliceLayout(1, PAIR))
        rq = gl.rsqrt(q2 + 1e-6) * scale
        rk = gl.rsqrt(k2 + 1e-6)
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        rq_smem = gl.allocate_shared_memory(gl.float32, [C], LINE, rq)
        rk_smem = gl.allocate_shared_memory(gl.float32, [C], LINE, rk)
        k2_smem = gl.allocate_shared_memory(gl.float32, [C], LINE, k2 * rk * rk)
        rk_column = gl.expand_dims(rk_smem.load(gl.SliceLayout(0, PAIR)), 0)
        WORDS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
        kk = kk * (gl.expand_dims(-rk, 1) * rk_column)  # negative: see _inverse_16
        qk = qk * (gl.expand_dims(rq, 1) * rk_column)
        kk_all = gl.allocate_shared_memory(gl.float32, [C, C], WORDS, kk)
        qk_all = gl.allocate_shared_memory(gl.float32, [C, C], WORDS, qk)

        rk = gl.expand_dims(rk_smem.load(gl.SliceLayout(0, GATE)), 0)
        rq = gl.expand_dims(rq_smem.load(gl.SliceLayout(0, GATE)), 0)
        k2 = gl.expand_dims(k2_smem.load(gl.SliceLayout(0, GATE)), 0)
        G_end = gl.expand_dims(gl.sum(g, 1), 1)
        f_at = f_ptr + unit * (4 * C) + r * (4 * C) + token
        gl.store(f_at, gl.where(ok, gl.exp2(G) * rk, 0.0))
        gl.store(f_at + C, gl.where(ok, gl.exp2(gl.minimum(G_end - G, 0.0)) * rk, 0.0))
        gl.store(f_at + 2 * C, gl.where(ok, gl.exp2(G) * rq, 0.0))
        gl.store(f_at + 3 * C, gl.exp2(G_end) + token * 0.0)
        # a token's a (I - beta k k^T) stretches nothing by more than a max(1, |1 - beta |k|^2|)
        stretch = gl.sum(gl.log2(gl.maximum(gl.abs(1.0 - beta * k2), 1.0)), 1)
        gl.store(decay_ptr + unit + r, G_end + gl.expand_dims(stretch, 1))

        # From here on a warp has its own head
        i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
        i = gl.expand_dims(gl.expand_dims(i, 0), 2)
        j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
        j = gl.expand_dims(gl.expand_dims(j, 0), 1)
        zero_tile = gl.zeros((R, 16, 16), gl.float32, TILE)
        none = zero_tile.to(DTYPE)
        p = ()
        for bi in gl.static_range(4):
            for bj in gl.static_range(4):
                if bj < bi:
                    gam = _decay_between(since_smem, until_smem, whole_smem, bi, bj, TILE)
                    p = p + ((_block(qk_all, bi, bj, TILE) * gam[0] * gam[1]).to(DTYPE),)
                elif bj == bi:
                    gam = _decay_inside(G_smem, bi, i, j, TILE)
                    p = p + ((_block(qk_all, bi, bj, TILE) * gam).to(DTYPE),)
                else:
                    p = p + (none,)
        stage = gl.allocate_shared_memory(DTYPE, [R * C, C], t_desc.layout)
        stage.store(_full_tile(p, R))
        fence_async_shared()
        tma_store(p_desc, [(unit * C).to(gl.int32), 0], stage)
        m = ()
        xs = ()
        for bi in gl.static_range(4):
            bt = gl.expand_dims(_rows(beta_smem, bi, TILE), 2)
            for bj in gl.static_range(4):
                if bj < bi:
                    gam = _decay_between(since_smem, until_smem, whole_smem, bi, bj, TILE)
                    mm = _block(kk_all, bi, bj, TILE) * (gam[0] * bt) * gam[1]
                    m = m + (mm.to(gl.float16),)
                elif bi == bj:
                    gam = _decay_inside(G_smem, bi, i, j, TILE)
                    kkb = _block(kk_all, bi, bj, TILE)
                    st = gl.expand_dims(_columns(step_smem, bj, TILE), 1)
                    xs = xs + (_inverse_16(kkb * gam * bt, kkb * st, i, j),)
                    m = m + (none,)
                else:
                    m = m + (none,)
        x0, x0t = xs[0]
        x1, x1t = xs[1]
        x2, x2t = xs[2]
        x3, x3t = xs[3]
        yt = _product(x0t, m[4], zero_tile)
        x10, x10t = _product(x1, yt, zero_tile), _product(yt, x1, zero_tile)
        x32 = _product(x3, _product(x2t, m[14], zero_tile), zero_tile)
        y20 = _product(x0t, m[8], _product(x10t, m[9], zero_tile))
        y30 = _product(x0t, m[12], _product(x10t, m[13], zero_tile))
        y21 = _product(x1t, m[9], zero_tile)
        y31 = _product(x1t, m[13], zero_tile)
        x20 = _product(x2, y20, zero_tile)
        x21 = _product(x2, y21, zero_tile)
        x30 = _product(x32, y20, _product(x3, y30, zero_tile))
        x31 = _product(x32, y21, _product(x3, y31, zero_tile))
        z = zero_tile
        tb = ()
        tiles = (x0, z, z, z, x10, x1, z, z, x20, x21, x2, z, x30, x31, x32, x3)
        for bi in gl.static_range(16):
            bt = gl.expand_dims(_columns(beta_smem, bi % 4, TILE), 1)
            tb = tb + ((tiles[bi] * bt).to(DTYPE),)
        tma_store_wait(0)
        stage.store(_full_tile(tb, R))
        fence_async_shared()
        tma_store(t_desc, [(unit * C).to(gl.int32), 0], stage)
        tma_store_wait(0)


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _log2_decay(g, A_log_ptr, dt_bias_ptr, hv):
    """g as given (natural-log decay; the raw a with A_log) -> log2 of the decay, 2^-200 at least."""
    if A_log_ptr is not None:
        x = g
        if dt_bias_ptr is not None:
            x += gl.load(dt_bias_ptr + hv).to(gl.float32)
        softplus = gl.where(x > 20.0, x, gl.log(1.0 + gl.exp(gl.minimum(x, 20.0))))
        g = -gl.exp(gl.load(A_log_ptr + hv).to(gl.float32)) * softplus
    return gl.maximum(g * LOG2_E, -200.0)
