"""Grouped products in e4m3 with block scales: rows of x or z with the weights of the row's expert.

A step is 128 columns, over which all scales are constant: its product is made in fp32 by wgmmas and
added once it is scaled, k ascending: acc = fma(part, s_x s_w, acc). The products are w x^T, weights
as the rows of wgmma, tokens as its columns, and a row has the same bits in any tile.

Sizes: T tokens, P of them with padding, K slots, S = T K entries, E experts, H model width, I
hidden width of an expert. Rows, places and tiles are ../portable/routing.py's; without routing an
entry is a tile, and its own place. Places that no program wrote hold anything: rows of a
tile never meet.
"""

import triton
import triton.language as tl

from ...fp8.call import BLOCK
from ...fp8.portable.quantise import codes_of, scale_of
from ...runtime.primitives import activate, after_predecessor, grouped_tile
from ..portable.routing import entry_of_row, place_of, tile_at

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _tile(tile, ids_ptr, routing_ptr, S, E, HEIGHT: tl.constexpr):
    """(expert, first row, the row behind the expert's last, place) of a tile; without routing, of
    the entry, no row of one whose expert is held elsewhere."""
    if routing_ptr is None:
        expert = tl.load(ids_ptr + tile)
        here = (expert >= 0) & (expert < E)
        return tl.where(here, expert, 0).to(tl.int32), tile, tile + here.to(tl.int32), tile
    else:
        expert, row, end = tile_at(routing_ptr, tile, S, E)
        return expert, row, end, place_of(routing_ptr, expert, row, HEIGHT)


@triton.jit
def _added(acc, x, w, scale):
    """acc + w x^T scale, [128, HEIGHT]; x [HEIGHT, 128], w [1, 128, 128], scale [HEIGHT]."""
    return acc + tl.dot(w.reshape(_BLOCK, _BLOCK), x.T) * scale[None, :]


