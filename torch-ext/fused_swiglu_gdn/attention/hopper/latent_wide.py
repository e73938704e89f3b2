"""Latent attention of many rows of queries: warps with one job each, rows of products 64 heads.

    scores   S = q c^T + q_rot r^T, P by softmax     four warps
    values   o = factor o + P c                      eight warps, each four half of the channels

Two blocks of 64 slots are in shared memory: scores are made of one while the other is multiplied by
P, and then replaced by the next one.
"""

import torch

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record, tile_map

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK = gl.constexpr(64)  # rows of queries, and slots


@gluon.jit
def part_of(len_ptr, b, len_step, S, SPLITS, split, NEW: gl.constexpr):
    """(first slot of a part of row b, the slot behind its last one, filled slots of the row), as
    portable/parts.py has them."""
    length = S
    if len_ptr is not None:
        length = gl.load(len_ptr + b * len_step) + NEW
        length = gl.minimum(gl.maximum(length, 0), S).to(gl.int32)
    size = gl.cdiv(gl.cdiv(length, BLOCK), SPLITS) * BLOCK
    return split * size, gl.minimum(split * size + size, length), length


@record
class Work:
    """The state that the warps of one CTA share."""

    q_desc: hw.tma.tensor_descriptor  # [B, ROWS, C + R], box [1, BLOCK, C]
    qr_desc: hw.tma.tensor_descriptor  # box [1, BLOCK, R]
    c_desc: hw.tma.tensor_descriptor  # [B, S, C], box [1, BLOCK, C]
    r_desc: hw.tma.tensor_descriptor  # [B, S, R], box [1, BLOCK, R]
    qs: gl.shared_memory_descriptor  # [BLOCK, C]
    qr: gl.shared_memory_descriptor  # [BLOCK, R]
    cs: gl.shared_memory_descriptor  # [2, BLOCK, C]
    rs: gl.shared_memory_descriptor  # [2, BLOCK, R]
    ps: gl.shared_memory_descriptor  # [BLOCK, BLOCK]
    factors: gl.shared_memory_descriptor  # [BLOCK] fp32
    full: gl.shared_memory_descriptor  # [2] mbarriers: a block is there
    asked: gl.shared_memory_descriptor  # mbarrier: the queries are there
    given: gl.shared_memory_descriptor  # mbarrier: P and factors are there
    taken: gl.shared_memory_descriptor  # mbarrier: P and its block have been multiplied
    b: gl.tensor
    first: gl.tensor  # row of queries
    split: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    length: gl.tensor
    B: gl.tensor
    SPLITS: gl.tensor
    H: gl.constexpr
    ROWS: gl.constexpr
    C: gl.constexpr
    R: gl.constexpr
    NEW: gl.constexpr


@gluon.jit
def _load_block(w, i):
    full = w.full.index(i & 1)
    hw.mbarrier.expect(full, BLOCK * (w.C + w.R) * 2)
    at = [w.b, w.start + i * BLOCK, 0]
    hw.tma_load(w.c_desc, at, full, hw.as_box(w.cs.index(i & 1), w.c_desc))
    hw.tma_load(w.r_desc, at, full, hw.as_box(w.rs.index(i & 1), w.r_desc))


@gluon.jit
def _load_first(w, blocks):
    """The first two blocks, before the launch ahead has ended if it does not write them: that of
    absorb writes no latents but those of the NEW slots; and the queries."""
    old = w.stop if w.NEW == 0 else gl.minimum(w.stop, w.length - w.NEW)
    whole = gl.cdiv(old - w.start, BLOCK) if w.NEW == 0 else (old - w.start) // BLOCK
    early = gl.maximum(gl.minimum(whole, 2), 0)
    for i in range(0, early):
        _load_block(w, i)
    hw.wait_for_predecessor()
    hw.launch_dependents()
    if blocks > 0:
        hw.mbarrier.expect(w.asked, BLOCK * (w.C + w.R) * 2)
        hw.tma_load(w.q_desc, [w.b, w.first, 0], w.asked, hw.as_box(w.qs, w.q_desc))
        hw.tma_load(w.qr_desc, [w.b, w.first, w.C], w.asked, hw.as_box(w.qr, w.qr_desc))
    for i in range(early, gl.minimum(blocks, 2)):
        _load_block(w, i)


