"""Grouped products: each row of x, z or a gradient times the weights of the row's expert.

Sizes: T tokens, K slots, S = T K entries, E experts, H model width, I hidden width of an expert.
Rows, places and tiles are those of routing.py. Descriptors have the experts as a dimension of their
own, so that reads outside a weight give zero and never its neighbour. A tile may have fewer rows
than its height: the results of the others are stored at places that are never read, or not at all.
Addresses of a tile have 64 bits, offsets inside it 32.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.primitives import grouped_tile
from .gate import gated
from .launching import box, launch
from .routing import Routing, entry_of_row, place_of, tile_at


@triton.jit
def gathered(x_ptr, token, inside, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """x[token, first : first + BLOCK] of x [T, WIDTH]; zeros for rows that are not inside."""
    k = first + tl.arange(0, BLOCK)
    ptrs = x_ptr + token.to(tl.int64)[:, None] * WIDTH + k[None, :]
    if WIDTH % BLOCK == 0:
        return tl.load(ptrs, mask=inside[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=inside[:, None] & (k < WIDTH)[None, :], other=0.0)


@triton.jit
def halves(x):
    """The left and the right half of the columns; a thread holds some of both, so no data moves."""
    rows: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, half)), (0, 2, 1)))


@triton.jit
def _store_rows(tile, y_ptr, row, end, column, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """Stores the tile to y [.., WIDTH] at (row, column): rows before end, columns before STOP."""
    offs_m, offs_n = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
    ptrs = y_ptr + row.to(tl.int64) * WIDTH + column + (offs_m * WIDTH + offs_n)
    mask = (row + offs_m < end) & (column + offs_n < STOP)
    tl.store(ptrs, tile.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store(tile, y_desc, y_ptr, place, stop, column, WIDTH: tl.constexpr):
    """Stores the tile to y [.., WIDTH] by places; through y_desc, if given, asynchronously."""
    if y_desc is None:
        _store_rows(tile, y_ptr, place, stop, column, WIDTH, WIDTH)
    else:
        y_desc.store([place, column], tile.to(y_desc.dtype))


@triton.jit
def _up_tile(
    x_ptr, w_desc, b_ptr, z_ptr, gate_up_ptr, entry_ptr, expert, row, end, place, column,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes gate and up of BLOCK_M rows, and z from them.

    If the weights of gate and up are in one block, this is one product of width 2 BLOCK_N.
    """
    rows = row + tl.arange(0, BLOCK_M)
    inside = rows < end
    token = tl.load(entry_ptr + rows, mask=inside, other=0) // TOP_K
    if LAYOUT == "columns":
        # one after the other: two products in a step wait for each other
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, H, BLOCK_K):
            x = gathered(x_ptr, token, inside, k, H, BLOCK_K)  # [BLOCK_M, BLOCK_K]
            w = w_desc.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
            gate = tl.dot(x, w, gate)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, H, BLOCK_K):
            x = gathered(x_ptr, token, inside, k, H, BLOCK_K)
            w = w_desc.load([expert, k, I + column]).reshape(BLOCK_K, BLOCK_N)
            up = tl.dot(x, w, up)
    else:
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in range(0, H, BLOCK_K):
            x = gathered(x_ptr, token, inside, k, H, BLOCK_K)
            if LAYOUT == "interleaved":
                w = w_desc.load([expert, k, 2 * column]).reshape(BLOCK_K, 2 * BLOCK_N)
            else:
                w = w_desc.load([2 * expert, column, k]).reshape(2 * BLOCK_N, BLOCK_K).T
            acc = tl.dot(x, w, acc)
        if LAYOUT == "interleaved":
            gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        else:
            gate, up = halves(acc)
    if b_ptr is not None:
        n = column + tl.arange(0, BLOCK_N)
        biases = b_ptr + expert.to(tl.int64) * (2 * I)
        step: tl.constexpr = 2 if LAYOUT == "interleaved" else 1  # from gate to gate
        beside: tl.constexpr = 1 if LAYOUT == "interleaved" else I  # from gate to up
        gate += tl.load(biases + step * n, mask=n < I, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + step * n + beside, mask=n < I, other=0.0).to(tl.float32)[None, :]
    if gate_up_ptr is not None:
        _store_rows(gate, gate_up_ptr, row, end, column, 2 * I, I)
        _store_rows(up, gate_up_ptr, row, end, column + I, 2 * I, 2 * I)
    if z_ptr is not None:
        z = gated(gate, up, ACTIVATION, LIMIT)
        _store_rows(z, z_ptr, place, place + (end - row), column, I, I)


