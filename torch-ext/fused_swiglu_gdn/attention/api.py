"""Norm, rotary embedding and gate around attention, and attention of one token over a static
cache."""

from typing import Optional, Tuple

from torch import Tensor

from .ops import KVCACHE_ATTENTION, QK_NORM_ROPE, SIGMOID_GATE, WITH_CACHE


def fused_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Optional[Tensor] = None,
    sin: Optional[Tensor] = None,
    *,
    q_weight: Optional[Tensor] = None,
    k_weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    casting_mode: str = "llama",
    offset: float = 0.0,
    norm: str = "head",
    interleaved: bool = False,
    v: Optional[Tensor] = None,
    key_cache: Optional[Tensor] = None,
    value_cache: Optional[Tensor] = None,
    cache_position: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
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
    """x * sigmoid(gate), computed in fp32 and rounded once: the gate on an attention output.

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
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Optional[Tensor] = None,
    *,
    attention_mask: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
) -> Tensor:
    """Attention of one token a row over the filled slots of a cache.

        out = softmax(q k^T softmax_scale + mask) v    over the slots below cache_seqlens

    Softmax in fp32. Slots past the filled ones are not read, whatever they hold; keys and values
    are read once for all query heads that share them. Nothing is read by the host, and what is
    launched depends on shapes alone, so that a call can be captured in a CUDA graph. A row that
    attends to no slot is 0, as scaled_dot_product_attention has it.

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
