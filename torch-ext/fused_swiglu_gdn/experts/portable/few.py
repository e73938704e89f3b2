"""The experts of a few tokens, as in decoding: two launches, without sorting.

    z[t, k] = act(x[t] Wg[e]^T) * (x[t] Wu[e]^T),  out[t] = sum_k w[t, k] z[t, k] Wd[e]^T,
    e = ids[t, k]

Sizes: T tokens, K slots, S = T K entries, E experts, H model width, I hidden width of an expert.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime import device, tuning
from ...runtime.launch import Launch
from ...runtime.primitives import after_predecessor
from ...runtime.sizes import cdiv, next_power_of_2
from .gate import gated


@triton.jit(do_not_specialize=["E"])
def _few_up_kernel(
    x_ptr,  # [T, H]
    w_ptr,  # [E, 2 I, H]: gate above up
    ids_ptr,  # [S]
    z_ptr,  # [S, I]
    E,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z of one entry and BLOCK_N columns. Entries are the fast axis, so equal experts share L2."""
    after_predecessor(PDL)
    columns = (I + BLOCK_N - 1) // BLOCK_N
    entries = tl.num_programs(0) // columns
    entry = (tl.program_id(0) % entries).to(tl.int64)
    expert = tl.load(ids_ptr + entry).to(tl.int64)
    if (expert >= 0) & (expert < E):
        n = (tl.program_id(0) // entries) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = w_ptr + (expert * 2 * I + n)[:, None] * H  # [BLOCK_N, 1]
        gate = tl.zeros((BLOCK_N,), tl.float32)
        up = tl.zeros((BLOCK_N,), tl.float32)
        for first in range(0, H, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            mask = (n < I)[:, None] & (k < H)[None, :]
            w_gate = tl.load(rows + k[None, :], mask=mask, other=0.0)  # [BLOCK_N, BLOCK_K]
            w_up = tl.load(rows + I * H + k[None, :], mask=mask, other=0.0)
            x = tl.load(x_ptr + entry // TOP_K * H + k, mask=k < H, other=0.0).to(tl.float32)
            gate += tl.sum(w_gate.to(tl.float32) * x[None, :], 1)
            up += tl.sum(w_up.to(tl.float32) * x[None, :], 1)
        z = gated(gate, up, ACTIVATION, LIMIT)
        tl.store(z_ptr + entry * I + n, z.to(z_ptr.dtype.element_ty), mask=n < I)


@triton.jit
def _slots_of_weights(
    w_ptr, expert, here, n, first, H: tl.constexpr, I: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Rows n of each slot's expert of [E, H, I]: [SLOTS, BLOCK_N, BLOCK_K]."""
    k = first + tl.arange(0, BLOCK_K)
    rows = w_ptr + (expert[:, None] * H + n[None, :]) * I  # [SLOTS, BLOCK_N]
    mask = here[:, None] & (n < H)[None, :]
    inside = mask[:, :, None] & (k < I)[None, None, :]
    return tl.load(rows[:, :, None] + k[None, None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["E"])
def _few_down_kernel(
    z_ptr,  # [S, I]
    w_ptr,  # [E, H, I]
    ids_ptr,  # [S]
    weights_ptr,  # [S]
    out_ptr,  # [T, H]
    E,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K, rounded up to a power of two
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out of one token and BLOCK_N columns, all its slots at once.

    PDL: the kernel begins while _few_up_kernel runs; its first weights arrive before z is written.
    """
    columns = (H + BLOCK_N - 1) // BLOCK_N
    tokens = tl.num_programs(0) // columns
    token = (tl.program_id(0) % tokens).to(tl.int64)
    n = (tl.program_id(0) // tokens) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.arange(0, SLOTS)
    entry = token * TOP_K + slot
    expert = tl.load(ids_ptr + entry, mask=slot < TOP_K, other=-1).to(tl.int64)
    here = (expert >= 0) & (expert < E)
    weight = tl.load(weights_ptr + entry, mask=here, other=0.0).to(tl.float32)  # [SLOTS]
    out = tl.zeros((SLOTS, BLOCK_N), tl.float32)
    w = _slots_of_weights(w_ptr, expert, here, n, 0, H, I, BLOCK_K)
    after_predecessor(PDL)
    for first in range(0, I, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        z_ptrs = z_ptr + entry[:, None] * I + k[None, :]
        z = tl.load(z_ptrs, mask=here[:, None] & (k < I)[None, :], other=0.0).to(tl.float32)
        out += tl.sum(w.to(tl.float32) * z[:, None, :], 2)
        w = _slots_of_weights(w_ptr, expert, here, n, first + BLOCK_K, H, I, BLOCK_K)
    out = tl.sum(out * weight[:, None], 0)  # [BLOCK_N]
    tl.store(out_ptr + token * H + n, out.to(out_ptr.dtype.element_ty), mask=n < H)


def are_few(where: torch.device, T: int, K: int, E: int, H: int, I: int) -> bool:
    """True if this form is faster than grouped products, which read the weights of an expert once.

    So it is for one token, and where entries are no more than a part of the experts: each then has
    an expert of its own, or nearly so.
    """
    part = tuning.lookup("portable_experts_few", where, H=H, I=I)["part"]
    return T == 1 or 0 < part * T * K <= E


def plan_few(x, w_down, ids, activation: str, limit: Optional[float]) -> Callable:
    """Returns the forward for few tokens as a function of the tensors for all calls of these
    shapes."""
    (T, H), (E, _, I), K, where = x.shape, w_down.shape, ids.shape[1], x.device
    config = tuning.lookup("portable_experts_few", where, H=H, I=I)
    tile, pdl = config["up"], device.overlaps_launches(where)
    up = Launch(
        _few_up_kernel, T * K * cdiv(I, tile["BLOCK_N"]), where, numbers=(E,),
        constexprs=(H, I, K, activation, limit, tile["BLOCK_N"], tile["BLOCK_K"], pdl),
        options=(("num_warps", tile["num_warps"]),), guarded=True, early=pdl,
    )  # fmt: skip
    tile = config["down"]
    down = Launch(
        _few_down_kernel, T * cdiv(H, tile["BLOCK_N"]), where, numbers=(E,),
        constexprs=(H, I, K, next_power_of_2(K), tile["BLOCK_N"], tile["BLOCK_K"], pdl),
        options=(("num_warps", tile["num_warps"]),), guarded=True, early=pdl,
    )  # fmt: skip

    def run(
        x: torch.Tensor,  # [T, H]
        w_gate_up: torch.Tensor,  # [E, 2 I, H]
        w_down: torch.Tensor,  # [E, H, I]
        ids: torch.Tensor,  # [T, K]
        weights: torch.Tensor,  # [T, K]
        *biases: None,
    ) -> tuple:  # out [T, H], and nothing for a gradient
        z, out = x.new_empty((T * K, I)), x.new_empty((T, H))  # [S, I], [T, H]
        up(x, w_gate_up, ids, z)
        down(z, w_down, ids, weights, out)
        return out, None, None

    return run
