"""Norm and rotary embedding of queries and keys and the write of keys and values to a cache.

    n = x rstd (offset + weight),  rstd = 1 / sqrt(mean(x^2) + eps)
    y = [n1 c1 - n2 s1, n2 c2 + n1 s2, n3]        n1, n2: the two channels of each pair

in fp32 and rounded once. One launch: a program takes a few heads of a token, of q, of k or of v.

Sizes: B rows, T tokens, HQ and HK heads, D and DV head dims, R rotary dim, P = R / 2, U = D - R,
S slots.
"""

from typing import Callable, Dict, Optional, Tuple

import torch
import triton
import triton.language as tl

from ...runtime import tuning
from ...runtime.copies import contiguous_like, on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch, steps
from ...runtime.ops import contiguous, dense
from ...runtime.sizes import next_power_of_2
from ..call import QkNormRope
from .heads import load_heads, load_turn, load_weight, rms_reciprocal, store_heads

MAX_HEAD, MAX_WHOLE = 1024, 16384  # channels of a head, and of a norm over all heads


def takes(call: QkNormRope) -> bool:
    """True for head dims up to 1024, norms over up to 16384 channels and caches with contiguous
    rows."""
    q, k, cache, options = call.q, call.k, (call.key_cache, call.value_cache), call.options
    D = q.shape[3]
    most = MAX_WHOLE // next_power_of_2(max(D, 1)) if options.whole else 65536
    wide = D if call.v is None else max(D, call.v.shape[3])
    return (
        served(q, k, call.cos, call.sin, call.q_weight, call.k_weight, call.v, *cache)
        and 0 < D
        and wide <= MAX_HEAD
        and 0 < k.shape[2] <= most
        and 0 < q.shape[2] <= most
        and all(x is None or x.stride(3) == 1 for x in cache)
    )


