"""Gradients of the experts' weights, with a strip of one operand held in shared memory.

    dW[e] = a^T b over the rows of expert e, in their order

A CTA takes two tiles of [128, 128] of dW[e], side by side. One warp loads chunks of 64 rows of both
operands, as far ahead as shared memory has room; two warpgroups multiply a tile each, and read the
same chunks of a. The second group is a little behind the first, so that it multiplies while the
other stores. Parts of an expert's strip, 128 rows of dW[e], are the work of several CTAs.

Where an expert has no more than MOST chunks, they are held instead: a CTA takes a whole strip,
loads a once, and its groups multiply tiles alternately. Such strips come last.

E experts; rows and places are those of the routing (portable/routing.py).
"""

import functools

import torch

from ...runtime import device, tuning
from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record, tile_map
from ...runtime.launch import Launch
from ..portable.routing import Routing, first_place, first_rows

TILE = gl.constexpr(128)  # rows and columns of a tile
CHUNK = gl.constexpr(64)  # of a sum
LAG = gl.constexpr(2)  # chunks by which the second group of a pair of tiles is behind the first


@record
class Work:
    """State that the warps of one CTA share."""

    a_desc: hw.tma.tensor_descriptor  # [.., M] by places, box [CHUNK, TILE]
    b_desc: hw.tma.tensor_descriptor  # [.., N] by places, box [CHUNK, TILE]
    out_desc: hw.tma.tensor_descriptor  # [E, M, N] box [1, TILE, 64]
    a_smem: gl.shared_memory_descriptor  # [HELD, *box of a_desc]
    b_smem: gl.shared_memory_descriptor  # [2 STAGES, *box of b_desc]: a ring for each group
    out_smem: gl.shared_memory_descriptor  # [2 BUFFERS, TILE, 64]
    a_full: gl.shared_memory_descriptor  # [HELD] mbarriers: a chunk is there
    a_empty: gl.shared_memory_descriptor  # [HELD] mbarriers: both groups are done with it
    b_full: gl.shared_memory_descriptor  # [2 STAGES]
    b_empty: gl.shared_memory_descriptor  # [2 STAGES]: its group is done with it
    routing_ptr: gl.tensor
    height: gl.tensor  # of the routing's tiles
    strips: gl.tensor
    TILES_M: gl.constexpr
    TILES_N: gl.constexpr
    HELD: gl.constexpr
    MOST: gl.constexpr  # chunks of a strip that is held
    STAGES: gl.constexpr
    BUFFERS: gl.constexpr
    SPAN: gl.constexpr  # tiles of a part of a strip that is not held
    PARTS: gl.constexpr


@gluon.jit
def _part(w, number):
    """A part of a strip that is not held, or else a whole strip: those come after all parts.

    Returns (expert, place of its first row, row of its weight, chunks, first tile, end of tiles).
    """
    streamed = number < w.strips * w.PARTS
    strip = number // w.PARTS if streamed else number - w.strips * w.PARTS
    expert = strip // w.TILES_M
    first = gl.load(first_rows(w.routing_ptr) + expert)
    rows = gl.load(first_rows(w.routing_ptr) + expert + 1) - first
    place = first_place(first, expert, w.height)
    chunks = (rows + CHUNK - 1) // CHUNK
    begin = (number % w.PARTS) * w.SPAN if streamed else 0
    end = gl.minimum(begin + w.SPAN, w.TILES_N) if streamed else w.TILES_N
    if streamed != (chunks > w.MOST):
        end = begin
    return expert, place, (strip % w.TILES_M) * TILE, chunks, begin, end


