"""Norm, rotary embedding, gate and attention over a cache in plain torch: the definitions.

Sizes: B rows, T tokens, HQ and HK heads, D head dim, R rotary dim, S slots of a cache; of latent
attention H heads, C latent channels, N channels of a head without rotary embedding, V of a value
head.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..fp8.call import Quantised
from ..fp8.reference import dequantised, quantise_fwd
from ..runtime.dtypes import at_least_fp32
from .call import LatentNormRope, QkNormRope, QkOptions


def _normed(x: Tensor, weight: Optional[Tensor], options: QkOptions) -> Tensor:
    """x [B, T, H, D] normalised over each head, or over all heads of a token, times offset +
    weight."""
    if weight is None:
        return x
    dims = (-2, -1) if options.whole else (-1,)
    n = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + options.eps)
    return n * (options.offset + at_least_fp32(weight)).view(x.shape[-len(dims) :])


def turned(x: Tensor, interleaved: bool) -> Tensor:
    """rotate_half: a quarter turn of each pair of channels, (i, i + R / 2) or (2 i, 2 i + 1)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _by_channels(cos: Optional[Tensor], sin: Optional[Tensor], interleaved: bool) -> Tuple:
    """The tables as [B or 1, T, 1, R]; none where there are none."""
    tables = [] if cos is None else [cos, sin]
    if interleaved:
        tables = [x.repeat_interleave(2, -1) if x.ndim == 3 else x.flatten(2) for x in tables]
    return tuple([at_least_fp32(x).unsqueeze(2) for x in tables])


def _rotated(x: Tensor, tables: Tuple, interleaved: bool, back: bool = False) -> Tensor:
    """x [B, T, H, D] with its first R channels rotated; the others are unchanged. back: by the
    transpose, the gradient."""
    if not tables:
        return x
    cos, sin = tables
    head, tail = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    added = -turned(head * sin, interleaved) if back else turned(head, interleaved) * sin
    return torch.cat([head * cos + added, tail.to(head.dtype)], dim=-1)


def _apart(y: Tensor, x: Tensor) -> Tensor:
    """y, contiguous, in the dtype of x, and never the tensor x itself."""
    y = y.to(x.dtype).contiguous()
    return y.clone() if y is x else y


def qk_norm_rope_fwd(*fields) -> Tuple[Tensor, Tensor]:
    """q [B, T, HQ, D] and k [B, T, HK, D] in fp32, rounded once; k and v written to the caches.

    fields: of QkNormRope, in its order.
    """
    call = QkNormRope.of(fields)
    options, interleaved = call.options, call.options.interleaved
    turn = _by_channels(call.cos, call.sin, interleaved), interleaved
    q, k = (
        _apart(_rotated(_normed(at_least_fp32(x), weight, options), *turn), x)
        for x, weight in ((call.q, call.q_weight), (call.k, call.k_weight))
    )
    if call.key_cache is not None:
        slots = torch.arange(k.shape[1], device=k.device) + call.cache_position
        for cache, x in ((call.key_cache, k), (call.value_cache, call.v)):
            cache.index_copy_(2, slots, x.transpose(1, 2).to(cache.dtype))
    return q, k


