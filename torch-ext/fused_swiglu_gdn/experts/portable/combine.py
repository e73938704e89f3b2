"""From places back to tokens: the weighted sum over the slots, and the weights' gradient.

Sizes: T tokens, K slots, S = T K entries, E experts, H model width.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime.primitives import after_predecessor
from .launching import launch
from .routing import Routing, place_of_entry


@triton.jit(do_not_specialize=["S", "E"])
def _combine_kernel(
    y_ptr,  # [.., H] by places
    weights_ptr,  # [S], or None: ones
    ids_ptr,  # [S], if there is a bias, or no routing
    b_ptr,  # [E, H], or None
    routing_ptr,  # None: an entry is its own place
    out_ptr,  # [T, H]
    S, E,
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum_k w[t, k] (y[its place] + b[its expert]) for BLOCK columns: k in order, fp32,
    rounded once."""
    after_predecessor(PDL)
    columns: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // columns).to(tl.int64)
    offs = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)
    out = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        if routing_ptr is None:
            expert = tl.load(ids_ptr + token * TOP_K + k)
            place = tl.where((expert >= 0) & (expert < E), token * TOP_K + k, -1)
        else:
            place_ptr = place_of_entry(routing_ptr, S, E) + token * TOP_K
            place = tl.load(place_ptr + k).to(tl.int64)
        # what nobody wrote is not read, and may be NaN
        mask = (offs < H) & (place >= 0)
        y = tl.load(y_ptr + place * H + offs, mask=mask, other=0.0).to(tl.float32)
        if b_ptr is not None:
            expert = tl.load(ids_ptr + token * TOP_K + k).to(tl.int64)
            y += tl.load(b_ptr + expert * H + offs, mask=mask, other=0.0).to(tl.float32)
        if weights_ptr is None:
            out += y
        else:
            weight = tl.load(weights_ptr + token * TOP_K + k).to(tl.float32)
            out += tl.where(place >= 0, weight, 0.0) * y
    tl.store(out_ptr + token * H + offs, out.to(out_ptr.dtype.element_ty), mask=offs < H)


def combine(
    y: torch.Tensor,  # [.., H] by places
    weights: Optional[torch.Tensor],  # [T, K]
    routing: Routing,
    ids: Optional[torch.Tensor] = None,  # [T, K], with a bias or without a routing's buffer
    bias: Optional[torch.Tensor] = None,  # [E, H], added to y
    pdl: bool = False,
) -> torch.Tensor:  # [T, H]
    (buffer, T, K, E, _), H = routing, y.shape[1]
    out = y.new_empty((T, H))  # [T, H]
    # few tokens are divided among more programs
    block = min(1 << (H - 1).bit_length(), 2048 if T >= 128 else 512)
    launch(
        _combine_kernel, T * -(-H // block), (), (y, weights, ids, bias, buffer, out), (T * K, E),
        (H, K, block, pdl), max(1, block // 256), pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["S", "E"])
def _weights_gradient_kernel(
    parts_ptr,  # [.., PARTS] fp32 by places
    out_ptr,  # [S] by entries
    routing_ptr, S, E,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw[entry] = sum of the parts at its place, in order; 0 if the expert is on another rank."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place_ptr = place_of_entry(routing_ptr, S, E) + entry
    place = tl.load(place_ptr, mask=entry < S, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts_ptr + place * PARTS + part, mask=place >= 0, other=0.0)
    tl.store(out_ptr + entry, total.to(out_ptr.dtype.element_ty), mask=entry < S)


def weights_gradient(
    parts: torch.Tensor,  # [.., PARTS] fp32 by places
    like: torch.Tensor,  # [T, K]
    routing: Routing,
    more: Optional[torch.Tensor] = None,  # [T, K] fp32, added
) -> torch.Tensor:  # [T, K]
    (buffer, T, K, E, _), count = routing, parts.shape[1]
    out = torch.empty_like(like) if more is None else torch.empty_like(more)
    launch(
        _weights_gradient_kernel, -(-T * K // 256), (), (parts, out, buffer), (T * K, E),
        (count, 256), 4,
    )  # fmt: skip
    return out if more is None else (out + more).to(like.dtype)
