"""The calls of norm, rotary embedding, gate and attention over a cache, and of their gradients.

Sizes: B rows, T tokens, HQ and HK heads, D head dim, R rotary dim, S slots.
"""

from typing import NamedTuple, Optional

from torch import Tensor

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
