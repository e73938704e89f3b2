"""Norm, rotary embedding and gate around attention, and attention of one token over a static
cache."""

from typing import Optional, Tuple

from torch import Tensor

from .ops import (
    KVCACHE_ATTENTION,
    LATENT_ATTENTION,
    LATENT_NORM_ROPE,
    LATENTS_TO_CACHE,
    QK_NORM_ROPE,
    SIGMOID_GATE,
    WITH_CACHE,
)


def fused_qk_norm_rope(
    q: Tensor, k: Tensor, cos: Optional[Tensor] = None, sin: Optional[Tensor] = None,
    *, q_weight: Optional[Tensor] = None, k_weight: Optional[Tensor] = None, eps: float = 1e-6,
    casting_mode: str = "llama", offset: float = 0.0, norm: str = "head", interleaved: bool = False,
    v: Optional[Tensor] = None, key_cache: Optional[Tensor] = None,
    value_cache: Optional[Tensor] = None, cache_position: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """RMSNorm and rotary embedding (arXiv:2104.09864) of queries and keys, and their cache write.

        n = x / sqrt(mean(x^2) + eps) * (offset + weight)    where a weight is given, else x
        y = n[:R] * cos + rotate_half(n[:R]) * sin, and n[R:] as it is    where tables are given
        rotate_half(n) = [-n[R / 2:], n[:R / 2]]    or, interleaved, [-n[1], n[0], -n[3], n[2], ..]

    All of it in fp32 and rounded once, to the dtype of q, where the models' own code rounds up to
    five times in bf16. In one launch where a kernel serves.

    Args:
        q: [B, T, HQ, D]; fp32, bf16 or fp16; any strides, so a part of a projection needs no copy.
        k: [B, T, HK, D]; the dtype of q.
        cos, sin: [B or 1, T, R], R even and at most D: a model's own tables, or None. With
            interleaved=True [B or 1, T, R / 2], one angle for both channels of a pair, as
            FlashAttention has it, or [B or 1, T, R / 2, 2], one for each.
        q_weight, k_weight: [D], or [HQ * D] and [HK * D] with norm="all"; None: not normalised.
        eps: added to the mean square.
        casting_mode: "llama" or "gemma", as rms_norm has it. With one rounding at the end the two
            are the same.
        offset: added to the weights; 1.0 for Qwen3.5 and Gemma.
        norm: "head", over each head, or "all", over all heads of a token.
        interleaved: neighbouring channels 2 i and 2 i + 1 turn together (GLM, Ernie, Helium), in
            place of i and i + R / 2.
        v: [B, T, HK, DV]; with key_cache [B, HK, S, D], value_cache [B, HK, S, DV] and
            cache_position [], int64 or int32: k and v are also written to the slots
            cache_position + t. The position is read on the device; it must be at most S - T:
            on a GPU q and k of a token without a slot are NaN, and nothing is written for it.

    Returns:
        q [B, T, HQ, D] and k [B, T, HK, D], contiguous. Differentiable in q, k and the weights
        where no caches are given.

    Raises:
        ValueError: a shape, device or option does not fit; a gradient is needed with caches; on a
            CPU, a token has no slot.
        TypeError: an argument is no tensor, or a dtype does not fit.

    Example:
        >>> q, k = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64)
        >>> angle = torch.rand(1, 5, 16).repeat(1, 1, 2)  # a quarter of a turn for 32 channels
        >>> weight = torch.ones(64)
        >>> q, k = fused_qk_norm_rope(
        ...     q, k, angle.cos(), angle.sin(), q_weight=weight, k_weight=weight
        ... )
        >>> q.shape, k.shape
        (torch.Size([2, 5, 8, 64]), torch.Size([2, 5, 2, 64]))
    """
    tensors = (q, k, cos, sin, q_weight, k_weight, v, key_cache, value_cache, cache_position)
    operation = QK_NORM_ROPE if key_cache is None else WITH_CACHE
    return operation(tensors, (eps, casting_mode, offset, norm, interleaved))


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), computed in fp32 and rounded once: the gate on an attention output
    (arXiv:2505.06708).

    Args:
        x, gate: the same shape; fp32, bf16 or fp16; any strides, so a part of a projection needs
            no copy.

    Returns:
        The shape and dtype of x, contiguous; differentiable.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> projected = torch.randn(2, 5, 8, 2 * 64)  # of each head the query, then the gate
        >>> gate = projected[..., 64:]
        >>> sigmoid_gate(torch.randn(2, 5, 8, 64), gate).shape
        torch.Size([2, 5, 8, 64])
    """
    return SIGMOID_GATE((x, gate))


def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Optional[Tensor] = None,
    *, attention_mask: Optional[Tensor] = None, softmax_scale: Optional[float] = None,
) -> Tensor:  # fmt: skip
    """Attention of one token a row over the filled slots of a cache.

        out = softmax(q k^T softmax_scale + mask) v    over the slots below cache_seqlens

    Attention of arXiv:1706.03762, softmax in fp32. Slots past the filled ones are not read,
    whatever they hold; keys and values are read once for all query heads that share them. Nothing
    is read by the host, and what is launched depends on shapes alone, so that a call can be
    captured in a CUDA graph. A row that attends to no slot is 0, as in
    scaled_dot_product_attention.

    Args:
        q: [B, 1, HQ, D]; fp32, bf16 or fp16; any strides.
        k_cache, v_cache: [B, HK, S, D], HQ a multiple of HK; the dtype of q.
        cache_seqlens: [] or [B], int32 or int64: how many slots are filled, with this token's; 0
            to S, which is looked at on a CPU. None: all, as in a cache that grows.
        attention_mask: [B or 1, 1, 1, S], bool (True: attend) or floating (added), or None.
        softmax_scale: 1 / sqrt(D) by default.

    Returns:
        [B, 1, HQ, D], the dtype of q; contiguous.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> q, (k, v) = torch.randn(2, 1, 8, 64), torch.randn(2, 2, 2, 100, 64)
        >>> attention_with_kvcache(q, k, v, torch.tensor(37)).shape
        torch.Size([2, 1, 8, 64])
    """
    tensors = (q, k_cache, v_cache, cache_seqlens, attention_mask)
    return KVCACHE_ATTENTION(tensors, (softmax_scale,))


def latent_attention_with_kvcache(
    q: Tensor, latents: Tensor, rotated: Tensor, weight: Tensor,
    cache_seqlens: Optional[Tensor] = None,
    *, qk_nope_head_dim: int, attention_mask: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    weight_scale: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """Multi-head latent attention (arXiv:2405.04434) of a few tokens over a cache of latents.

        [k_nope | v] = weight latents    of each head, and k = [k_nope | rotated]
        out = softmax(q k^T softmax_scale + mask) v    over the slots below cache_seqlens

    Keys and values are never made: q_nope is multiplied by the keys' part of the weight, attends to
    the latents themselves, which all heads share, and what it gets is multiplied by the values'
    part (the absorbed form). Softmax and sums in fp32. Slots past the filled ones are not read,
    whatever they hold. Nothing is read by the host, and what is launched depends on shapes alone,
    so that a call can be captured in a CUDA graph. A token that attends to no slot is 0.

    Args:
        q: [B, T, H, N + R]; fp32, bf16 or fp16. Its last R channels are turned already
            (fused_latent_norm_rope). Kernels serve fp16 and bf16 and up to 8 tokens.
        latents: [B, 1, S, C]; the dtype of q, as rotated and weight.
        rotated: [B, 1, S, R], the rotary part of the keys, one for all heads.
        weight: [H * (N + V), C], of each head N rows for keys and V for values: kv_b_proj.weight
            of transformers' models.
        cache_seqlens: [] or [B], int32 or int64: how many slots are filled, with these tokens'; 0
            to S, which is looked at on a CPU. None: all, as in a cache that grows.
        qk_nope_head_dim: N, at least 1.
        attention_mask: [B or 1, 1, T or 1, S], bool (True: attend) or floating (added). None: token
            t is at slot cache_seqlens - T + t and attends to the slots up to its own.
        softmax_scale: 1 / sqrt(N + R) by default.
        weight_scale: [ceil(H * (N + V) / 128), ceil(C / 128)], float32 or float8_e8m0fnu, of a
            weight in float8_e4m3fn: each number scales 128 x 128 values (weight_scale_inv of
            transformers' FP8Linear). Kernels read the weight as it is where N and V are multiples
            of 16.

    Returns:
        [B, T, H, V], the dtype of q; contiguous.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> q, weight = torch.randn(2, 1, 4, 32 + 16), torch.randn(4 * (32 + 24), 64)
        >>> latents, rotated = torch.randn(2, 1, 100, 64), torch.randn(2, 1, 100, 16)
        >>> latent_attention_with_kvcache(
        ...     q, latents, rotated, weight, torch.tensor(37), qk_nope_head_dim=32
        ... ).shape
        torch.Size([2, 1, 4, 24])
    """
    tensors = (q, latents, rotated, weight, weight_scale, cache_seqlens, attention_mask)
    return LATENT_ATTENTION(tensors, (qk_nope_head_dim, softmax_scale))


def fused_latent_norm_rope(
    q: Tensor, kv: Tensor, weight: Tensor, cos: Optional[Tensor] = None,
    sin: Optional[Tensor] = None,
    *, eps: float = 1e-6, rotary: str = "halves", latent_cache: Optional[Tensor] = None,
    rotated_cache: Optional[Tensor] = None, cache_position: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """RMSNorm of latents, rotary embedding (arXiv:2104.09864) of queries and the shared key of
    latent attention (arXiv:2405.04434), and their cache write.

        latents = kv[:C] / sqrt(mean(kv[:C]^2) + eps) * weight
        rotated = turn(kv[C:]), and q[N:] = turn(q[N:]) in place
        turn(x) of a pair (a, b) of channels: (a cos - b sin, b cos + a sin)

    All of it in fp32 and rounded once, in one launch where a kernel serves.

    Args:
        q: [B, T, H, N + R]; fp32, bf16 or fp16. Its last R channels are turned in place.
        kv: [B, T, C + R]; the dtype of q: what kv_a_proj_with_mqa gives.
        weight: [C], of the norm.
        cos, sin: [B or 1, T, R] with rotary="halves", else [B or 1, T, R / 2]; None: nothing is
            turned.
        eps: added to the mean square.
        rotary: which channels turn together: "halves", i and i + R / 2; "pairs", 2 i and 2 i + 1;
            "pairs_to_halves", 2 i and 2 i + 1, which are stored at i and i + R / 2.
        latent_cache, rotated_cache: [B, 1, S, C] and [B, 1, S, R], with cache_position [], int64 or
            int32: latents and rotated are also written to the slots cache_position + t. The
            position is read on the device; it must be at most S - T: on a GPU latents of a token
            without a slot are NaN, and nothing is written for it.

    Returns:
        latents [B, 1, T, C] and rotated [B, 1, T, R], contiguous.

    Raises:
        ValueError: a shape or option does not fit; a gradient is needed; on a CPU, a token has no
            slot.
        TypeError: an argument is no tensor, or a dtype does not fit.

    Example:
        >>> q, kv = torch.randn(2, 5, 4, 32 + 16), torch.randn(2, 5, 64 + 16)
        >>> angle = torch.rand(1, 5, 8)
        >>> latents, rotated = fused_latent_norm_rope(
        ...     q, kv, torch.ones(64), angle.cos(), angle.sin(), rotary="pairs"
        ... )
        >>> latents.shape, rotated.shape
        (torch.Size([2, 1, 5, 64]), torch.Size([2, 1, 5, 16]))
    """
    tensors = (q, kv, weight, cos, sin, latent_cache, rotated_cache, cache_position)
    operation = LATENT_NORM_ROPE if latent_cache is None else LATENTS_TO_CACHE
    return operation(tensors, (eps, rotary))