@gluon.jit
def _score_partition(w, mask_ptr, mask_steps, parts_ptr, scale2):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LAST: gl.constexpr = w.ROWS // w.H - 1
    row = w.first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    token = row // w.H
    top = gl.full((BLOCK,), float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros((BLOCK,), gl.float32, gl.SliceLayout(1, LAYOUT))
    blank = gl.zeros((BLOCK, BLOCK), gl.float32, LAYOUT)
    blocks = gl.cdiv(w.stop - w.start, BLOCK)
    _load_first(w, blocks)
    if blocks > 0:
        hw.mbarrier.wait(w.asked, 0)
    for i in range(blocks):
        s = i & 1
        slot = w.start + i * BLOCK + n
        if mask_ptr is not None:  # before the block, under which it comes
            at = w.b.to(gl.int64) * mask_steps[0] + slot.to(gl.int64) * mask_steps[2]
            if w.ROWS == w.H:
                m = gl.load(mask_ptr + at, mask=slot < w.stop, other=0)[None, :]
            else:
                at = at[None, :] + (token * mask_steps[1])[:, None]
                there = (slot < w.stop)[None, :] & (row < w.ROWS)[:, None]
                m = gl.load(mask_ptr + at, mask=there, other=0)
        hw.mbarrier.wait(w.full.index(s), (i >> 1) & 1)
        c, r = w.cs.index(s).permute((1, 0)), w.rs.index(s).permute((1, 0))
        x = hw.warpgroup_mma(w.qs, c, blank, use_acc=False, is_async=True)
        x = hw.warpgroup_mma(w.qr, r, x, is_async=True)
        x = hw.warpgroup_mma_wait(0, (x,))
        x = x * scale2
        if mask_ptr is None:
            seen = slot[None, :] < gl.minimum(w.stop, w.length - LAST + token)[:, None]
        else:
            seen = (slot < w.stop)[None, :] & (row < w.ROWS)[:, None]
            if mask_ptr.dtype.element_ty == gl.int1:
                seen = seen & (m != 0)
            else:
                x = x + m.to(gl.float32) * LOG2E
        x = gl.where(seen, x, float("-inf"))
        new = gl.maximum(top, gl.max(x, 1))
        base = gl.where(new == float("-inf"), 0.0, new)
        p = gl.exp2(x - base[:, None])
        shrink = gl.exp2(top - base)
        hw.mbarrier.wait(w.taken, (i & 1) ^ 1)  # the first time passes at once
        w.ps.store(p.to(w.ps.dtype))
        w.factors.store(shrink)
        hw.fence_async_shared()
        hw.barrier()
        hw.mbarrier.arrive(w.given, count=1)
        total = total * shrink + gl.sum(p, 1)
        top = new
    place = (w.b.to(gl.int64) * w.ROWS + row) * w.SPLITS + w.split
    every = w.B.to(gl.int64) * (w.ROWS * w.SPLITS)
    gl.store(parts_ptr + every * w.C + place, top, mask=row < w.ROWS)
    gl.store(parts_ptr + every * (w.C + 1) + place, total, mask=row < w.ROWS)


@gluon.jit
def _value_partition(w, mask_ptr, mask_steps, parts_ptr, scale2):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, w.C // 2, 16])
    PANEL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    acc = gl.zeros((BLOCK, w.C), gl.float32, LAYOUT)
    blocks = gl.cdiv(w.stop - w.start, BLOCK)
    for i in range(blocks):
        s = i & 1
        tile = w.cs.index(s)
        left = w.stop - w.start - i * BLOCK  # slots
        hw.mbarrier.wait(w.full.index(s), (i >> 1) & 1)
        if left < BLOCK:  # slots past the length may hold NaN, which 0 does not stop
            n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, PANEL))
            for j in gl.static_range(w.C // 64):
                panel = tile.slice(j * 64, 64, 1)
                x = panel.load(PANEL)
                panel.store(gl.where((n < left)[:, None], x, gl.zeros_like(x)))
            hw.fence_async_shared()
            hw.barrier()
        hw.mbarrier.wait(w.given, i & 1)
        acc = acc * w.factors.load(gl.SliceLayout(1, LAYOUT))[:, None]
        acc = hw.warpgroup_mma(w.ps, tile, acc, is_async=True)
        acc = hw.warpgroup_mma_wait(0, (acc,))
        hw.barrier()
        hw.mbarrier.arrive(w.taken, count=1)
        if i + 2 < blocks:  # in place of the one that has been multiplied
            _load_block(w, i + 2)
    if w.start < w.stop:
        row = w.first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
        ch = gl.arange(0, w.C, layout=gl.SliceLayout(0, LAYOUT))
        places = ((w.b.to(gl.int64) * w.ROWS + row) * w.SPLITS + w.split) * w.C
        there = (row < w.ROWS)[:, None] & (ch >= 0)[None, :]
        gl.store(parts_ptr + places[:, None] + ch[None, :], acc, mask=there)


@gluon.jit(do_not_specialize=["B", "S", "SPLITS"])
def wide_kernel(
    q_desc,  # as in Work
    qr_desc, c_desc, r_desc,
    len_ptr,  # as _ring_kernel has them
    mask_ptr, parts_ptr,
    c_step, r_step, mask_steps, len_step,
    B, S, SPLITS, scale2,
    H: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BLOCK_R: gl.constexpr,
    NEW: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """BLOCK rows of queries over one part of the slots; P is rounded."""
    TILES: gl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    BAR: gl.constexpr = hw.mbarrier.MBarrierLayout()
    DT: gl.constexpr = c_desc.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, C], DT)
    thin: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, R], DT)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], DT)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qs = gl.allocate_shared_memory(DT, [BLOCK, C], wide)
    qr = gl.allocate_shared_memory(DT, [BLOCK, R], thin)
    cs = gl.allocate_shared_memory(DT, [2, BLOCK, C], wide)
    rs = gl.allocate_shared_memory(DT, [2, BLOCK, R], thin)
    ps = gl.allocate_shared_memory(DT, [BLOCK, BLOCK], square)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK], line)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    asked = gl.allocate_shared_memory(gl.int64, [1], BAR)
    given = gl.allocate_shared_memory(gl.int64, [1], BAR)
    taken = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(2):
        hw.mbarrier.init(full.index(i), count=1)
    hw.mbarrier.init(asked, count=1)
    hw.mbarrier.init(given, count=1)
    hw.mbarrier.init(taken, count=1)
    pid = gl.program_id(0)
    split = (pid // TILES) % SPLITS
    b = pid // (TILES * SPLITS)
    start, stop, length = part_of(len_ptr, b.to(gl.int64), len_step, S, SPLITS, split, NEW)
    w = Work(
        q_desc, qr_desc, c_desc, r_desc, qs, qr, cs, rs, ps, factors, full, asked, given,
        taken, b, (pid % TILES) * BLOCK, split, start, stop, length, B, SPLITS, H, ROWS, C, R, NEW,
    )  # fmt: skip
    hw.barrier()
    hw.warp_specialize(
        [_score_partition, _value_partition], (w, mask_ptr, mask_steps, parts_ptr, scale2), [8],
        [168],
    )  # fmt: skip


def maps(dtype: torch.dtype, B: int, S: int, rows: int, C: int, R: int, steps: tuple) -> tuple:
    """Tensor maps of the queries, their rotary channels, latents and keys; steps: those of B of the
    last two."""
    block, width = BLOCK.value, C + R
    queries = (B, rows, width), (rows * width, width, 1)
    return (
        tile_map(dtype, *queries, 1, block, C),
        tile_map(dtype, *queries, 1, block, R),
        tile_map(dtype, (B, S, C), (steps[0] or S * C, C, 1), 1, block, C),
        tile_map(dtype, (B, S, R), (steps[1] or S * R, R, 1), 1, block, R),
    )