@triton.jit
def _make(
    x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, cache_ptr, at, heads, stride, cache_stride, has_slot, H,
    eps, offset, WHOLE: tl.constexpr, P: tl.constexpr, U: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_U: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates a token's heads, and also writes them to a cache if there is one.

    If has_slot is given and 0, the results are NaN and the cache is not written.
    """
    D: tl.constexpr = 2 * P + U
    first, second, rest = load_heads(x_ptr, heads, stride, H, P, U, BLOCK_P, BLOCK_U, ANGLES)
    if w_ptr is not None:
        w1, w2, w3 = load_weight(w_ptr, heads, H, WHOLE, P, U, BLOCK_P, BLOCK_U, ANGLES)
        rstd = rms_reciprocal(first, second, rest, heads, H, eps, D, WHOLE)
        first *= rstd * (offset + w1)
        second *= rstd * (offset + w2)
        rest *= rstd * (offset + w3)
    if P > 0:
        c1, c2, s1, s2 = load_turn(cos_ptr, sin_ptr, at, P, BLOCK_P, ANGLES)
        turned = first * c1 - second * s1
        second = second * c2 + first * s2
        first = turned
    if has_slot is not None:
        first = tl.where(has_slot, first, float("nan"))
        second = tl.where(has_slot, second, float("nan"))
        rest = tl.where(has_slot, rest, float("nan"))
    dtype = y_ptr.dtype.element_ty
    first, second, rest = first.to(dtype), second.to(dtype), rest.to(dtype)
    store_heads(y_ptr, heads, D, H, first, second, rest, P, U, BLOCK_P, BLOCK_U, ANGLES)
    if cache_ptr is not None:
        writable = tl.where(has_slot, H, 0)  # heads: all or none
        store_heads(
            cache_ptr, heads, cache_stride, writable, first, second, rest, P, U, BLOCK_P, BLOCK_U,
            ANGLES,
        )  # fmt: skip


@triton.jit
def _copy(
    v_ptr, cache_ptr, heads, stride, cache_stride, has_slot, H, DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Copies a token's values to the cache if the cache has a slot for it."""
    d = tl.arange(0, BLOCK_V)[None, :]
    there = (heads < tl.where(has_slot, H, 0))[:, None] & (d < DV)
    rows = heads.to(tl.int64)[:, None]
    v = tl.load(v_ptr + rows * stride + d, mask=there)
    tl.store(cache_ptr + rows * cache_stride + d, v.to(cache_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["T"])
def _qk_norm_rope_kernel(
    q_ptr,  # [B, T, HQ, D]
    k_ptr,  # [B, T, HK, D]
    cos_ptr,  # [B or 1, T, R] or None
    sin_ptr,
    q_weight_ptr,  # [D], [HQ * D] or None
    k_weight_ptr,
    v_ptr,  # [B, T, HK, DV] or None
    key_cache_ptr,  # [B, HK, S, D] or None
    value_cache_ptr,  # [B, HK, S, DV] or None
    position_ptr,  # [] or None
    y_q_ptr,  # [B, T, HQ, D]
    y_k_ptr,  # [B, T, HK, D]
    q_strides,  # of B, T, heads
    k_strides, v_strides,
    turn_strides,  # of B, T in cos and sin
    key_strides,  # of B, heads, S in the cache
    value_strides,
    T, S, eps, offset,
    HQ: tl.constexpr, HK: tl.constexpr, P: tl.constexpr, U: tl.constexpr, DV: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_V: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """The heads of a token: a program takes BLOCK_Q heads of q, or BLOCK_K of k or of v.

    Queries and keys of a token without a slot in the cache are NaN: the error is visible without a
    check on the host.
    """
    D: tl.constexpr = 2 * P + U
    Q: tl.constexpr = (HQ + BLOCK_Q - 1) // BLOCK_Q
    K: tl.constexpr = (HK + BLOCK_K - 1) // BLOCK_K
    BLOCKS: tl.constexpr = Q + (K if v_ptr is None else 2 * K)
    pid = tl.program_id(0)
    block = pid % BLOCKS
    row = (pid // BLOCKS).to(tl.int64)  # of a token
    b = row // T
    t = row % T
    at = b * turn_strides[0] + t * turn_strides[1]
    keys, values, has_slot = key_cache_ptr, value_cache_ptr, None
    if v_ptr is not None:
        slot = tl.load(position_ptr).to(tl.int64) + t
        has_slot = (slot >= 0) & (slot < S)
        keys += b * key_strides[0] + slot * key_strides[2]
        values += b * value_strides[0] + slot * value_strides[2]
    if block < Q:
        _make(
            q_ptr + b * q_strides[0] + t * q_strides[1], q_weight_ptr, cos_ptr, sin_ptr,
            y_q_ptr + row * (HQ * D), None, at, block * BLOCK_Q + tl.arange(0, BLOCK_Q),
            q_strides[2], 0, has_slot, HQ, eps, offset, WHOLE, P, U, BLOCK_P, BLOCK_U, ANGLES,
        )  # fmt: skip
    elif block < Q + K:
        _make(
            k_ptr + b * k_strides[0] + t * k_strides[1], k_weight_ptr, cos_ptr, sin_ptr,
            y_k_ptr + row * (HK * D), keys, at, (block - Q) * BLOCK_K + tl.arange(0, BLOCK_K),
            k_strides[2], key_strides[1], has_slot, HK, eps, offset, WHOLE, P, U, BLOCK_P, BLOCK_U,
            ANGLES,
        )  # fmt: skip
    elif v_ptr is not None:
        _copy(
            v_ptr + b * v_strides[0] + t * v_strides[1], values,
            (block - Q - K) * BLOCK_K + tl.arange(0, BLOCK_K), v_strides[2], value_strides[1],
            has_slot, HK, DV, BLOCK_V,
        )  # fmt: skip


def parts_of(D: int, cos: Optional[torch.Tensor], interleaved: bool) -> Dict[str, int]:
    """P, U, their tiles and ANGLES, by the names of a kernel's parameters."""
    P = 0 if cos is None else cos.shape[2] if interleaved else cos.shape[2] // 2
    tiles = [next_power_of_2(max(n, 1)) for n in (P, D - 2 * P)]
    angles = 0 if cos is None or not interleaved else cos.ndim - 2
    return {"P": P, "U": D - 2 * P, "BLOCK_P": tiles[0], "BLOCK_U": tiles[1], "ANGLES": angles}


def settings(operation: str, q: torch.Tensor, U: int, whole: bool) -> dict:
    """The launch configuration: by number of tokens and of channels that are not rotated, whose
    tiles are separate; for a norm over all heads by all channels of a token."""
    B, T, H, D = q.shape
    if whole:
        return tuning.lookup(f"{operation}_whole", q.device, D=H * D)
    return tuning.lookup(operation, q.device, M=B * T, U=U)


def head_tiles(config: dict, D: int, whole: bool, *heads: int) -> Tuple[int, ...]:
    """Heads that a program takes of each of these numbers: all of them for a norm over all
    heads."""
    every = [next_power_of_2(n) for n in heads]
    if whole:
        return tuple(every)
    most = max(1, config["BLOCK"] // next_power_of_2(D))
    return tuple([min(n, most) for n in every])


def turn_steps(cos: Optional[torch.Tensor], B: int) -> Tuple[int, int]:
    """Strides of B and T in the tables."""
    if cos is None:
        return (0, 0)
    return (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))


def _are_dense(cos: Optional[torch.Tensor], sin: Optional[torch.Tensor]) -> bool:
    """True if the angles of a token are contiguous and both tables have the same layout."""
    return cos is None or (
        cos.stride() == sin.stride()
        and cos.stride(-1) == 1
        and (cos.ndim < 4 or cos.stride(2) == 2)
    )


def on_dense_rows(prepare: Callable, call, place: int) -> Optional[Callable]:
    """prepare(call) where some of the call's tensors have no contiguous last dimension, or cos and
    sin, at `place` and behind it, have two layouts; else None."""

    def copied(*tensors):
        found = [dense(x) if x is None or x.ndim else x for x in tensors]
        if not _are_dense(*tensors[place : place + 2]):
            found[place : place + 2] = [contiguous(x) for x in tensors[place : place + 2]]
        return found

    if all([a is b for a, b in zip(copied(*call.tensors), call.tensors)]):
        return None
    return on_copies(prepare, call, copied)


def prepare_qk_norm_rope_fwd(call: QkNormRope) -> Optional[Callable]:
    """A function of the call's tensors -> (q [B, T, HQ, D], k [B, T, HK, D]): one launch."""
    if not takes(call):
        return None
    on_copy = on_dense_rows(prepare_qk_norm_rope_fwd, call, 2)
    if on_copy is not None:
        return on_copy
    q, k, v, options = call.q, call.k, call.v, call.options
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    DV = 0 if v is None else v.shape[3]
    parts = parts_of(D, call.cos, options.interleaved)
    config = settings("portable_qk_norm_rope", q, parts["U"], options.whole)
    BLOCK_Q, BLOCK_K = head_tiles(config, D, options.whole, HQ, HK)
    none = (0, 0, 0)
    numbers = (
        steps(q), steps(k), none if v is None else steps(v), turn_steps(call.cos, B),
        *(none if x is None else x.stride()[:3] for x in (call.key_cache, call.value_cache)),
        T, 0 if v is None else call.key_cache.shape[2], float(options.eps), float(options.offset),
    )  # fmt: skip
    blocks = -(-HQ // BLOCK_Q) + (1 if v is None else 2) * -(-HK // BLOCK_K)
    kernel = Launch(
        _qk_norm_rope_kernel, B * T * blocks, q.device, numbers=numbers, guarded=True, HQ=HQ, HK=HK,
        DV=DV, WHOLE=options.whole, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
        BLOCK_V=next_power_of_2(max(DV, 1)), num_warps=config["num_warps"], **parts,
    )  # fmt: skip
    make_q, make_k = contiguous_like(q), contiguous_like(k)

    def run(*tensors):
        y_q, y_k = make_q(tensors[0]), make_k(tensors[1])
        kernel(*tensors, y_q, y_k)
        return y_q, y_k

    return run
