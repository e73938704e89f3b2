"""Norm of latents, rotary embedding of the key's and the queries' rotary channels, and the cache
write, in one launch: a program for the latents of a token, others for some of its heads.

Sizes: B rows, T tokens, H heads, C latent and R rotary channels, P = R / 2, N channels of a head
without rotary embedding, S slots.
"""

from typing import Callable, Optional, Tuple

import torch
import triton
import triton.language as tl

from ...runtime import device
from ...runtime.copies import on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.primitives import after_predecessor
from ...runtime.sizes import next_power_of_2
from ..call import LatentNormRope

MAX_LATENT, BLOCK_H = 4096, 16


@triton.jit
def load_pairs(x_ptr, rows, inside, P: tl.constexpr, p, PAIRS: tl.constexpr):
    """Both channels of each pair, fp32: neighbours (PAIRS), or those half of R apart."""
    if PAIRS:
        first = x_ptr + rows + 2 * p
        second = first + 1
    else:
        first = x_ptr + rows + p
        second = first + P
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    return a, tl.load(second, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(y_ptr, rows, inside, a, b, P: tl.constexpr, p, PAIRS: tl.constexpr):
    dtype = y_ptr.dtype.element_ty
    if PAIRS:
        first = y_ptr + rows + 2 * p
        second = first + 1
    else:
        first = y_ptr + rows + p
        second = first + P
    tl.store(first, a.to(dtype), mask=inside)
    tl.store(second, b.to(dtype), mask=inside)


@triton.jit
def turned(a, b, cos_ptr, sin_ptr, at, step, P: tl.constexpr, p, FAR: tl.constexpr):
    """FAR: where the angles of the second channels begin, P or, of pairs, 0."""
    c1 = tl.load(cos_ptr + at + p * step, mask=p < P, other=0.0).to(tl.float32)
    s1 = tl.load(sin_ptr + at + p * step, mask=p < P, other=0.0).to(tl.float32)
    if FAR == 0:
        return a * c1 - b * s1, b * c1 + a * s1
    else:
        c2 = tl.load(cos_ptr + at + (FAR + p) * step, mask=p < P, other=0.0).to(tl.float32)
        s2 = tl.load(sin_ptr + at + (FAR + p) * step, mask=p < P, other=0.0).to(tl.float32)
        return a * c1 - b * s1, b * c2 + a * s2


@triton.jit
def write_latent(
    kv_ptr, w_ptr, cos_ptr, sin_ptr, c_cache_ptr, r_cache_ptr, at_ptr, c_ptr, r_ptr, row, b, t,
    kv_steps, turn_steps, c_steps, r_steps,
    S, eps,
    C: tl.constexpr, P: tl.constexpr, FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The latents and the key of token t of row b, to the caches, and to c and r unless None.

    A token without a slot in the caches is NaN, and nothing is written there for it.
    """
    p = tl.arange(0, BLOCK_P)[None, :]
    ch = tl.arange(0, BLOCK_C)
    kv_row = b * kv_steps[0] + t * kv_steps[1]
    c = tl.load(kv_ptr + kv_row + ch, mask=ch < C, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + ch, mask=ch < C, other=0.0).to(tl.float32)
    c = c * tl.rsqrt(tl.sum(c * c, 0) / C + eps) * w
    there = p < P
    x, y = load_pairs(kv_ptr, kv_row + C, there, P, p, FROM_PAIRS)
    if cos_ptr is not None:
        angle = b * turn_steps[0] + t * turn_steps[1]
        FAR: tl.constexpr = 0 if FROM_PAIRS else P
        x, y = turned(x, y, cos_ptr, sin_ptr, angle, turn_steps[2], P, p, FAR)
    if at_ptr is not None:
        slot = tl.load(at_ptr).to(tl.int64) + t
        has_slot = (slot >= 0) & (slot < S)
        c = tl.where(has_slot, c, float("nan"))
        x = tl.where(has_slot, x, float("nan"))
        y = tl.where(has_slot, y, float("nan"))
        cached = c_cache_ptr + b * c_steps[0] + slot * c_steps[1] + ch
        tl.store(cached, c.to(c_cache_ptr.dtype.element_ty), mask=(ch < C) & has_slot)
        at = b * r_steps[0] + slot * r_steps[1]
        store_pairs(r_cache_ptr, at, there & has_slot, x, y, P, p, TO_PAIRS)
    if c_ptr is not None:
        tl.store(c_ptr + row * C + ch, c.to(c_ptr.dtype.element_ty), mask=ch < C)
        store_pairs(r_ptr, row * 2 * P, there, x, y, P, p, TO_PAIRS)


@triton.jit(do_not_specialize=["T", "S"])
def _latent_norm_rope_kernel(
    q_ptr,  # [B, T, H, N + R], whose last R channels are turned in place
    kv_ptr,  # [B, T, C + R]
    w_ptr,  # [C]
    cos_ptr,  # [B or 1, T, R] or, of pairs, [B or 1, T, P]; None: nothing is turned
    sin_ptr,
    c_cache_ptr,  # [B, 1, S, C] or None
    r_cache_ptr,  # [B, 1, S, R]
    at_ptr,  # []: the first slot
    c_ptr,  # [B, T, C]
    r_ptr,  # [B, T, R]
    q_steps,  # of B, T, H
    kv_steps,  # of B, T
    turn_steps,  # of B, T, channels
    c_steps,  # of B, S
    r_steps,
    T, S, eps,
    H: tl.constexpr, N: tl.constexpr, C: tl.constexpr, P: tl.constexpr, FROM_PAIRS: tl.constexpr,
    TO_PAIRS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The latents and the key of a token, or BLOCK_H of its heads."""
    after_predecessor(PDL)
    BLOCKS: tl.constexpr = 1 + (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    block = pid % BLOCKS
    row = (pid // BLOCKS).to(tl.int64)
    b = row // T
    t = row % T
    p = tl.arange(0, BLOCK_P)[None, :]
    angle = b * turn_steps[0] + t * turn_steps[1]
    FAR: tl.constexpr = 0 if FROM_PAIRS else P
    if block > 0:
        if cos_ptr is not None:
            head = (block - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
            inside = (head < H) & (p < P)
            rows = b * q_steps[0] + t * q_steps[1] + head * q_steps[2] + N
            first, second = load_pairs(q_ptr, rows, inside, P, p, FROM_PAIRS)
            first, second = turned(first, second, cos_ptr, sin_ptr, angle, turn_steps[2], P, p, FAR)
            tl.debug_barrier()  # other warps have read what this one overwrites
            store_pairs(q_ptr, rows, inside, first, second, P, p, TO_PAIRS)
    else:
        write_latent(
            kv_ptr, w_ptr, cos_ptr, sin_ptr, c_cache_ptr, r_cache_ptr, at_ptr, c_ptr, r_ptr,
            row, b, t, kv_steps, turn_steps, c_steps, r_steps, S, eps, C, P, FROM_PAIRS, TO_PAIRS,
            BLOCK_C, BLOCK_P,
        )  # fmt: skip


def turn_steps(cos: Optional[torch.Tensor]) -> Tuple[int, int, int]:
    """Strides of B, T and channels in the tables."""
    return (0, 0, 0) if cos is None else (cos.stride(0) if len(cos) > 1 else 0, *cos.stride()[1:])


def prepare_latent_norm_rope(call: LatentNormRope) -> Optional[Callable]:
    """A function of the call's tensors -> (latents [B, 1, T, C], rotated [B, 1, T, R])."""
    q, kv, weight, cos, sin, latent_cache, rotated_cache, cache_position, options = call
    (B, T, H, D), C = q.shape, weight.shape[0]
    R = kv.shape[2] - C
    caches = (latent_cache, rotated_cache)
    if not served(q, kv, weight, cos, sin, *caches) or not 0 < C <= MAX_LATENT or R == 0 or R % 2:
        return None
    if q.stride(3) != 1 or H == 0 or any([x is not None and x.stride(3) != 1 for x in caches]):
        return None
    if kv.stride(2) != 1 or weight.stride(0) != 1 or cos is not None and (
        cos.stride() != sin.stride()
    ):  # fmt: skip

        def copied(q, kv, weight, cos, sin, *more):
            cos, sin = (x if x is None else x.contiguous() for x in (cos, sin))
            return q, kv.contiguous(), weight.contiguous(), cos, sin, *more

        return on_copies(prepare_latent_norm_rope, call, copied)
    pdl = device.overlaps_launches(q.device)
    cached = [(0, 0) if x is None else (x.stride(0), x.stride(2)) for x in caches]
    S = 0 if latent_cache is None else latent_cache.shape[2]
    numbers = (
        q.stride()[:3], kv.stride()[:2], turn_steps(cos), *cached, T, S, options.eps
    )  # fmt: skip
    heads = min(BLOCK_H, next_power_of_2(H))
    kernel = Launch(
        _latent_norm_rope_kernel, B * T * (1 + -(-H // heads)), q.device, numbers=numbers,
        guarded=True, early=pdl, H=H, N=D - R, C=C, P=R // 2,
        FROM_PAIRS=options.rotary != "halves", TO_PAIRS=options.rotary == "pairs", BLOCK_H=heads,
        BLOCK_C=next_power_of_2(C), BLOCK_P=next_power_of_2(R // 2), PDL=pdl, num_warps=4,
    )  # fmt: skip

    def run(*tensors):
        latents, rotated = q_like(tensors[1], C), q_like(tensors[1], R)
        kernel(*tensors, latents, rotated)
        return latents, rotated

    def q_like(x, width: int):
        return x.new_empty(B, 1, T, width)

    return run
