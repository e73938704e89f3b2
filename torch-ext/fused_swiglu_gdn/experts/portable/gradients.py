"""Kernels of the experts' gradients.

    dz[row] = w dout[token] Wd[e],  dgate = dz * up * act'(gate),  dup = dz * act(gate)
    dw[row] = <dout[token] Wd[e], z[row]>,  which is <dout[token], y[row]>: no y is kept
    dWg[e], dWu[e] = dgate^T x, dup^T x,  dWd[e] = dout^T (w z),  summed over the expert's rows

Operands of the sums are stored by places (routing.py), with zeros after an expert's last row up to
the next whole step, so that a step reads no row of another expert: 0 * inf is NaN.

Sizes: T tokens, K slots, S = T K entries, E experts, H model width, I hidden width of an expert.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime.primitives import grouped_tile
from .gate import gated_with_gradient
from .launching import box, launch
from .products import gathered, halves, programs
from .routing import (
    Routing,
    entry_of_row,
    first_place,
    first_rows,
    place_of,
    place_of_entry,
    tile_at,
)

STEP = tl.constexpr(64)  # rows of a step of the sums, at most


@triton.jit
def _written(row, end, height):
    """End of the rows that are written from `row` on: with the zeros up to a whole step."""
    size = tl.minimum(height, STEP)
    return row + (end - row + size - 1) // size * size


@triton.jit(do_not_specialize=["S", "E", "height"])
def _spread_kernel(
    x_ptr,  # [T, WIDTH]
    out_ptr,  # [.., WIDTH] by places
    routing_ptr, S, E, height,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a token's row of x to its TOP_K places; the last E programs write an expert's
    zeros."""
    columns: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    tokens = S // TOP_K
    number = tl.program_id(0) // columns
    offs = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)
    if number < tokens:
        token = number.to(tl.int64)
        x = tl.load(x_ptr + token * WIDTH + offs, mask=offs < WIDTH, other=0.0)
        for k in tl.static_range(TOP_K):
            place = tl.load(place_of_entry(routing_ptr, S, E) + token * TOP_K + k).to(tl.int64)
            tl.store(out_ptr + place * WIDTH + offs, x, mask=(offs < WIDTH) & (place >= 0))
    else:
        expert = number - tokens
        row = tl.load(first_rows(routing_ptr) + expert)
        end = tl.load(first_rows(routing_ptr) + expert + 1)
        last = (first_place(row, expert, height) + (end - row)).to(tl.int64)
        zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
        for more in range(_written(row, end, height) - end):
            tl.store(out_ptr + (last + more) * WIDTH + offs, zeros, mask=offs < WIDTH)


