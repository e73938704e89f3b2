"""The gated delta rule token by token, for decoding.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Sizes: B T H HV K V; N sequences; P rows of a state pool. Measurements: docs/gdn_decode.md.
"""

import math
from typing import Callable, Optional, Tuple

import torch
import triton
import triton.language as tl

from ...runtime.copies import on_dense
from ...runtime.dtypes import SERVED
from ...runtime.launch import Launch
from ...runtime.primitives import sequence_bounds
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
from .recurrent_step import is_dense, state_steps, step_config, step_launch


@triton.jit
def _load_token(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, strides, token, h, hv, offs_k, offs_v, mask_k, mask_v,
    K: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Loads q, k [BLOCK_K], v [BLOCK_V] in fp32 and raw g and beta of a token and a value head."""
    q = load(q_ptr + token * strides[0] + h * strides[1] + offs_k, mask_k)
    k = load(k_ptr + token * strides[2] + h * strides[3] + offs_k, mask_k)
    v = load(v_ptr + token * strides[4] + hv * strides[5] + offs_v, mask_v)
    g = load_gate(g_ptr, strides[6], token, hv, offs_k, mask_k, K, CHANNELS)
    beta = tl.load(beta_ptr + token * strides[7] + hv)
    return q, k, v, g, beta


@triton.jit
def _gdn_recurrent_fwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV], or [B, T, HV, K] with CHANNELS
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None; [HV, K] with CHANNELS
    initial_ptr,  # [N or P, HV, K, V] or None
    final_ptr,  # [N or P, HV, K, V], [B, T, HV, K, V] with ALL_STATES, or None
    o_ptr,  # [B, T, HV, V]
    read_ptr,  # [N] rows of initial_ptr, [N, COLUMNS] with accepted_ptr, or None
    write_ptr,  # [N] rows of final_ptr, or None
    accepted_ptr,  # [N] which of its rows a sequence starts from, counted from 1, or None
    cu_ptr,  # [N + 1] or None
    # of a token and a head in q, k, v; a token in g, beta; a row of initial, final; a sequence in
    # read_ptr with accepted_ptr
    strides,
    T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L2NORM: tl.constexpr,
    BETA_MAX: tl.constexpr, V_FIRST: tl.constexpr, ALL_STATES: tl.constexpr, COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,  # the first row of a pool that is no null slot
    HEAD: tl.constexpr,  # elements from a head of a state to the next, and from a row
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr,  # every channel of the keys has a gate of its own
    LOWER: tl.constexpr,  # of a bounded gate, or None
):  # fmt: skip
    """A program runs BLOCK_V columns of one state of one sequence through all of its tokens."""
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
    if accepted_ptr is None:
        row, write_row = pool_rows(n, read_ptr, write_ptr)
    else:
        accepted = tl.minimum(tl.maximum(tl.load(accepted_ptr + n), 1), COLUMNS)
        own_rows = read_ptr + n * strides[10]
        row = tl.load(own_rows + accepted - 1).to(tl.int64)
        write_row = row
    alive = None if read_ptr is None else row >= FIRST
    writes = alive if write_ptr is None else alive & (write_row >= FIRST)
    first = n * T
    length = T
    if cu_ptr is not None:
        first, stop = sequence_bounds(cu_ptr, n, T)
        length = (stop - first).to(tl.int32)
    # every load is under way before the first reduction waits for one
    if initial_ptr is None:
        S = tl.zeros(offs_s.shape, tl.float32)
    else:
        S = load(initial_ptr + row * strides[8] + offs_s, mask, alive)
    last = first + length - 1
    token = tl.maximum(tl.minimum(first, last), 0)
    q, k, v, g, beta = _load_token(
        q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, strides, token, h, hv, offs_k, offs_v, mask_k,
        mask_v, K, CHANNELS,
    )  # fmt: skip
    if accepted_ptr is not None:
        tl.debug_barrier()  # every thread has read its state before any writes
    for t in range(0, length):
        token = first + t
        now_q, now_k, now_v = q, k, v
        now_g = gate_of(g, A_log_ptr, dt_bias_ptr, hv, offs_k, mask_k, K, CHANNELS, LOWER)
        now_beta = write_strength(beta, BETA_MAX)
        q, k, v, g, beta = _load_token(
            q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, strides, tl.minimum(token + 1, last), h, hv,
            offs_k, offs_v, mask_k, mask_v, K, CHANNELS,
        )  # fmt: skip
        rstd_k, scale_q, kq = key_norms(now_q, now_k, scale, L2NORM)
        delta, o = read_step(
            S, now_q, now_k, now_v, now_g, now_beta, rstd_k, scale_q, kq, K_AXIS, CHANNELS
        )
        S = write_step(S, now_k, delta, now_g, K_AXIS, CHANNELS)
        if alive is not None:
            o = tl.where(alive, o, 0.0)
        store(o_ptr + (token * HV + hv) * V + offs_v, o, mask_v)
        if ALL_STATES:
            store(final_ptr + token * strides[9] + offs_s, S, mask)
        if accepted_ptr is not None:
            own_row = tl.load(own_rows + tl.minimum(t, COLUMNS - 1)).to(tl.int64)
            is_own = alive & (own_row >= FIRST) & (t < COLUMNS)
            store(final_ptr + own_row * strides[9] + offs_s, S, mask, is_own)
    if not ALL_STATES and final_ptr is not None and accepted_ptr is None:
        store(final_ptr + write_row * strides[9] + offs_s, S, mask, writes)


def _token_stride(x: torch.Tensor) -> Optional[int]:
    """Distance of one token of x [B, T, ...] from the next, across the batch too, or None."""
    B, T = x.shape[:2]
    if T <= 1:
        return x.stride(0)
    return x.stride(1) if B == 1 or x.stride(0) == T * x.stride(1) else None


def _evenly(x: torch.Tensor, T: int) -> torch.Tensor:
    """x, or a copy whose tokens are equally far apart; one token of zeros if there is none."""
    if T == 0:  # the kernel reads a token before it knows that there is none
        return x.new_zeros(x.shape[0], 1, *x.shape[2:])
    return x if _token_stride(x) is not None else x.contiguous()


def _tokens_launch(call: RecurrentCall, strides: tuple, steps: tuple) -> Launch:
    """The launch of any number of tokens; steps: state_steps of the initial state."""
    options, K, V, columns = call.options, call.K, call.V, 0
    config = step_config(call.device, K, 4, options.state_v_first)
    if call.num_accepted_tokens is not None:
        columns = call.state_indices.shape[1]
        strides += (call.state_indices.stride(0),)
    constexprs = (
        call.H, call.HV, K, V, options.use_qk_l2norm, options.beta_max, options.state_v_first,
        options.all_states, columns, options.null_index + 1, *steps, next_power_of_2(K),
        config["BLOCK_V"], call.channels, options.lower_bound,
    )  # fmt: skip
    return Launch(
        _gdn_recurrent_fwd_kernel, call.N * call.HV * cdiv(V, config["BLOCK_V"]), call.device,
        numbers=(strides, call.T, options.scale), constexprs=constexprs,
        options=(("num_warps", config["num_warps"]),), guarded=True,
    )  # fmt: skip


class _Recurrent:
    """The launch for all calls with the same shapes, strides, dtypes and options."""

    __slots__ = (
        "kernel", "single", "T", "uneven", "copies", "into", "like_v", "made", "like_initial",
        "inplace", "to_pool",
    )  # fmt: skip

    def __init__(self, call: RecurrentCall):
        v, options, initial = call.v, call.options, call.initial_state
        self.T, self.inplace, row = call.T, options.inplace, math.prod(call.state_shape)
        drafts = call.num_accepted_tokens is not None
        self.single = call.B > 0 and call.T == 1 and call.cu_seqlens is None
        self.single = self.single and not options.all_states and not drafts
        # the kernel for one token writes states where it has read them, unless rows are given
        self.to_pool = options.inplace
        if self.single:
            self.to_pool = options.inplace and call.output_state_indices is not None
        self.copies = initial is not None and not options.inplace and not is_dense(initial)
        self.into = call.out is not None and call.out.is_contiguous()
        self.like_v = torch.empty_like(v).is_contiguous()
        self.made = None  # the shape of new states
        if not options.inplace and (options.output_final_state or options.all_states):
            sequences = (call.B, call.T) if options.all_states else (call.N,)
            self.made = (*sequences, *call.state_shape)
        given = initial is not None and (initial.dtype, initial.shape, initial.is_contiguous())
        self.like_initial = self.made is not None and given == (torch.float32, self.made, True)
        tokens = call.tensors[:5]
        self.uneven = call.T == 0 or any([_token_stride(x) is None for x in tokens])
        q, k, v, g, beta = [_evenly(x, call.T) for x in tokens] if self.uneven else tokens
        read = 0 if initial is None else row if self.copies else initial.stride(0)
        strides = (
            _token_stride(q), q.stride(2), _token_stride(k), k.stride(2), _token_stride(v),
            v.stride(2), _token_stride(g), _token_stride(beta), read,
            initial.stride(0) if options.inplace else row,
        )  # fmt: skip
        steps = state_steps(None if self.copies else initial, call.state_shape)
        self.kernel = (step_launch if self.single else _tokens_launch)(call, strides, steps)

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, initial, read, write, accepted=None,
        cu_seqlens=None, out=None,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:  # fmt: skip
        """o and the final state, every state, the state written in place, or None."""
        if self.into:
            o = out
        else:  # empty_like takes half the time of an allocation by shape
            o = torch.empty_like(v) if self.like_v else v.new_empty(v.shape)
        final = initial if self.to_pool else None
        if self.like_initial:
            final = torch.empty_like(initial)
        elif self.made is not None:
            final = v.new_empty(self.made, dtype=torch.float32)
        if self.copies:
            initial = initial.contiguous()
        if self.single:
            self.kernel(q, k, v, g, beta, A_log, dt_bias, initial, final, o, read, write)
        else:
            tokens = (q, k, v, g, beta)
            if self.uneven:
                tokens = [_evenly(x, self.T) for x in tokens]
            more = (read, write, accepted, cu_seqlens)
            self.kernel(*tokens, A_log, dt_bias, initial, final, o, *more)
        if out is not None and not self.into:
            o = out.copy_(o)
        return o, initial if self.inplace else final


def _is_taken(call: RecurrentCall) -> bool:
    if not {call.q.dtype, call.g.dtype, call.beta.dtype}.issubset(SERVED):
        return False
    initial = call.initial_state
    if initial is None:
        return True
    if call.options.inplace:
        reached = state_steps(initial, call.state_shape) is not None
    else:  # others are copied, which a pool is too large for
        reached = call.state_indices is None or is_dense(initial)
    return initial.dtype in SERVED and reached


def prepare_gdn_recurrent_fwd(call: RecurrentCall) -> Optional[Callable]:
    """The call's tensors -> o, and the final state, every state, the pool, or None: one launch.

    For fp16, bf16 and fp32, and for states written in place whose columns are contiguous.
    """
    return on_dense(_Recurrent, call, "initial_state", "out") if _is_taken(call) else None
