"""The calls of norm, rotary embedding, gate and attention over a cache, and of their gradients.

Sizes: B rows, T tokens, HQ and HK heads, D head dim, R rotary dim, S slots; of latent attention H
heads, C latent channels, N channels of a head without rotary embedding, V of a value head.
"""

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..runtime import device
from ..runtime.call import NoOptions, call


class QkOptions(NamedTuple):
    """The options of a call: all that is not a tensor."""

    eps: float  # of the norms
    offset: float  # added to their weights
    whole: bool  # a norm over all heads of a token, not over each
    interleaved: bool  # channels 2 i and 2 i + 1 turn together, not i and i + R / 2


@call
class QkNormRope(NamedTuple):
    """The heads of queries and keys between their projections and attention."""

    q: Tensor  # [B, T, HQ, D]
    k: Tensor  # [B, T, HK, D]
    cos: Optional[Tensor]  # [B or 1, T, R], interleaved [.., R / 2] or [.., R / 2, 2]; as sin
    sin: Optional[Tensor]
    q_weight: Optional[Tensor]  # [D] or, over all heads, [HQ * D]
    k_weight: Optional[Tensor]  # [D] or [HK * D]
    v: Optional[Tensor]  # [B, T, HK, DV], with the three below or without them
    key_cache: Optional[Tensor]  # [B, HK, S, D], written in place
    value_cache: Optional[Tensor]  # [B, HK, S, DV], written in place
    cache_position: Optional[Tensor]  # [], the first slot that is written
    options: QkOptions


@call
class QkGradient(NamedTuple):
    dq: Tensor  # [B, T, HQ, D]
    dk: Tensor  # [B, T, HK, D]
    q: Optional[Tensor]  # [B, T, HQ, D], where q_weight is given; likewise k
    k: Optional[Tensor]
    cos: Optional[Tensor]  # as QkNormRope has it
    sin: Optional[Tensor]
    q_weight: Optional[Tensor]
    k_weight: Optional[Tensor]
    options: QkOptions


@call
class SigmoidGate(NamedTuple):
    x: Tensor  # any shape
    gate: Tensor  # the shape of x
    options: NoOptions


@call
class SigmoidGradient(NamedTuple):
    x: Tensor
    gate: Tensor
    dy: Tensor
    options: NoOptions


class KvOptions(NamedTuple):
    scale: float


@call
class KvCacheAttention(NamedTuple):
    q: Tensor  # [B, 1, HQ, D]
    k_cache: Tensor  # [B, HK, S, D]
    v_cache: Tensor  # [B, HK, S, D]
    cache_seqlens: Optional[Tensor]  # [] or [B]; None: all slots are filled
    mask: Optional[Tensor]  # [B or 1, 1, 1, S]
    options: KvOptions


class LatentOptions(NamedTuple):
    nope: int  # N
    scale: float


@call
class LatentAttention(NamedTuple):
    q: Tensor  # [B, T, H, N + R]
    latents: Tensor  # [B, 1, S, C]
    rotated: Tensor  # [B, 1, S, R]
    weight: Tensor  # [H * (N + V), C]
    weight_scale: Optional[Tensor]  # of a weight in e4m3, [ceil(H * (N + V) / 128), ceil(C / 128)]
    cache_seqlens: Optional[Tensor]  # [] or [B]; None: all slots are filled
    mask: Optional[Tensor]  # [B or 1, 1, T or 1, S]
    options: LatentOptions


def rows_at_once(N: int, V: int) -> int:
    """Rows of a head's weight in FP8 that a program takes at a time, which share a scale."""
    return math.gcd(64, N, V)


def reads_fp8(where: torch.device, N: int, V: int) -> bool:
    """True if kernels of latent attention read a weight in FP8 as it is."""
    return rows_at_once(N, V) >= 16 and device.has_e4m3(where)


class LatentRopeOptions(NamedTuple):
    eps: float
    rotary: str  # of ROTARY in checks.py


@call
class LatentNormRope(NamedTuple):
    """Queries and latents between their projections and the cache."""

    q: Tensor  # [B, T, H, N + R], whose last R channels are turned in place
    kv: Tensor  # [B, T, C + R]
    weight: Tensor  # [C]
    cos: Optional[Tensor]  # [B or 1, T, R] or, of pairs, [B or 1, T, R / 2]; as sin
    sin: Optional[Tensor]
    latent_cache: Optional[Tensor]  # [B, 1, S, C], written in place, with the two below or without
    rotated_cache: Optional[Tensor]  # [B, 1, S, R]
    cache_position: Optional[Tensor]  # [], the first slot that is written
    options: LatentRopeOptions


class LatentStepOptions(NamedTuple):
    nope: int  # N
    scale: float
    eps: float  # of the norm
    rotary: str  # of ROTARY in checks.py


@call
class LatentStep(NamedTuple):
    """Tokens of a layer that keeps latents, between its projections: norm, rotary embedding, cache
    write and attention."""

    q: Tensor  # [B, T, H, N + R]
    kv: Tensor  # [B, T, C + R]
    norm: Tensor  # [C]
    cos: Optional[Tensor]  # as LatentNormRope has it
    sin: Optional[Tensor]
    latents: Tensor  # [B, 1, S, C], written in place
    rotated: Tensor  # [B, 1, S, R], written in place
    weight: Tensor  # [H * (N + V), C]
    weight_scale: Optional[Tensor]  # as LatentAttention has it
    length: Tensor  # []: the first slot that is written; T is added to it in place
    mask: Optional[Tensor]  # [B or 1, 1, T or 1, S]
    options: LatentStepOptions