@gluon.jit
def _load(desc, place, column, at, first, ring, full, empty, SIZE: gl.constexpr):
    """Loads chunk `at` of a ring that begins at slot `first`, once the slot is empty."""
    s = first + at % SIZE
    hw.mbarrier.wait(empty.index(s), ((at // SIZE) & 1) ^ 1)
    hw.mbarrier.expect(full.index(s), TILE * CHUNK * 2)
    hw.tma_load(desc, [place, column], full.index(s), ring.index(s))


@gluon.jit
def _load_a(w, place, row, at):
    _load(w.a_desc, place, row, at, 0, w.a_smem, w.a_full, w.a_empty, w.HELD)


@gluon.jit
def _load_b(w, place, n, at, group):
    first = group * w.STAGES
    _load(w.b_desc, place, n * TILE, at, first, w.b_smem, w.b_full, w.b_empty, w.STAGES)


@gluon.jit
def _load_partition(w):
    """Loads both operands, as far ahead as buffers are empty; one warp."""
    at_a = 0
    at_0 = 0  # chunks of b that the first group has got
    at_1 = 0
    tile = 0
    for number in range(gl.program_id(0), w.strips * (w.PARTS + 1), gl.num_programs(0)):
        expert, place, row, chunks, begin, end = _part(w, number)
        if chunks > w.MOST:
            for n in range(begin, end, 2):
                for k in range(chunks + LAG):
                    if k < chunks:
                        _load_a(w, place + k * CHUNK, row, at_a + k)
                        _load_b(w, place + k * CHUNK, n, at_0 + k, 0)
                    if (k >= LAG) & (n + 1 < end):
                        _load_b(w, place + (k - LAG) * CHUNK, n + 1, at_1 + k - LAG, 1)
                at_a += chunks
                at_0 += chunks
                at_1 += chunks if n + 1 < end else 0
        else:
            for n in range(begin, end):
                group = tile % 2
                at_b = at_0 if group == 0 else at_1
                for k in range(chunks):
                    if n == 0:
                        _load_a(w, place + k * CHUNK, row, at_a + k)
                    _load_b(w, place + k * CHUNK, n, at_b + k, group)
                at_0 += chunks * (1 - group)
                at_1 += chunks * group
                tile += 1
            at_a += chunks if begin < end else 0


@gluon.jit
def _multiply_tile(w, at_a, at_b, chunks, GROUP: gl.constexpr):
    """The sum of a tile. Chunks of a that are not held for the next tile are released once
    multiplied."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    FIRST: gl.constexpr = GROUP * w.STAGES
    streams = chunks > w.MOST
    acc = gl.zeros((TILE, TILE), gl.float32, LAYOUT)
    for k in range(chunks):
        i = at_a + k
        j = at_b + k
        hw.mbarrier.wait(w.a_full.index(i % w.HELD), (i // w.HELD) & 1)
        hw.mbarrier.wait(w.b_full.index(FIRST + j % w.STAGES), (j // w.STAGES) & 1)
        a = w.a_smem.index(i % w.HELD).permute((1, 0))
        b = w.b_smem.index(FIRST + j % w.STAGES)
        acc = hw.warpgroup_mma(a, b, acc, is_async=True)
        acc = hw.warpgroup_mma_wait(1, (acc,))
        i += w.HELD - 1
        j += w.STAGES - 1
        hw.mbarrier.arrive(w.b_empty.index(FIRST + j % w.STAGES), count=1, pred=k > 0)
        hw.mbarrier.arrive(w.a_empty.index(i % w.HELD), count=1, pred=(k > 0) & streams)
    acc = hw.warpgroup_mma_wait(0, (acc,))
    i = at_a + chunks + w.HELD - 1
    j = at_b + chunks + w.STAGES - 1
    hw.mbarrier.arrive(w.b_empty.index(FIRST + j % w.STAGES), count=1, pred=chunks > 0)
    hw.mbarrier.arrive(w.a_empty.index(i % w.HELD), count=1, pred=(chunks > 0) & streams)
    return acc


@gluon.jit
def _store_tile(w, acc, expert, row, column, GROUP: gl.constexpr):
    """Stores a tile by TMA, which drops elements past the result's end."""
    left, right = acc.reshape((TILE, 2, TILE // 2)).permute((0, 2, 1)).split()
    for half in gl.static_range(2):
        part = left if half == 0 else right
        smem = w.out_smem.index(GROUP * w.BUFFERS + half % w.BUFFERS)
        hw.tma_store_wait(w.BUFFERS - 1)  # the last store from there has been read
        smem.store(part.to(w.out_desc.dtype))
        hw.fence_async_shared()
        where = [expert, row, column + half * (TILE // 2)]
        hw.tma_store(w.out_desc, where, hw.as_box(smem, w.out_desc))


@gluon.jit
def _pass_by(w, at_a, chunks):
    """Releases chunks of a that the other group alone multiplies: after a missed chunk a barrier's
    phase would be ambiguous."""
    for k in range(chunks):
        i = at_a + k
        hw.mbarrier.wait(w.a_full.index(i % w.HELD), (i // w.HELD) & 1)
        hw.mbarrier.arrive(w.a_empty.index(i % w.HELD), count=1)


@gluon.jit
def _multiply(w, GROUP: gl.constexpr):
    """Computes every second tile; strips and tiles are counted as by the loading warp."""
    at_a = 0
    at_b = 0
    tile = 0
    for number in range(gl.program_id(0), w.strips * (w.PARTS + 1), gl.num_programs(0)):
        expert, place, row, chunks, begin, end = _part(w, number)
        if chunks > w.MOST:
            for n in range(begin, end, 2):
                if n + GROUP < end:
                    acc = _multiply_tile(w, at_a, at_b, chunks, GROUP)
                    at_b += chunks
                    _store_tile(w, acc, expert, row, (n + GROUP) * TILE, GROUP)
                else:
                    _pass_by(w, at_a, chunks)
                at_a += chunks
        else:
            for n in range(begin, end):
                if tile % 2 == GROUP:
                    acc = _multiply_tile(w, at_a, at_b, chunks, GROUP)
                    at_b += chunks
                    if n + 2 >= w.TILES_N:  # the group's last of the strip
                        for k in range(chunks):
                            hw.mbarrier.arrive(w.a_empty.index((at_a + k) % w.HELD), count=1)
                    _store_tile(w, acc, expert, row, n * TILE, GROUP)
                elif w.TILES_N == 1:
                    _pass_by(w, at_a, chunks)
                tile += 1
            at_a += chunks if begin < end else 0
    hw.tma_store_wait(0)


@gluon.jit
def _multiply_partition_0(w):
    _multiply(w, 0)


@gluon.jit
def _multiply_partition_1(w):
    _multiply(w, 1)


@gluon.jit(do_not_specialize=["E", "height"])
def weight_strips_kernel(
    a_desc,  # [.., M] by places, in boxes [CHUNK, TILE]
    b_desc,  # [.., N] by places, in boxes [CHUNK, TILE]
    out_desc,  # [E, M, N] in boxes [1, TILE, 64]
    routing_ptr, E, height,
    TILES_M: gl.constexpr, TILES_N: gl.constexpr, HELD: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, SPAN: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out[e] = a^T b over the rows of expert e; zeros for an expert without rows."""
    OUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    a_smem, b_smem = hw.ring(a_desc, HELD), hw.ring(b_desc, 2 * STAGES)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 * BUFFERS, TILE, TILE // 2], OUT)
    a_full, a_empty = hw.ring_barriers(HELD, 2)
    b_full, b_empty = hw.ring_barriers(2 * STAGES, 1)
    w = Work(
        a_desc, b_desc, out_desc, a_smem, b_smem, out_smem, a_full, a_empty, b_full, b_empty,
        routing_ptr, height, E * TILES_M, TILES_M, TILES_N, HELD, MOST, STAGES, BUFFERS,
        SPAN, (TILES_N + SPAN - 1) // SPAN,
    )  # fmt: skip
    hw.barrier()
    hw.warp_specialize(
        [_multiply_partition_0, _multiply_partition_1, _load_partition], (w,),
        [4, 1], [REGISTERS, 40],
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _launch(where: torch.device, dtype, places: int, E: int, height: int, M: int, N: int) -> Launch:
    config, side = tuning.lookup("hopper_experts_weight", where), TILE.value
    tiles_m, tiles_n = -(-M // side), -(-N // side)
    maps = (
        tile_map(dtype, (places, M), (M, 1), CHUNK.value, side),
        tile_map(dtype, (places, N), (N, 1), CHUNK.value, side),
        tile_map(dtype, (E, M, N), (M * N, N, 1), 1, side, side // 2),
    )
    sizes = [config[k] for k in ("HELD", "MOST", "STAGES", "BUFFERS", "SPAN", "REGISTERS")]
    return Launch(
        weight_strips_kernel, min(device.multiprocessor_count(where.index), E * tiles_m), where,
        maps=maps, numbers=(E, height), constexprs=(tiles_m, tiles_n, *sizes),
        options=(("num_warps", 4), ("maxnreg", 168)),
    )  # fmt: skip


def weight_gradient(
    a: torch.Tensor,  # [.., M] by places
    b: torch.Tensor,  # [.., N] by places
    routing: Routing,
) -> torch.Tensor:  # [E, M, N]
    """a^T b over the rows of each expert."""
    E, M, N = routing.E, a.shape[1], b.shape[1]
    out = a.new_empty((E, M, N))
    start = _launch(a.device, a.dtype, routing.places, E, routing.height, M, N)
    start(a, b, out, routing.buffer)
    return out
