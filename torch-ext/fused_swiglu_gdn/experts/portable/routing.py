"""Routing: a stable counting sort of the entries by expert, on the device.

An entry is a routed pair: a token and a slot, t K + k. A row is the index of an entry once they are
sorted by expert; entries of one expert keep their order, whatever else is in the batch. There are
no atomics in global memory and the host reads nothing: the sort is deterministic, and its launches
can be captured in a CUDA graph that is replayed with other ids.

Sizes: T tokens, K slots, S = T K entries, E experts. The buffer is one of int32:

    tiles [1], first row of each expert [E + 1], entry of each row [S], place of each entry [S],
    expert of each tile [most], first row of each tile [most], most = S // 16 + E, and to spare

A tile is up to `height` rows of one expert. Places are padded row indices: those of an expert begin
at a multiple of the height, so that a whole tile of them holds no row of another expert. An id
outside [0, E) means that the expert is held by another rank: such an entry has place -1, and the
rows end before S.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...runtime.primitives import after_predecessor
from ..call import routing_size
from .launching import launch

BLOCK = 128  # entries ranked by a program
CHUNK = 1024  # entries counted in one step, at most
ALONE = 2048  # up to so many entries every program counts all of them itself


class Routing(NamedTuple):
    """The routing of a call: its buffer and sizes."""

    buffer: torch.Tensor
    T: int
    K: int
    E: int
    height: int  # rows of a tile

    @property
    def places(self) -> int:
        """Length of an array by places."""
        return self.T * self.K + self.height * (self.E + 1)

    @property
    def tiles(self) -> int:
        """Upper bound of the number of tiles: every expert with tokens wastes less than one
        tile."""
        entries = self.T * self.K
        return min(entries, entries // self.height + min(self.E, entries))


def new_buffer(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """The buffer, uninitialised."""
    return ids.new_empty(routing_size(ids.numel(), experts), dtype=torch.int32)


@triton.jit
def first_rows(routing_ptr):
    """Pointer to [E + 1]: the first row of each expert, and the number of rows."""
    return routing_ptr + 1


@triton.jit
def entry_of_row(routing_ptr, E):
    """Pointer to [S]: the entry of each row."""
    return routing_ptr + E + 2


@triton.jit
def place_of_entry(routing_ptr, S, E):
    """Pointer to [S]: the place of each entry."""
    return routing_ptr + E + 2 + S


@triton.jit
def tile_at(routing_ptr, tile, S, E):
    """(expert, first row, end of the expert's rows) of a tile."""
    list_ptr = routing_ptr + E + 2 + 2 * S
    expert = tl.load(list_ptr + tile)
    row = tl.load(list_ptr + S // 16 + E + tile)
    return expert, row, tl.load(first_rows(routing_ptr) + expert + 1)


@triton.jit
def place_of(routing_ptr, expert, row, height):
    """The padded row index of a row of an expert."""
    first = tl.load(first_rows(routing_ptr) + expert)
    return first_place(first, expert, height) + (row - first)


@triton.jit
def first_place(row, expert, height):
    """The padded row index of an expert's first row; all fit into Routing.places."""
    return row // height * height + height * expert


@triton.jit
def _experts_at(ids_ptr, offs, S, E):
    """The experts of entries; E for those on other ranks and past the last entry."""
    ids = tl.load(ids_ptr + offs, mask=offs < S, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit
def _histogram(ids, E, EXPERTS: tl.constexpr):
    """Counts ids by expert, [EXPERTS]; ids from E on are not counted."""
    return tl.histogram(tl.where(ids < E, ids, 0), EXPERTS, mask=ids < E)


@triton.jit
def _count(ids_ptr, start, stop, E, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Counts the entries from start to stop by expert, [EXPERTS]."""
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(start, stop, CHUNK):
        counts += _histogram(_experts_at(ids_ptr, first + tl.arange(0, CHUNK), stop, E), E, EXPERTS)
    return counts


@triton.jit(do_not_specialize=["S", "E"])
def _count_kernel(
    ids_ptr,  # [S] int32 or int64
    counts_ptr,  # [blocks + 1, EXPERTS] int32
    S, E,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[block, e]: number of entries of a block that go to expert e."""
    after_predecessor(PDL)
    block = tl.program_id(0)
    ids = _experts_at(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), S, E)
    counts = _histogram(ids, E, EXPERTS)
    tl.store(counts_ptr + block.to(tl.int64) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(
    counts_ptr,  # [blocks + 1, EXPERTS] int32
    blocks,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Replaces counts[block, e] by the sum over all earlier blocks; the last row gets the
    totals."""
    after_predecessor(PDL)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        ptrs = counts_ptr + block.to(tl.int64)[:, None] * EXPERTS + e[None, :]
        inside = (block < blocks)[:, None]
        counts = tl.load(ptrs, mask=inside, other=0)  # [BLOCK_B, BLOCK_E]
        tl.store(ptrs, tl.cumsum(counts, 0) - counts + total[None, :], mask=inside)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + blocks.to(tl.int64) * EXPERTS + e, total)


@triton.jit(do_not_specialize=["S", "E", "blocks", "height"])
def _place_kernel(
    ids_ptr,  # [S] int32 or int64
    counts_ptr,  # [blocks + 1, EXPERTS] as _scan_kernel leaves them; None: counted here
    routing_ptr,  # see the top of this file
    S, E, blocks,
    height,  # rows of a tile
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """row = first row of the expert + its entries before this one; a program takes BLOCK entries.

    The entry whose row is the first of a tile writes the tile.
    """
    after_predecessor(PDL)
    block = tl.program_id(0)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    ids = _experts_at(ids_ptr, offs, S, E)  # [BLOCK]
    e_offs = tl.arange(0, EXPERTS)
    if counts_ptr is None:
        before = _count(ids_ptr, 0, block * BLOCK, E, EXPERTS, CHUNK)
        total = before + _count(ids_ptr, block * BLOCK, S, E, EXPERTS, CHUNK)
    else:
        total = tl.load(counts_ptr + blocks.to(tl.int64) * EXPERTS + e_offs)
        before = tl.load(counts_ptr + block.to(tl.int64) * EXPERTS + e_offs)
    start = tl.cumsum(total, 0) - total  # [EXPERTS]
    tiles = (total + height - 1) // height
    tile_start = tl.cumsum(tiles, 0) - tiles
    same = tl.zeros((BLOCK, STEP), tl.int32)
    for first in range(0, BLOCK, STEP):
        other = block * BLOCK + first + tl.arange(0, STEP)
        others = _experts_at(ids_ptr, other, S, E)
        same += ((others[None, :] == ids[:, None]) & (other[None, :] < offs[:, None])).to(tl.int32)
    here = ids < E
    e = tl.where(here, ids, 0)
    rank = tl.sum(same, 1) + tl.gather(before, e, 0)
    first = tl.gather(start, e, 0)
    row = first + rank
    tl.store(entry_of_row(routing_ptr, E) + row, offs, mask=here)
    place = first_place(first, e, height) + rank
    tl.store(place_of_entry(routing_ptr, S, E) + offs, tl.where(here, place, -1), mask=offs < S)
    tile = tl.gather(tile_start, e, 0) + rank // height
    is_first = here & (rank % height == 0)
    list_ptr = routing_ptr + E + 2 + 2 * S
    tl.store(list_ptr + tile, e, mask=is_first)
    tl.store(list_ptr + S // 16 + E + tile, row, mask=is_first)
    if block == 0:
        tl.store(routing_ptr, tl.sum(tiles, 0))
        tl.store(first_rows(routing_ptr) + e_offs, start, mask=e_offs < E)
        tl.store(first_rows(routing_ptr) + E, tl.sum(total, 0))


def route(ids: torch.Tensor, experts: int, height: int, pdl: bool = False) -> Routing:
    """Returns the routing of ids [T, K], which are contiguous, in tiles of `height` rows.

    pdl: launches may begin before those that they follow have ended.
    """
    entries = ids.numel()
    blocks = -(-entries // BLOCK)
    buffer = new_buffer(ids, experts)
    chunk = 256 if entries <= 256 else CHUNK
    width = max(32, 1 << (experts - 1).bit_length())
    counts = None
    if entries > ALONE:
        counts = ids.new_empty((blocks + 1, width), dtype=torch.int32)
        numbers: tuple = (entries, experts)
        sizes: tuple = (width, BLOCK, pdl)
        launch(_count_kernel, blocks, (), (ids, counts), numbers, sizes, 4, pdl=pdl)
        sizes = (width, 8, 512, pdl)
        launch(_scan_kernel, width // 8, (), (counts,), (blocks,), sizes, 8, pdl=pdl)
    numbers, sizes = (entries, experts, blocks, height), (width, BLOCK, chunk, 32, pdl)
    launch(_place_kernel, blocks, (), (ids, counts, buffer), numbers, sizes, 4, pdl=pdl)
    return Routing(buffer, *ids.shape, experts, height)
