"""Projections with low-rank adapters in plain torch, forward and backward.

    h_i = dropout(x) a_i^T,  y_i = x w_i^T + bias_i + scale_i h_i b_i^T

Adapters are computed in fp32 at least, also those in the dtype of x; results are rounded to the
dtype of x once more than the projection's own.
"""

from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import MOST


def _four(tensors: tuple) -> list:
    return [tensors[i : i + MOST] for i in range(0, len(tensors), MOST)]


def _mixed(x: Tensor) -> Tensor:
    """The hash of the kernels, of numbers below 2^32 in int64."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def is_kept(seed: Tensor, adapter: int, M: int, K: int, p: float) -> Tensor:
    """Mask of the numbers of x [M, K] that the dropout of an adapter keeps, as in kernels."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    rows, words = (torch.arange(n, device=seed.device) for n in (M, K))
    more = (adapter + 1) * 0x9E3779B9
    of_row = _mixed((_mixed(rows ^ low) + more) & 0xFFFFFFFF)
    found = _mixed(of_row[:, None] ^ _mixed((words + high) & 0xFFFFFFFF))
    return (found >> 8).float() * (1.0 / 16777216.0) >= p


def _dropped(x: Tensor, seed: Optional[Tensor], adapter: int, p: float) -> Tensor:
    """x for an adapter, in its dtype."""
    if seed is None:
        return x
    return torch.where(is_kept(seed, adapter, *x.shape, p), x / (1.0 - p), 0.0)


def _wide(tensors: Sequence[Optional[Tensor]]) -> list:
    """The adapters in fp32 at least."""
    return [x if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def lora_fwd(x: Tensor, *more) -> Tuple[Tensor, ...]:
    """h [M, R] of all adapters, and y [.., N] of each projection."""
    *tensors, seed, scales, drops, known = more
    shape, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    weights, biases, *adapters = _four(tuple(tensors))
    down, up = map(_wide, adapters)
    found, hs, wide = [], [], x.to(down[0].dtype)
    for i, (scale, p) in enumerate(zip(scales, drops)):
        hs.append(_dropped(wide, seed, i, p) @ down[i].t())
        base = weights[i] if known else F.linear(x, weights[i], biases[i])
        y = base + hs[-1] @ up[i].t() * scale
        found.append(y.to(x.dtype).view(*shape, len(up[i])))
    return (torch.cat(hs, 1), *found)


def lora_bwd(x: Tensor, h: Tensor, seed: Optional[Tensor], *more) -> tuple:
    """dx, and da and db of each adapter; None where they are not needed."""
    *tensors, scales, drops, known, of_x, of_a, of_b = more
    weights, *adapters, dys = _four(tuple(tensors))
    down, up = map(_wide, adapters)
    dx, das, dbs, at, wide = None, [], [], 0, x.to(h.dtype)
    for i, (scale, p) in enumerate(zip(scales, drops)):
        given, rank = dys[i].to(h.dtype) * scale, len(down[i])
        dh = given @ up[i]
        das.append((dh.t() @ _dropped(wide, seed, i, p)).to(adapters[0][i]) if of_a else None)
        dbs.append((given.t() @ h[:, at : at + rank]).to(adapters[1][i]) if of_b else None)
        at += rank
        if of_x:
            part = _dropped(dh @ down[i], seed, i, p).to(x.dtype)
            part = part if known else dys[i] @ weights[i] + part
            dx = part if dx is None else dx + part
    return (dx, *das, *dbs)
