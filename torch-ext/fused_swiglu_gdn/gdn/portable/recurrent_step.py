"""One token a sequence: the gated delta rule's step, bounded by one read and write of the state.

    S = exp(g) (I - beta k k^T) S + beta k v^T        o = scale * S^T q

Sizes: N sequences, H and HV heads, K and V head dims, P rows of a state pool. Measurements:
docs/gdn_decode.md.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime import tuning
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import RecurrentCall
from .delta import (
    gate_of,
    key_norms,
    load,
    load_gate,
    pool_rows,
    read_step,
    state_tile,
    store,
    write_step,
)
from .gates import write_strength


@triton.jit
def _gdn_recurrent_step_kernel(
    q_ptr,  # [N, H, K]
    k_ptr,  # [N, H, K]
    v_ptr,  # [N, HV, V]
    g_ptr,  # [N, HV], or [N, HV, K] with CHANNELS
    beta_ptr,  # [N, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None; [HV, K] with CHANNELS
    initial_ptr,  # [N or P, HV, K, V] or None
    final_ptr,  # [N or P, HV, K, V] or None; None with INPLACE
    o_ptr,  # [N, HV, V]
    read_ptr,  # [N] rows of initial_ptr, or None
    write_ptr,  # [N] rows of final_ptr, or None
    strides,  # of a row and a head in q, k, v; a row in g, beta, initial, final
    scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L2NORM: tl.constexpr,
    BETA_MAX: tl.constexpr, V_FIRST: tl.constexpr, INPLACE: tl.constexpr, FIRST: tl.constexpr,
    HEAD: tl.constexpr, ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    RELOAD: tl.constexpr, EVICT: tl.constexpr,
    CHANNELS: tl.constexpr,  # every channel of the keys has a gate of its own
    LOWER: tl.constexpr,  # of a bounded gate, or None
):  # fmt: skip
    """A program takes one token and BLOCK_V columns of one state.

    INPLACE writes the tile where it was read, which takes no registers for another address. FIRST
    is the first row of a pool that is no null slot; HEAD and ROW are the strides of a state's heads
    and of their rows. RELOAD reads the tile again for its update, from the cache: with fewer
    registers a program, more programs have their loads in flight. EVICT "evict_first" lets the
    cache evict written lines before lines that are still to be read.
    """
    K_AXIS: tl.constexpr = 1 if V_FIRST else 0
    n, hv, offs_k, offs_v, offs_s = state_tile(
        tl.program_id(0), HV, K, V, V_FIRST, BLOCK_K, BLOCK_V, HEAD, ROW
    )
    h = hv // (HV // H)
    mask_k = None if BLOCK_K == K else offs_k < K
    mask_v = None if V % BLOCK_V == 0 else offs_v < V
    mask = None
    if BLOCK_K != K or V % BLOCK_V != 0:  # [BLOCK_V, BLOCK_K] or [BLOCK_K, BLOCK_V]
        mask = tl.expand_dims(offs_k < K, 1 - K_AXIS) & tl.expand_dims(offs_v < V, K_AXIS)
    row, write_row = pool_rows(n, read_ptr, write_ptr)
    alive = None if read_ptr is None else row >= FIRST
    writes = alive if write_ptr is None else alive & (write_row >= FIRST)
    # every load is under way before the first reduction waits for one
    if initial_ptr is None:
        S = tl.zeros(offs_s.shape, tl.float32)
    else:
        state_ptrs = initial_ptr + row * strides[8] + offs_s
        S = load(state_ptrs, mask, alive)
    q = load(q_ptr + n * strides[0] + h * strides[1] + offs_k, mask_k)
    k = load(k_ptr + n * strides[2] + h * strides[3] + offs_k, mask_k)
    v = load(v_ptr + n * strides[4] + hv * strides[5] + offs_v, mask_v)
    g = load_gate(g_ptr, strides[6], n, hv, offs_k, mask_k, K, CHANNELS)
    g = gate_of(g, A_log_ptr, dt_bias_ptr, hv, offs_k, mask_k, K, CHANNELS, LOWER)
    beta = write_strength(tl.load(beta_ptr + n * strides[7] + hv), BETA_MAX)
    rstd_k, scale, kq = key_norms(q, k, scale, L2NORM)
    delta, o = read_step(S, q, k, v, g, beta, rstd_k, scale, kq, K_AXIS, CHANNELS)
    if alive is not None:
        o = tl.where(alive, o, 0.0)
    store(o_ptr + (n * HV + hv) * V + offs_v, o, mask_v)
    if INPLACE or final_ptr is not None:
        if RELOAD and initial_ptr is not None:
            S = load(state_ptrs, mask, alive)
        S = write_step(S, k, delta, g, K_AXIS, CHANNELS)
        if INPLACE:
            store(state_ptrs, S, mask, alive, EVICT)
        else:
            store(final_ptr + write_row * strides[9] + offs_s, S, mask, writes, EVICT)


def step_config(device, K, size: int, state_v_first) -> dict:
    """Launch configuration for tiles of `size` bytes an element."""
    layout = "vk" if state_v_first else "kv"
    return tuning.lookup(f"portable_gdn_recurrent_{layout}_fwd", device, K=K, STATE_BYTES=size)


def is_dense(state: torch.Tensor) -> bool:
    """True if each row [HV, K, V] is contiguous; rows may have any stride."""
    _, heads, rows, columns = state.stride()
    _, _, R, C = state.shape
    return columns == 1 and rows == C and heads == R * C


def state_steps(state: Optional[torch.Tensor], shape: tuple) -> Optional[tuple]:
    """Strides of heads [R, C] of a state [.., heads, R, C] and of their rows.

    None if columns are not contiguous, rows share memory, or a state exceeds 32-bit offsets.
    """
    heads, R, C = shape
    if state is None or state.numel() == 0:
        return R * C, C
    _, head, row, column = state.stride()
    row = C if R == 1 else row
    head = R * row if heads == 1 else head
    if (C > 1 and column != 1) or min(head, row) < C:
        return None
    reach = (heads - 1) * head + (R - 1) * row + C
    return (head, row) if reach < 2**31 else None


def step_launch(call: RecurrentCall, strides: tuple, steps: tuple) -> Launch:
    """The launch of one token a sequence; steps: state_steps of the initial state."""
    options, initial = call.options, call.initial_state
    moves = call.output_state_indices is not None
    size = 4 if initial is None else initial.element_size()
    config = step_config(call.device, call.K, size, options.state_v_first)
    constexprs = (
        call.H, call.HV, call.K, call.V, options.use_qk_l2norm, options.beta_max,
        options.state_v_first, options.inplace and not moves, options.null_index + 1, *steps,
        next_power_of_2(call.K), config["BLOCK_V"], config["RELOAD"], config["EVICT"],
        call.channels, options.lower_bound,
    )  # fmt: skip
    return Launch(
        _gdn_recurrent_step_kernel, call.N * call.HV * cdiv(call.V, config["BLOCK_V"]),
        call.device, numbers=(strides, options.scale), constexprs=constexprs,
        options=(("num_warps", config["num_warps"]),), guarded=True,
    )  # fmt: skip
