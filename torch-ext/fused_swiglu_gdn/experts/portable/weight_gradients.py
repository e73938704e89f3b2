"""Kernels of the gradients of the experts' weights and biases: sums over the rows of an expert.

    dWg[e], dWu[e] = dgate^T x, dup^T x,  dWd[e] = dout^T (w z)

Operands, places and sizes are those of gradients.py.
"""

from typing import Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl

from ...runtime.primitives import grouped_tile
from .gradients import STEP
from .launching import box, launch
from .products import halves, programs
from .routing import Routing, first_place, first_rows


@triton.jit
def _store_half(half, out_desc, out_ptr, expert, row, column, M: tl.constexpr, N: tl.constexpr,
                ADD: tl.constexpr):  # fmt: skip
    """Stores half a tile to out [E, M, N]; ADD: adds it to the values there."""
    if out_desc is not None:
        out_desc.store([expert, row, column], half.to(out_desc.dtype)[None, :, :])
    else:
        offs_m = tl.arange(0, half.shape[0])[:, None]
        offs_n = tl.arange(0, half.shape[1])[None, :]
        ptrs = out_ptr + (expert.to(tl.int64) * M + row) * N + column + (offs_m * N + offs_n)
        mask = (row + offs_m < M) & (column + offs_n < N)
        if ADD:
            half += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(ptrs, half.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["E", "height"])
def _weight_gradient_kernel(
    a_desc,  # [.., M] by places, in blocks [BLOCK_K, BLOCK_M]
    b_desc,  # [.., N] by places, in blocks [BLOCK_K, BLOCK_N]
    out_desc,  # [E, M, N] in blocks [1, BLOCK_M, BLOCK_N / 2], or None
    out_ptr, routing_ptr, E, height,
    M: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """out[e] = a^T b over the rows of expert e, in their order; ADD: added to the values there.

    Programs stride over tiles [BLOCK_M, BLOCK_N] of experts; zeros for an expert without rows.
    """
    tiles_m: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    each: tl.constexpr = tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), E * each, tl.num_programs(0), flatten=FLAT):
        expert = tile // each
        m, n = grouped_tile(tile % each, tiles_m, tiles_n, GROUP)
        first = tl.load(first_rows(routing_ptr) + expert)
        rows = tl.load(first_rows(routing_ptr) + expert + 1) - first
        place = first_place(first, expert, height)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(0, rows, BLOCK_K):
            a = a_desc.load([place + row, m * BLOCK_M])  # [BLOCK_K, BLOCK_M]
            b = b_desc.load([place + row, n * BLOCK_N])  # [BLOCK_K, BLOCK_N]
            acc = tl.dot(a.T, b, acc)
        left, right = halves(acc)
        column = n * BLOCK_N
        _store_half(left, out_desc, out_ptr, expert, m * BLOCK_M, column, M, N, ADD)
        column += BLOCK_N // 2
        _store_half(right, out_desc, out_ptr, expert, m * BLOCK_M, column, M, N, ADD)


def weight_gradient(
    a: torch.Tensor,  # [.., M] by places
    b: torch.Tensor,  # [.., N] by places
    routing: Routing,
    main_grad: Optional[torch.Tensor],  # [E, M, N] fp32: added to, in place of a new tensor
    config: dict,
) -> Optional[torch.Tensor]:  # [E, M, N]
    (buffer, _, _, E, height), M, N = routing, a.shape[1], b.shape[1]
    out = a.new_empty((E, M, N)) if main_grad is None else main_grad
    BM, BN = config["BLOCK_M"], config["BLOCK_N"]
    BK = min(config["BLOCK_K"], height, STEP.value)  # so far there are zeros
    stores = main_grad is None and config["STORE"]
    boxes = (box(a, BK, BM), box(b, BK, BN), box(out, 1, BM, BN // 2) if stores else None)
    tile = (BM, BN, BK, config["GROUP"], config["FLAT"])
    tiles = E * -(-M // BM) * -(-N // BN)
    launch(
        _weight_gradient_kernel, programs(tiles, config, a.device), boxes, (out, buffer),
        (E, height), (M, N, main_grad is not None, *tile), config["num_warps"],
        config["num_stages"],
    )  # fmt: skip
    return out if main_grad is None else None


def bias_gradients(
    dout: torch.Tensor,  # [T, H]
    d_gate_up: torch.Tensor,  # [.., 2 I] by places
    ids: torch.Tensor,  # [T, K]
    weights: torch.Tensor,  # [T, K]
    b_down: Optional[torch.Tensor],  # [E, H]
    needs: Sequence[bool],  # of the routing weights and the biases
    routing: Routing,
    config: dict,
) -> Tuple[Optional[torch.Tensor], ...]:
    """(term of the bias of Wd in dweights, fp32 [T, K]; db_gate_up; db_down).

    They are small products of torch, except for the sum of d_gate_up over an expert's rows: that is
    a weight gradient with ones as the other operand, read only as far as d_gate_up is written.
    """
    more = db_gate_up = db_down = None
    if needs[1]:
        ones = d_gate_up.new_ones((routing.places, 8))
        db_gate_up = weight_gradient(d_gate_up, ones, routing, None, config)[..., 0].contiguous()
    if b_down is None:
        return more, db_gate_up, db_down
    experts = torch.arange(routing.E, device=ids.device)
    here = [index.unsqueeze(1) == experts for index in ids.unbind(1)]  # K of [T, E]
    wide = dout.float()
    if needs[0]:
        by_expert = wide @ b_down.float().t()  # [T, E]
        more = torch.stack([torch.where(at, by_expert, 0.0).sum(1) for at in here], 1)
    if needs[2]:
        slots = zip(here, weights.float().unbind(1))
        by_expert = sum(torch.where(at, weight.unsqueeze(1), 0.0) for at, weight in slots)
        db_down = (by_expert.t() @ wide).to(dout.dtype)  # [E, H]
    return more, db_gate_up, db_down
