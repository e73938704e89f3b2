"""x quantised once a token, and what came of it stored at the places of all its slots.

Sizes: T tokens, K slots, S = T K entries, E experts, H model width.
"""

import torch
import triton
import triton.language as tl

from ...fp8.call import BLOCK
from ...fp8.portable.quantise import codes_of, columns_of_row, scale_of
from ...runtime import device
from ...runtime.launch import Launch
from ...runtime.sizes import next_power_of_2
from ..portable.routing import place_of_entry

_BLOCK = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["S", "E", "places"])
def spread_kernel(
    x_ptr,  # [T, H]
    q_ptr,  # [places, H] e4m3
    s_ptr,  # [H / 128, places] fp32
    routing_ptr, S, E, places,
    stride_x,  # of a row
    H: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes GROUPS times 128 columns of a token."""
    token, group, offs = columns_of_row(GROUPS, PDL)
    here = group < H // _BLOCK
    x = tl.load(x_ptr + token.to(tl.int64) * stride_x + offs, mask=here[:, None], other=0.0)
    x = x.to(tl.float32)
    scale = scale_of(x, 1)
    codes = codes_of(x, scale, 1)
    place_ptr = place_of_entry(routing_ptr, S, E) + token * TOP_K
    for k in range(TOP_K):
        place = tl.load(place_ptr + k).to(tl.int64)
        mask = here & (place >= 0)
        tl.store(q_ptr + place * H + offs, codes, mask=mask[:, None])
        tl.store(s_ptr + group.to(tl.int64) * places + place, scale, mask=mask)


def spread_launch(where: torch.device, T: int, K: int, E: int, H: int, stride: int, places: int):
    """Prepares the launch that spreads x [T, H], whose rows are `stride` apart."""
    groups, pdl = min(32, next_power_of_2(H // BLOCK)), device.overlaps_launches(where)
    return Launch(
        spread_kernel, (T, -(-H // (BLOCK * groups))), where, numbers=(T * K, E, places, stride),
        constexprs=(H, K, groups, pdl), early=pdl,
    )  # fmt: skip