@triton.jit
def _rounded(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _store(tile, ptr, place, count, column, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Sums [128, HEIGHT] into [.., WIDTH] by places: `count` rows of them, 128 columns."""
    offs_m, offs_n = tl.arange(0, HEIGHT), column + tl.arange(0, _BLOCK)
    ptrs = ptr + place.to(tl.int64) * WIDTH + offs_m[None, :] * WIDTH + offs_n[:, None]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=(offs_m < count)[None, :])


@triton.jit(do_not_specialize=["S", "E", "P", "places"])
def up_kernel(
    w_desc,  # [2 E, I, H] e4m3 in blocks [1, 128, 128]: gate and up of an expert, and so on
    x_ptr,  # [P, H] e4m3
    x_scale_ptr,  # [H / 128, P]
    w_scale_ptr,  # [E, 2 I / 128, H / 128]
    ids_ptr,  # [S], without routing
    routing_ptr,
    z_ptr,  # [.., I] e4m3 by places
    z_scale_ptr,  # [I / 128, PLACES]
    S, E, P, places,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, HEIGHT: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z = silu(x Wg^T) * (x Wu^T) of a tile [HEIGHT, 128], rounded to bf16 as often as torch's
    operations are, quantised."""
    after_predecessor(PDL)
    steps: tl.constexpr = H // _BLOCK
    tiles_n: tl.constexpr = I // _BLOCK
    tiles_m = S if routing_ptr is None else tl.load(routing_ptr)
    m, n = grouped_tile(tl.program_id(0), tiles_m, tiles_n, GROUP)
    if tl.program_id(0) >= tiles_m * tiles_n:
        return
    expert, row, end, place = _tile(m, ids_ptr, routing_ptr, S, E, HEIGHT)
    if row >= end:
        return
    offs_m = tl.arange(0, HEIGHT)
    inside = row + offs_m < end
    entry = row + offs_m
    if routing_ptr is not None:
        entry = tl.load(entry_of_row(routing_ptr, E) + entry, mask=inside, other=0)
    token = entry // TOP_K
    rows = x_ptr + token.to(tl.int64)[:, None] * H + tl.arange(0, _BLOCK)[None, :]
    gate_scales = w_scale_ptr + (expert * (2 * tiles_n) + n).to(tl.int64) * steps
    up_scales = gate_scales + tiles_n * steps
    gate = tl.zeros((_BLOCK, HEIGHT), tl.float32)
    up = tl.zeros((_BLOCK, HEIGHT), tl.float32)
    x_scale = tl.load(x_scale_ptr + token, mask=inside, other=0.0)
    gate_scale, up_scale = tl.load(gate_scales), tl.load(up_scales)
    for k in range(0, steps):
        ahead = tl.minimum(k + 1, steps - 1)
        more = tl.load(x_scale_ptr + ahead * P + token, mask=inside, other=0.0)
        more_gate, more_up = tl.load(gate_scales + ahead), tl.load(up_scales + ahead)
        x = tl.load(rows + k * _BLOCK, mask=inside[:, None], other=0.0)
        w = w_desc.load([2 * expert, n * _BLOCK, k * _BLOCK])
        gate = _added(gate, x, w, x_scale * gate_scale)
        w = w_desc.load([2 * expert + 1, n * _BLOCK, k * _BLOCK])
        up = _added(up, x, w, x_scale * up_scale)
        x_scale, gate_scale, up_scale = more, more_gate, more_up
    z = _rounded(_rounded(activate(_rounded(gate), "silu")) * _rounded(up))
    scale = scale_of(z, 0)  # [HEIGHT]
    _store(codes_of(z, scale, 0), z_ptr, place, end - row, n * _BLOCK, I, HEIGHT)
    at = n.to(tl.int64) * places + place + offs_m
    tl.store(z_scale_ptr + at, scale, mask=inside)


@triton.jit(do_not_specialize=["S", "E", "places"])
def down_kernel(
    z_desc,  # [.., I] e4m3 by places, in blocks [HEIGHT, 128]
    w_desc,  # [E, H, I] e4m3 in blocks [1, 128, 128]
    z_scale_ptr,  # [I / 128, places]
    w_scale_ptr,  # [E, H / 128, I / 128]
    ids_ptr,  # [S], without routing
    routing_ptr,
    y_ptr,  # [.., H] bf16 by places
    S, E, places,
    H: tl.constexpr, I: tl.constexpr, HEIGHT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = z Wd^T of a tile [HEIGHT, 128]."""
    after_predecessor(PDL)
    steps: tl.constexpr = I // _BLOCK
    tiles_n: tl.constexpr = H // _BLOCK
    tiles_m = S if routing_ptr is None else tl.load(routing_ptr)
    m, n = grouped_tile(tl.program_id(0), tiles_m, tiles_n, GROUP)
    if tl.program_id(0) >= tiles_m * tiles_n:
        return
    expert, row, end, place = _tile(m, ids_ptr, routing_ptr, S, E, HEIGHT)
    if row >= end:
        return
    offs_m = tl.arange(0, HEIGHT)
    inside = row + offs_m < end
    w_scales = w_scale_ptr + (expert * tiles_n + n).to(tl.int64) * steps
    z_scales = z_scale_ptr + place + offs_m
    y = tl.zeros((_BLOCK, HEIGHT), tl.float32)
    z_scale, w_scale = tl.load(z_scales, mask=inside, other=0.0), tl.load(w_scales)
    for k in range(0, steps):
        ahead = tl.minimum(k + 1, steps - 1)
        more = tl.load(z_scales + ahead.to(tl.int64) * places, mask=inside, other=0.0)
        more_w = tl.load(w_scales + ahead)
        z = z_desc.load([place, k * _BLOCK])
        w = w_desc.load([expert, n * _BLOCK, k * _BLOCK])
        y = _added(y, z, w, z_scale * w_scale)
        z_scale, w_scale = more, more_w
    _store(y, y_ptr, place, end - row, n * _BLOCK, H, HEIGHT)
