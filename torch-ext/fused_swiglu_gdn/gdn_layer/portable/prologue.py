"""The convolution of a layer over a prompt, for q, k and v in separate or joint tensors.

Sizes: B T, H and HV heads, K and V head dims, D = 2 H K + HV V channels, W taps, N sequences, S
columns of a final state.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...gdn.chunks import count_sequences
from ...runtime import device, tuning
from ...runtime.copies import on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import Prologue
from .causal_conv1d import are_dense, copied, final_tile, steps_of_states
from .causal_conv1d_rows import conv_rows


def channel_block(K: int, V: int) -> int:
    """Widest tile of channels that never spans two heads: a power of two, at most 128."""
    return min(K & -K, V & -V, 128)


@triton.jit
def head_row(
    q_ptr, k_ptr, v_ptr, strides, b, d0, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):
    """(address of token 0 of row b and channel d0 of [q, k, v], stride of its tokens)."""
    # selected, not branched for, and no remainders: Triton goes on knowing what is a multiple of 16
    # and loads 16 bytes at a time
    in_q, in_k = d0 < HK, d0 < 2 * HK
    d_k, d_v = d0 - HK, d0 - 2 * HK
    q_row = q_ptr + b * strides[0] + (d0 // K) * (strides[2] - K) + d0
    k_row = k_ptr + b * strides[3] + (d_k // K) * (strides[5] - K) + d_k
    v_row = v_ptr + b * strides[6] + (d_v // V) * (strides[8] - V) + d_v
    row = tl.where(in_q, q_row, tl.where(in_k, k_row, v_row))
    return row, tl.where(in_q, strides[1], tl.where(in_k, strides[4], strides[7]))


@triton.jit(do_not_specialize=["T", "N", "TILES_T"])
def _gdn_layer_prologue_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    cu_ptr,  # [N + 1] or None
    initial_ptr,  # [N, D, W - 1] or None
    y_ptr,  # [B, T, D]
    final_ptr,  # [N, D, S] or None
    strides,  # of B, T and a head in q, k, v
    initial_strides,  # of N, D, W - 1
    T, N, TILES_T,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    S: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr, RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program makes one tile of y; programs past the last tile make one final state each."""
    pid = tl.program_id(0)
    d0 = (pid % (D // BLOCK_D)) * BLOCK_D
    tile = pid // (D // BLOCK_D)
    rows = N if cu_ptr is None else 1
    row = tile // tl.maximum(TILES_T, 1)
    if tile < rows * TILES_T:
        x_row, step = head_row(q_ptr, k_ptr, v_ptr, strides, row.to(tl.int64), d0, HK, K, V)
        y_row = y_ptr + row.to(tl.int64) * T * D + d0
        t0 = (tile - row * TILES_T) * BLOCK_T
        conv_rows(
            x_row, y_row, weight_ptr, bias_ptr, None, cu_ptr, initial_ptr, (step, 1), (D, 1),
            initial_strides, row, t0, d0, T, D, N, W, SILU, PTX, BLOCK_T, RUN, BLOCK_D,
        )  # fmt: skip
    elif final_ptr is not None:
        n = tile - rows * TILES_T
        row = n if cu_ptr is None else n * 0
        x_row, step = head_row(q_ptr, k_ptr, v_ptr, strides, row.to(tl.int64), d0, HK, K, V)
        final_tile(
            x_row, cu_ptr, initial_ptr, final_ptr, (step, 1), initial_strides, n, d0, T, D,
            W, S, BLOCK_S, BLOCK_D,
        )  # fmt: skip


def prepare_gdn_layer_prologue(call: Prologue) -> Optional[Callable]:
    """The tensors of a call -> act(conv([q, k, v])) [B, T, D], and the last inputs [N, D, S] or
    None: one launch."""
    q, k, v, weight, bias, cu_seqlens, initial_states, (activation, final_width) = call
    (B, T, H, K), V, (D, W), where = q.shape, v.shape[3], weight.shape, q.device
    block = channel_block(K, V)
    if not served(q, k, v, weight, bias, initial_states) or not q.dtype == k.dtype == v.dtype:
        return None
    if block < 16 or any([x.stride(-1) != 1 for x in (q, k, v)]):
        return None
    if not are_dense(weight, bias, None, cu_seqlens):
        return on_copies(prepare_gdn_layer_prologue, call, _copied)
    config = tuning.lookup("portable_causal_conv1d_td_fwd", where, D=D)
    block, S, N = min(block, config["BLOCK_D"]), max(final_width, 1), count_sequences(B, cu_seqlens)
    tiles = cdiv(T, config["BLOCK_T"])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    kernel = Launch(
        _gdn_layer_prologue_kernel, (B * tiles + (N if final_width else 0)) * (D // block), where,
        numbers=(strides, steps_of_states(initial_states), T, N, tiles),
        constexprs=(
            H * K, K, V, D, W, S, activation is not None, device.takes_ptx(where),
            next_power_of_2(S), config["BLOCK_T"], config["RUN"], block,
        ),
        options=(("num_warps", 1),), guarded=True,
    )  # fmt: skip

    def run(q, *tensors):
        y = torch.empty((B, T, D), dtype=q.dtype, device=where)
        final = q.new_empty(N, D, final_width) if final_width else None
        kernel(q, *tensors, y, final)
        return y, final

    return run


def _copied(q, k, v, weight, bias, cu_seqlens, initial_states) -> tuple:
    _, weight, bias, _, *rest = copied(q, weight, bias, None, cu_seqlens, initial_states)
    return q, k, v, weight, bias, *rest