def spread(
    x: torch.Tensor,  # [T, WIDTH]
    routing: Routing,
) -> torch.Tensor:  # [.., WIDTH] by places
    (buffer, T, K, E, height), width = routing, x.shape[1]
    out = x.new_empty((routing.places, width))
    block = min(1 << (width - 1).bit_length(), 2048)
    launch(
        _spread_kernel, (T + E) * -(-width // block), (), (x, out, buffer),
        (T * K, E, height), (width, K, block), max(1, block // 256),
    )  # fmt: skip
    return out


@triton.jit
def _piece(x, NUMBER: tl.constexpr, PIECES: tl.constexpr):
    """Piece NUMBER of PIECES equal pieces of the columns of x; no data moves. PIECES is a power of
    two."""
    if PIECES == 1:
        return x
    else:
        left, right = halves(x)
        if NUMBER < PIECES // 2:
            return _piece(left, NUMBER, PIECES // 2)
        else:
            return _piece(right, NUMBER - PIECES // 2, PIECES // 2)


@triton.jit
def _gate_columns(
    dz,  # [BLOCK_M, BLOCK] fp32: dout Wd, not yet weighted
    gate_up_ptr, d_gate_up_ptr, wz_ptr, weight, row, end, place, stop, column, I: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Stores dgate, dup and w z of some columns, and returns <dz, z> of each row.

    INTERLEAVED: columns of dgate and dup alternate.
    """
    BLOCK_M: tl.constexpr = dz.shape[0]
    BLOCK: tl.constexpr = dz.shape[1]
    offs_m, offs_n = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK)[None, :]
    offs = column + (offs_m * 2 * I + offs_n)
    ptrs = gate_up_ptr + row.to(tl.int64) * 2 * I + offs
    mask = (row + offs_m < end) & (column + offs_n < I)
    gate = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK]
    up = tl.load(ptrs + I, mask=mask, other=0.0).to(tl.float32)
    z, by_gate, by_up = gated_with_gradient(gate, up, ACTIVATION, LIMIT)
    part = tl.sum(dz * z, 1)
    mask = (row + offs_m < stop) & (column + offs_n < I)
    if wz_ptr is not None:
        wz = (weight[:, None] * z).to(wz_ptr.dtype.element_ty)
        ptrs = wz_ptr + place.to(tl.int64) * I + column + (offs_m * I + offs_n)
        tl.store(ptrs, wz, mask=mask)
    dz *= weight[:, None]
    if INTERLEAVED:
        both = tl.reshape(tl.join(dz * by_gate, dz * by_up), (BLOCK_M, 2 * BLOCK))
        offs_2n = 2 * column + tl.arange(0, 2 * BLOCK)[None, :]
        ptrs = d_gate_up_ptr + place.to(tl.int64) * 2 * I + (offs_m * 2 * I + offs_2n)
        mask = (row + offs_m < stop) & (offs_2n < 2 * I)
        tl.store(ptrs, both.to(d_gate_up_ptr.dtype.element_ty), mask=mask)
    else:
        ptrs = d_gate_up_ptr + place.to(tl.int64) * 2 * I + offs
        tl.store(ptrs, (dz * by_gate).to(d_gate_up_ptr.dtype.element_ty), mask=mask)
        tl.store(ptrs + I, (dz * by_up).to(d_gate_up_ptr.dtype.element_ty), mask=mask)
    return part


@triton.jit
def _gate_tile(
    w_desc, dout_ptr, gate_up_ptr, d_gate_up_ptr, weights_ptr, wz_ptr, parts_ptr, entry_ptr,
    expert, row, end, place, stop, n, H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, BLOCK_M)
    inside = rows < end
    entry = tl.load(entry_ptr + rows, mask=inside, other=0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, H, BLOCK_K):
        dout = gathered(dout_ptr, entry // TOP_K, inside, k, H, BLOCK_K)
        if ROWS:
            w = w_desc.load([expert, k, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
        else:
            w = w_desc.load([expert, n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
        acc = tl.dot(dout, w, acc)
    weight = tl.load(weights_ptr + entry, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK_M,), tl.float32)
    COLUMNS: tl.constexpr = 16 if ACTIVATION == "swigluoai" else 32  # at a time: registers
    PIECES: tl.constexpr = BLOCK_N // COLUMNS
    for piece in tl.static_range(PIECES):
        part += _gate_columns(
            _piece(acc, piece, PIECES), gate_up_ptr, d_gate_up_ptr, wz_ptr, weight, row,
            end, place, stop, n * BLOCK_N + piece * COLUMNS, I, ACTIVATION, LIMIT, INTERLEAVED,
        )  # fmt: skip
    if parts_ptr is not None:
        PARTS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
        ptrs = parts_ptr + (place + tl.arange(0, BLOCK_M)).to(tl.int64) * PARTS + n
        tl.store(ptrs, part, mask=inside)


@triton.jit(do_not_specialize=["S", "E"])
def _gate_gradient_kernel(
    w_desc,  # [E, H, I] in blocks [1, BLOCK_K, BLOCK_N]; not ROWS: [E, I, H], the block as well
    dout_ptr,  # [T, H]
    gate_up_ptr,  # [S, 2 I] by rows
    d_gate_up_ptr,  # [.., 2 I] by places
    weights_ptr,  # [S] by entries
    wz_ptr,  # [.., I] by places: w z; or None
    parts_ptr,  # [.., PARTS] fp32 by places: <dout Wd, z> of each tile's columns; or None
    routing_ptr, S, E,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
    TAILS: tl.constexpr,
):  # fmt: skip
    """Stores dgate and dup, w z, and the parts of dw; tiles [BLOCK_M, BLOCK_N].

    INTERLEAVED: columns of dgate and dup alternate. TAILS: tiles with few rows are computed at half
    the height.
    """
    tiles_m = tl.load(routing_ptr)
    PARTS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    entry_ptr = entry_of_row(routing_ptr, E)
    for tile in tl.range(tl.program_id(0), tiles_m * PARTS, tl.num_programs(0), flatten=FLAT):
        m, n = grouped_tile(tile, tiles_m, PARTS, GROUP)
        expert, row, end = tile_at(routing_ptr, m, S, E)
        place, stop = place_of(routing_ptr, expert, row, BLOCK_M), _written(row, end, BLOCK_M)
        if TAILS and row + BLOCK_M // 2 >= end:
            _gate_tile(
                w_desc, dout_ptr, gate_up_ptr, d_gate_up_ptr, weights_ptr, wz_ptr, parts_ptr,
                entry_ptr, expert, row, end, place, stop, n, H, I, TOP_K, ACTIVATION, LIMIT,
                ROWS, INTERLEAVED, BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _gate_tile(
                w_desc, dout_ptr, gate_up_ptr, d_gate_up_ptr, weights_ptr, wz_ptr, parts_ptr,
                entry_ptr, expert, row, end, place, stop, n, H, I, TOP_K, ACTIVATION, LIMIT,
                ROWS, INTERLEAVED, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


def gate_gradient(
    dout: torch.Tensor,  # [T, H]
    w_down: torch.Tensor,  # [E, H, I]; it or its .mT is contiguous
    gate_up: torch.Tensor,  # [S, 2 I]
    weights: torch.Tensor,  # [T, K]
    routing: Routing,
    d_gate_up: torch.Tensor,  # [.., 2 I] by places, filled
    wz: Optional[torch.Tensor],  # [.., I] by places, filled
    needs_weights: bool, activation: str, limit: Optional[float], interleaved: bool, config: dict,
) -> Optional[torch.Tensor]:  # [.., PARTS] fp32 by places  # fmt: skip
    """Fills d_gate_up and w z; returns the parts of dw if they are needed."""
    (buffer, T, K, E, height), (_, H, I) = routing, w_down.shape
    BN, BK = config["BLOCK_N"], config["BLOCK_K"]
    count = -(-I // BN)
    shape = (routing.places, count)
    parts = gate_up.new_empty(shape, dtype=torch.float32) if needs_weights else None
    tails = config["TAILS"] and height >= 2 * STEP.value  # half a tile writes a whole step
    pointers = (dout, gate_up, d_gate_up, weights, wz, parts, buffer)
    tiles = routing.tiles * count
    rows = w_down.is_contiguous()
    w_box = box(w_down, 1, BK, BN) if rows else box(w_down.mT, 1, BN, BK)
    tile = (rows, interleaved, height, BN, BK, config["GROUP"], config["FLAT"], tails)
    launch(
        _gate_gradient_kernel, programs(tiles, config, dout.device), (w_box,), pointers,
        (T * K, E), (H, I, K, activation, limit, *tile), config["num_warps"],
        config["num_stages"],
    )  # fmt: skip
    return parts
