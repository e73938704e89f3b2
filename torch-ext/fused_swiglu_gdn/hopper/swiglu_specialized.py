"""SwiGLU by specialized warps (Gluon, sm_90): for sizes with so many tiles that epilogues count.

    z = silu(x Wg^T) * (x Wu^T)

One warp loads; two groups of four warps multiply, 64 rows of a tile each, and drift apart by up to
the number of stages: one runs its epilogue while the other still feeds the tensor cores.

Sizes: M tokens, K model width, N hidden width. docs/swiglu.md has what this wins.
"""

from .gluon_compat import (
    REINTERPRET_IS_PUBLIC,
    WARP_SPECIALIZE_TAKES_LIST,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _tile(tile, tiles_m, tiles_n, group):
    """(row, column) of a tile, `group` rows of tiles at a time: as common.primitives has it."""
    first = (tile // (group * tiles_n)) * group
    rows = min(tiles_m - first, group)
    place = tile % (group * tiles_n)
    return first + place % rows, place // rows


@gluon.jit
def _load(
    x_desc, gate_desc, up_desc, z_desc, x_smem, w_smem, z_smem, full, empty, M, N, K, group
):  # fmt: skip
    """Fills the ring: a block of x and the gate's and up's blocks of the weights a stage."""
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = gate_desc.block_type.shape[0]
    STAGES: gl.constexpr = x_smem.shape[0]
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = _tile(tile, tiles_m, tiles_n, group)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (BLOCK_M + 2 * BLOCK_N) * BLOCK_K * 2)
            tma_load(x_desc, [pid_m * BLOCK_M, k], ready, x_smem.index(stage))
            tma_load(gate_desc, [pid_n * BLOCK_N, k], ready, w_smem.index(2 * stage))
            tma_load(up_desc, [pid_n * BLOCK_N, k], ready, w_smem.index(2 * stage + 1))
            step += 1


@gluon.jit
def _multiply(
    x_desc, gate_desc, up_desc, z_desc, x_smem, w_smem, z_smem, full, empty, M, N, K, group,
    HALF: gl.constexpr,
):  # fmt: skip
    """The upper (HALF 0) or lower 64 rows of each tile."""
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = gate_desc.block_type.shape[0]
    STAGES: gl.constexpr = x_smem.shape[0]
    ROWS: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    if REINTERPRET_IS_PUBLIC:
        w_pairs = w_smem.reinterpret(
            gate_desc.dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], gate_desc.layout
        )
    else:
        w_pairs = w_smem._reinterpret(
            gate_desc.dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], gate_desc.layout
        )
    z_half = z_smem.index(HALF)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    acc = gl.zeros((ROWS, 2 * BLOCK_N), gl.float32, layout)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = _tile(tile, tiles_m, tiles_n, group)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            x = x_smem.index(stage).slice(HALF * ROWS, ROWS, 0)  # [ROWS, BLOCK_K]
            w = w_pairs.index(stage).permute((1, 0))  # [BLOCK_K, 2 BLOCK_N]
            acc = warpgroup_mma(x, w, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, (acc,))  # the product before this one is done
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        gate, up = acc.reshape((ROWS, 2, BLOCK_N)).permute((0, 2, 1)).split()
        z = gate / (1.0 + gl.exp2(-1.4426950408889634 * gate)) * up
        tma_store_wait(0)  # the tile before this one has left z_half
        z_half.store(z.to(z_desc.dtype))
        fence_async_shared()
        tma_store(z_desc, [pid_m * BLOCK_M + HALF * ROWS, pid_n * BLOCK_N], z_half)
    tma_store_wait(0)


@gluon.jit
def _multiply_upper(
    x_desc, gate_desc, up_desc, z_desc, x_smem, w_smem, z_smem, full, empty, M, N, K, group
):  # fmt: skip
    _multiply(
        x_desc, gate_desc, up_desc, z_desc, x_smem, w_smem, z_smem, full, empty, M, N, K, group, 0
    )


@gluon.jit
def _multiply_lower(
    x_desc, gate_desc, up_desc, z_desc, x_smem, w_smem, z_smem, full, empty, M, N, K, group
):  # fmt: skip
    _multiply(
        x_desc, gate_desc, up_desc, z_desc, x_smem, w_smem, z_smem, full, empty, M, N, K, group, 1
    )


@gluon.jit(do_not_specialize=["M", "N", "K", "group"])
def swiglu_specialized_fwd_kernel(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    gate_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K]
    up_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K]
    z_desc,  # [M, N] in blocks [BLOCK_M / 2, BLOCK_N]
    M,
    N,
    K,
    group,  # rows of tiles that are walked together
    STAGES: gl.constexpr,
):
    """z = silu(x Wg^T) * (x Wu^T); programs stride over tiles [BLOCK_M, BLOCK_N]."""
    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    w_smem = gl.allocate_shared_memory(
        gate_desc.dtype, [2 * STAGES] + gate_desc.block_type.shape, gate_desc.layout
    )
    z_smem = gl.allocate_shared_memory(z_desc.dtype, [2] + z_desc.block_type.shape, z_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    args = (
        x_desc, gate_desc, up_desc, z_desc, x_smem, w_smem, z_smem, full, empty, M, N, K, group,
    )  # fmt: skip
    if WARP_SPECIALIZE_TAKES_LIST:
        gl.warp_specialize(
            [(_multiply_upper, args), (_multiply_lower, args), (_load, args)], [4, 1], [240, 24]
        )
    else:
        gl.warp_specialize(args, _multiply_upper, args, [_multiply_lower, _load], [4, 1], [240, 24])