@triton.jit(do_not_specialize=["S", "E"])
def _up_kernel(
    w_desc,  # as LAYOUT says
    x_ptr,  # [T, H]
    b_ptr,  # [E, 2 I], as the weights lie; or None
    z_ptr,  # [.., I] by places, or None
    gate_up_ptr,  # [S, 2 I] by rows: gate beside up; or None
    routing_ptr, S, E,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr, LAYOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr, TAILS: tl.constexpr,
):  # fmt: skip
    """z = act(x Wg^T) * (x Wu^T); programs stride over tiles [BLOCK_M, BLOCK_N].

    TAILS: tiles with few rows are computed at half the height. LAYOUT of the weights: "rows", [2 E,
    I, H] in blocks [2, BLOCK_N, BLOCK_K]; "columns", [E, H, 2 I], gate beside up, in blocks [1,
    BLOCK_K, BLOCK_N]; "interleaved", [E, H, 2 I], columns alternating between gate and up, in
    blocks [1, BLOCK_K, 2 BLOCK_N].
    """
    tiles_m = tl.load(routing_ptr)
    tiles_n: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    entry_ptr = entry_of_row(routing_ptr, E)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLAT):
        m, n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        expert, row, end = tile_at(routing_ptr, m, S, E)
        place = place_of(routing_ptr, expert, row, BLOCK_M)
        if TAILS and row + BLOCK_M // 2 >= end:
            _up_tile(
                x_ptr, w_desc, b_ptr, z_ptr, gate_up_ptr, entry_ptr, expert, row, end, place,
                n * BLOCK_N, H, I, TOP_K, ACTIVATION, LIMIT, LAYOUT, BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _up_tile(
                x_ptr, w_desc, b_ptr, z_ptr, gate_up_ptr, entry_ptr, expert, row, end, place,
                n * BLOCK_N, H, I, TOP_K, ACTIVATION, LIMIT, LAYOUT, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _rows_tile(
    a_desc, w_desc, y_desc, y_ptr, expert, place, stop, column, N: tl.constexpr,
    WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        a = a_desc.load([place, k])  # [BLOCK_M, BLOCK_K]
        if TRANSPOSED:
            w = w_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            w = w_desc.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(a, w, acc)
    left, right = halves(acc)  # half the memory on the way to y
    _store(left, y_desc, y_ptr, place, stop, column, N)
    _store(right, y_desc, y_ptr, place, stop, column + BLOCK_N // 2, N)


@triton.jit(do_not_specialize=["S", "E"])
def _rows_kernel(
    a_desc,  # [.., WIDTH] by places, in blocks [BLOCK_M, BLOCK_K]
    tail_desc,  # the same in blocks of half the height, or None
    w_desc,  # [E, N, WIDTH] in blocks [1, BLOCK_N, BLOCK_K]; not TRANSPOSED: [E, WIDTH, N]
    y_desc,  # [.., N] by places, in blocks [BLOCK_M, BLOCK_N / 2]; or None
    y_ptr, routing_ptr, S, E,
    N: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
    TAILS: tl.constexpr,
):  # fmt: skip
    """y = a W[e]^T, or a W[e], of each place; programs stride over tiles [BLOCK_M, BLOCK_N].

    TAILS: tiles with few rows are computed at half the height.
    """
    tiles_m = tl.load(routing_ptr)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLAT):
        m, n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        expert, row, end = tile_at(routing_ptr, m, S, E)
        place = place_of(routing_ptr, expert, row, BLOCK_M)
        stop = place + (end - row)
        if TAILS and row + BLOCK_M // 2 >= end:
            _rows_tile(
                tail_desc, w_desc, None, y_ptr, expert, place, stop, n * BLOCK_N, N, WIDTH,
                TRANSPOSED, BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _rows_tile(
                a_desc, w_desc, y_desc, y_ptr, expert, place, stop, n * BLOCK_N, N, WIDTH,
                TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


def programs(tiles: int, config: dict, where: torch.device) -> int:
    """Number of programs: one a tile, or as many as run at once if the loop over tiles is
    flattened."""
    if not config["FLAT"] or where.type != "cuda":
        return tiles
    return min(tiles, device.multiprocessor_count(where.index) * config["per_processor"])


def up(
    x: torch.Tensor,  # [T, H]
    w_gate_up: torch.Tensor,  # [E, 2 I, H]
    bias: Optional[torch.Tensor],  # [E, 2 I]
    interleaved: bool, routing: Routing,
    z: Optional[torch.Tensor],  # [.., I] by places, filled
    gate_up: Optional[torch.Tensor],  # [S, 2 I], filled
    activation: str, limit: Optional[float], config: dict,
) -> None:  # fmt: skip
    (buffer, T, K, E, height), H, I = routing, x.shape[1], w_gate_up.shape[1] // 2
    BN, BK = config["BLOCK_N"], config["BLOCK_K"]
    tiles = routing.tiles * -(-I // BN)
    if w_gate_up.is_contiguous():
        layout, weights = "rows", box(w_gate_up, 2, BN, BK, shape=(2 * E, I, H))
    elif interleaved:
        layout, weights = "interleaved", box(w_gate_up.mT, 1, BK, 2 * BN)
    else:
        layout, weights = "columns", box(w_gate_up.mT, 1, BK, BN)
    tile = (layout, height, BN, BK, config["GROUP"], config["FLAT"], config["TAILS"])
    launch(
        _up_kernel, programs(tiles, config, x.device), (weights,), (x, bias, z, gate_up, buffer),
        (T * K, E), (H, I, K, activation, limit, *tile), config["num_warps"],
        config["num_stages"],
    )  # fmt: skip


def rows_product(
    a: torch.Tensor,  # [.., WIDTH] by places
    weight: torch.Tensor,  # [E, N, WIDTH]; it or its .mT is contiguous
    routing: Routing,
    config: dict,
) -> torch.Tensor:  # [.., N] by places
    """a W[e]^T for the expert e of each row."""
    (buffer, T, K, E, height), (_, N, width) = routing, weight.shape
    transposed = weight.is_contiguous()
    y = a.new_empty((routing.places, N))
    BN, BK = config["BLOCK_N"], config["BLOCK_K"]
    w_box = box(weight, 1, BN, BK) if transposed else box(weight.mT, 1, BK, BN)
    y_box = box(y, height, BN // 2) if config["STORE"] else None
    tail_box = box(a, height // 2, BK) if config["TAILS"] else None
    boxes = (box(a, height, BK), tail_box, w_box, y_box)
    tiles = routing.tiles * -(-N // BN)
    tile = (height, BN, BK, config["GROUP"], config["FLAT"], config["TAILS"])
    launch(
        _rows_kernel, programs(tiles, config, a.device), boxes, (y, buffer), (T * K, E),
        (N, width, transposed, *tile), config["num_warps"], config["num_stages"],
    )  # fmt: skip
    return y
