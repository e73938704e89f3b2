"""From rows back to tokens: the weighted sum over the slots, and the gradient of the weights.

Sizes: T tokens, K slots, S = T K entries, E experts, H model width.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from .launching import launch
from .routing import row_of_entry


@triton.jit(do_not_specialize=["S", "E"])
def _combine_kernel(
    y_ptr,  # [S, H] by rows
    weights_ptr,  # [S], or None: ones
    out_ptr,  # [T, H]
    routing_ptr,
    S,
    E,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = sum_k w[t, k] y[row of (t, k)] for BLOCK columns: k in order, fp32, rounded once."""
    columns: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // columns).to(tl.int64)
    offs = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = row_of_entry(routing_ptr, S, E) + token * TOP_K
    out = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_ptr + k).to(tl.int64)
        # rows that nobody wrote are not read, and may hold NaN
        y = tl.load(y_ptr + row * H + offs, mask=(offs < H) & (row >= 0), other=0.0)
        if weights_ptr is None:
            out += y.to(tl.float32)
        else:
            weight = tl.load(weights_ptr + token * TOP_K + k).to(tl.float32)
            out += tl.where(row >= 0, weight, 0.0) * y.to(tl.float32)
    tl.store(out_ptr + token * H + offs, out.to(out_ptr.dtype.element_ty), mask=offs < H)


def combine(
    y: torch.Tensor,  # [S, H] by rows
    weights: Optional[torch.Tensor],  # [T, K]
    routing: torch.Tensor,
    experts: int,
    top_k: int,
) -> torch.Tensor:  # [T, H]
    S, H = y.shape
    T = S // top_k
    out = y.new_empty((T, H))  # [T, H]
    # few tokens are divided among more programs
    block = min(triton.next_power_of_2(H), 2048 if T >= 128 else 512)
    launch(
        _combine_kernel, T * triton.cdiv(H, block), (), (y, weights, out, routing), (S, experts),
        (H, top_k, block), max(1, block // 256),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["S", "E"])
def _weights_gradient_kernel(
    parts_ptr,  # [S, PARTS] fp32 by rows
    out_ptr,  # [S] by entries
    routing_ptr,
    S,
    E,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dw[entry] = sum of its row's parts, in their order; 0 where the expert is held elsewhere."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of_entry(routing_ptr, S, E) + entry, mask=entry < S, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts_ptr + row * PARTS + part, mask=row >= 0, other=0.0)
    tl.store(out_ptr + entry, total.to(out_ptr.dtype.element_ty), mask=entry < S)


def weights_gradient(
    parts: torch.Tensor,  # [S, PARTS] fp32 by rows
    like: torch.Tensor,  # [T, K]
    routing: torch.Tensor,
    experts: int,
) -> torch.Tensor:  # [T, K]
    S, count = parts.shape
    out = torch.empty_like(like)
    launch(
        _weights_gradient_kernel, triton.cdiv(S, 256), (), (parts, out, routing), (S, experts),
        (count, 256), 4,
    )  # fmt: skip
    return out