def sigmoid_gate_fwd(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) in fp32, rounded once; contiguous."""
    return (at_least_fp32(x) * at_least_fp32(gate).sigmoid()).to(x.dtype).contiguous()


def sigmoid_gate_quantise_fwd(x: Tensor, gate: Tensor) -> Quantised:  # [B, T, HQ, D] bf16 each
    """sigmoid_gate_fwd of the heads of tokens, in FP8."""
    return quantise_fwd(sigmoid_gate_fwd(x, gate).flatten(0, 1).flatten(1))


def _slots(cache_seqlens: Optional[Tensor], S: int, where: torch.device) -> Tuple[Tensor, Tensor]:
    """The slots [S], and how many of them are filled, [B or 1, 1, 1, 1]."""
    slots = torch.arange(S, device=where)
    filled = slots[:1] + S if cache_seqlens is None else cache_seqlens
    return slots, filled.reshape(-1, 1, 1, 1)


def _seen(filled: Tensor, mask: Optional[Tensor]) -> Tensor:
    """The slots that are attended to, of those that are filled, as flags."""
    if mask is None:
        return filled
    return filled & (mask if mask.dtype == torch.bool else mask > -torch.inf)


def _softmax(scores: Tensor, seen: Tensor, mask: Optional[Tensor]) -> Tensor:
    """The weights of the slots: softmax(scores + mask); 0 where no slot is attended."""
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + at_least_fp32(mask)
    scores, none = scores.masked_fill(~seen, -torch.inf), ~seen.any(-1, keepdim=True)
    return scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)


def kvcache_attention(
    q: Tensor,  # [B, 1, HQ, D]
    k_cache: Tensor,  # [B, HK, S, D]
    v_cache: Tensor,  # [B, HK, S, D]
    cache_seqlens: Optional[Tensor],  # [] or [B]; None: all slots are filled
    mask: Optional[Tensor],  # [B or 1, 1, 1, S], bool or floating
    scale: float,
) -> Tensor:  # [B, 1, HQ, D]
    """softmax(q k^T scale + mask) v over the filled slots, in fp32; 0 where no slot is attended."""
    (B, _, HQ, D), (HK, S) = q.shape, k_cache.shape[1:3]
    slots, filled = _slots(cache_seqlens, S, q.device)
    seen = _seen(slots < filled, mask)
    heads = at_least_fp32(q).view(B, HK, HQ // HK, D)
    scores = heads @ at_least_fp32(k_cache).mT * scale  # [B, HK, HQ / HK, S]
    weights = _softmax(scores, seen, mask)
    # slots that are not attended may hold anything
    values = at_least_fp32(v_cache).masked_fill(~seen.view(-1, 1, S, 1), 0.0)
    return (weights @ values.to(weights.dtype)).view(B, 1, HQ, D).to(q.dtype)


def kvcache_attention_quantise(*call) -> Quantised:
    """The same [B, HQ * D] in FP8."""
    return quantise_fwd(kvcache_attention(*call).flatten(1))


def latent_attention(
    q: Tensor,  # [B, T, H, N + R]
    latents: Tensor,  # [B, 1, S, C]
    rotated: Tensor,  # [B, 1, S, R]
    weight: Tensor,  # [H * (N + V), C]
    weight_scale: Optional[Tensor],  # of a weight in FP8
    cache_seqlens: Optional[Tensor],  # [] or [B]; None: all slots are filled
    mask: Optional[Tensor],  # [B or 1, 1, T or 1, S], bool or floating; None: causal
    nope: int,
    scale: float,
) -> Tensor:  # [B, T, H, V]
    """softmax(k q scale + mask) v over the filled slots, in fp32, where k and v are made of the
    latents by the weight: in absorbed form, which makes neither. 0 where no slot is attended."""
    (B, T, H, _), S = q.shape, latents.shape[2]
    if weight_scale is not None:
        weight = dequantised(weight, weight_scale).to(at_least_fp32(q).dtype)
    keys, values = (
        at_least_fp32(weight)
        .view(H, -1, latents.shape[3])
        .split([nope, weight.shape[0] // H - nope], 1)
    )
    slots, filled = _slots(cache_seqlens, S, q.device)
    if mask is None:
        mask = slots <= filled - T + torch.arange(T, device=q.device).view(T, 1)
    seen = _seen(slots < filled, mask)
    # slots that no token attends to may hold anything
    kept = seen.any(2).expand(B, 1, S).unsqueeze(-1)
    c, r = (at_least_fp32(x).masked_fill(~kept, 0.0) for x in (latents, rotated))
    wide = at_least_fp32(q).transpose(1, 2)  # [B, H, T, N + R]
    scores = (wide[..., :nope] @ keys) @ c.mT + wide[..., nope:] @ r.mT
    weights = _softmax(scores * scale, seen, mask)
    y = (weights @ c.to(weights.dtype)) @ values.mT.to(weights.dtype)
    return y.transpose(1, 2).to(q.dtype).contiguous()


def _turned_channels(x: Tensor, cos: Tensor, sin: Tensor, rotary: str) -> Tensor:
    """x [B, T, H, R] turned, in the precision of element-wise maths. rotary: as in checks.py."""
    cos, sin = (at_least_fp32(table).unsqueeze(2) for table in (cos, sin))
    x = at_least_fp32(x)
    if rotary == "halves":
        return x * cos + turned(x, False) * sin
    a, b = x[..., ::2], x[..., 1::2]
    first, second = a * cos - b * sin, b * cos + a * sin
    if rotary == "pairs":
        return torch.stack([first, second], -1).flatten(-2)
    return torch.cat([first, second], -1)


def latent_norm_rope(*fields) -> Tuple[Tensor, Tensor]:
    """Latents [B, 1, T, C] and rotated [B, 1, T, R], rounded once; q and the caches written.

    fields: of LatentNormRope, in its order.
    """
    call = LatentNormRope.of(fields)
    kv, weight, C = call.kv, at_least_fp32(call.weight), call.weight.shape[0]
    c, r = at_least_fp32(kv[..., :C]), kv[..., C:].unsqueeze(2)
    c = c * torch.rsqrt(c.square().mean(-1, keepdim=True) + call.options.eps) * weight
    if call.cos is not None:
        turn = (call.cos, call.sin, call.options.rotary)
        q = call.q[..., call.q.shape[-1] - r.shape[-1] :]
        q.copy_(_turned_channels(q, *turn))
        r = _turned_channels(r, *turn)
    found = c.unsqueeze(1).to(kv.dtype), r.transpose(1, 2).to(kv.dtype).contiguous()
    if call.latent_cache is not None:
        slots = torch.arange(kv.shape[1], device=kv.device) + call.cache_position
        for cache, x in zip((call.latent_cache, call.rotated_cache), found):
            cache.index_copy_(2, slots, x.to(cache.dtype))
    return found


def latent_step(
    q: Tensor,  # [B, T, H, N + R]
    kv: Tensor,  # [B, T, C + R]
    norm: Tensor,  # [C]
    cos: Optional[Tensor], sin: Optional[Tensor],
    latents: Tensor,  # [B, 1, S, C]
    rotated: Tensor,  # [B, 1, S, R]
    weight: Tensor,  # [H * (N + V), C]
    weight_scale: Optional[Tensor],
    length: Tensor,  # []
    mask: Optional[Tensor], nope: int, scale: float, eps: float, rotary: str,
) -> Tensor:  # [B, T, H, V]  # fmt: skip
    """latent_norm_rope, T added to the length, and latent_attention; q stays as it is."""
    q = q.clone()
    latent_norm_rope(q, kv, norm, cos, sin, latents, rotated, length, eps, rotary)
    length.add_(q.shape[1])
    return latent_attention(q, latents, rotated, weight, weight_scale, length, mask, nope, scale)


def _norm_gradients(d, x, weight, options) -> Tuple[Tensor, Optional[Tensor]]:
    """The gradients of x and weight in _normed."""
    if weight is None:
        return d, None
    x, dims = at_least_fp32(x), (-2, -1) if options.whole else (-1,)
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + options.eps)
    n = x * rstd
    dweight = (d * n).flatten(0, -1 - len(dims)).sum(0).flatten()
    dn = d * (options.offset + at_least_fp32(weight)).view(x.shape[-len(dims) :])
    return rstd * (dn - n * (dn * n).mean(dims, keepdim=True)), dweight.to(weight.dtype)


def qk_norm_rope_bwd(
    dq: Tensor,  # [B, T, HQ, D]
    dk: Tensor,  # [B, T, HK, D]
    q: Optional[Tensor],  # [B, T, HQ, D], where q_weight is given; likewise k
    k: Optional[Tensor], cos: Optional[Tensor], sin: Optional[Tensor], q_weight: Optional[Tensor],
    k_weight: Optional[Tensor], *fields,
) -> Tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """The gradients of q, k and the weights. fields: of QkOptions."""
    options = QkOptions(*fields)
    turn = _by_channels(cos, sin, options.interleaved), options.interleaved, True
    (first, dq_weight), (second, dk_weight) = (
        _norm_gradients(_rotated(at_least_fp32(d), *turn), x, weight, options)
        for d, x, weight in ((dq, q, q_weight), (dk, k, k_weight))
    )
    return _apart(first, dq), _apart(second, dk), dq_weight, dk_weight


def sigmoid_gate_bwd(x: Tensor, gate: Tensor, dy: Tensor) -> Tuple[Tensor, Tensor]:
    """dx and dgate."""
    s, d = at_least_fp32(gate).sigmoid(), at_least_fp32(dy)
    return (d * s).to(x.dtype), (d * at_least_fp32(x) * s * (1 - s)).to(gate.dtype)
