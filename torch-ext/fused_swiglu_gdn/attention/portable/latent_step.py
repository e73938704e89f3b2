"""Latent attention of a few tokens over a static cache that they are written to: four launches.

The first one absorbs, turns the queries' rotary channels, and writes latents and keys of the tokens
to the cache; the last one adds their number to the length. The rest is that of latent.py.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...fp8.call import as_bytes
from ...runtime.dtypes import served
from ...runtime.primitives import after_predecessor
from ..call import LatentAttention, LatentOptions, LatentStep
from .latent import Launches, form_of, takes, token_step
from .latent_kernels import absorbed
from .latent_rope import turn_steps, write_latent


@triton.jit(do_not_specialize=["M", "T", "S"])
def _absorb_step_kernel(
    q_ptr,  # [M, H, N + R], as projected
    kv_ptr,  # [B, T, C + R]
    norm_ptr,  # [C]
    cos_ptr,  # as in latent_rope.py
    sin_ptr,
    c_cache_ptr,  # [B, 1, S, C]
    r_cache_ptr,  # [B, 1, S, R]
    at_ptr,  # []: the first slot that is written
    w_ptr,  # [H, N + V, C]
    s_ptr,  # as in latent_kernels.py
    y_ptr,  # as _absorb_kernel has it
    M, T, S,
    q_step,  # of M
    kv_steps,  # of B, T
    turn_steps,  # of B, T, channels
    c_steps,  # of B, S
    r_steps,
    eps,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr, HALVES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """_absorb_kernel of queries that are not turned yet; M programs before it write the caches."""
    pid = tl.program_id(0)
    if pid < M:
        after_predecessor(PDL)
        write_latent(
            kv_ptr, norm_ptr, cos_ptr, sin_ptr, c_cache_ptr, r_cache_ptr, at_ptr, None, None, pid,
            (pid // T).to(tl.int64), pid % T, kv_steps, turn_steps, c_steps, r_steps, S, eps, C,
            R // 2, FROM_PAIRS, TO_PAIRS, C, R // 2,
        )  # fmt: skip
    else:
        absorbed(
            pid - M, q_ptr, w_ptr, s_ptr, cos_ptr, sin_ptr, y_ptr, M, T, q_step, turn_steps, H, N,
            R, V, C, FROM_PAIRS, TO_PAIRS, HALVES, BLOCK_M, BLOCK_C, BLOCK_K, PDL,
        )  # fmt: skip


def attention_of(call: LatentStep) -> LatentAttention:
    """The attention of a step."""
    return LatentAttention(
        call.q, call.latents, call.rotated, call.weight, call.weight_scale, call.length, call.mask,
        LatentOptions(call.options.nope, call.options.scale),
    )  # fmt: skip


def prepare_latent_step(call: LatentStep) -> Optional[Callable]:
    """The function of LatentStep's tensors -> y [B, T, H, V]; None for those that would be
    copied."""
    return prepared(call, form_of) if takes(attention_of(call)) else None


def prepared(call: LatentStep, form_of: Callable) -> Optional[Callable]:
    attention, (_, _, eps, rotary) = attention_of(call), call.options
    q, kv, norm, cos, sin, latents, rotated, weight, scale, length = call[:10]
    fits = norm.is_contiguous() and weight.is_contiguous() and kv.stride(2) == 1
    fits = fits and (scale is None or scale.is_contiguous())
    fits = fits and (cos is None or cos.stride() == sin.stride()) and not length.ndim
    fits = fits and {x.dtype for x in (q, kv, latents, rotated)} == {q.dtype}
    step = token_step(q)
    if step is None or not fits or not served(norm, cos, sin):
        return None
    launches = Launches(attention, form_of(attention), new=q.shape[1])
    B, T, H, V = launches.shape
    attend, finish, size = launches.at(*attention.tensors)
    caches = ((x.stride(0), x.stride(2)) for x in (latents, rotated))
    absorb = launches.launch(
        _absorb_step_kernel, B * T + launches.programs,
        (B * T, T, latents.shape[2], step, kv.stride()[:2], turn_steps(cos), *caches, eps),
        FROM_PAIRS=rotary != "halves", TO_PAIRS=rotary == "pairs", **launches.sizes,
        **launches.tiles,
    )  # fmt: skip

    def run(q, kv, norm, cos, sin, latents, rotated, weight, scale, length, mask):
        (scale,) = as_bytes((scale,))
        qa, y = q.new_empty(B, T, H, launches.width), q.new_empty(B, T, H, V)
        parts = q.new_empty(size, dtype=torch.float32)
        absorb(q, kv, norm, cos, sin, latents, rotated, length, weight, scale, qa)
        attend(qa, latents, rotated, length, mask, parts)
        finish(parts, length, (weight, scale), length, y)
        return y

    return run
