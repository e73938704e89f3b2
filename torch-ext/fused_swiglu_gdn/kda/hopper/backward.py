"""The gradient of Kimi Delta Attention on Hopper: portable/backward.py with this room's prepare
and passes over the states (docs/kda.md)."""

import functools
from typing import Callable, Optional

import torch

from ...gdn.chunks import CHUNK
from ...gdn.hopper.plan import CAP, REGISTERS, block_map, lies_for_tma, token_map
from ...gdn.portable.backward_states import gdn_backward_states
from ...gdn.portable.primitives import kv_strides
from ...runtime.gluon import TRITON_VERSION, tile_map
from ...runtime.launch import Launch, aligned
from ..call import KdaBackward
from ..portable import backward
from ..portable import prepare as portable
from ..portable.backward_channels import kda_backward_channels
from .channel_levels import CHANNELS, HALF
from .gradient_channels import kda_channels_bwd_kernel
from .gradient_states import kda_states_kernel
from .plan import HEAD_DIM, Prepare, computes


def prepare_kda_chunk_bwd(call: KdaBackward) -> Optional[Callable]:
    """The function that prepare_kda_chunk_bwd of portable/backward.py describes, with Hopper's
    prepare; None for other calls."""
    if not computes(call):
        return None
    return backward.prepare_kda_chunk_bwd(call, _prepare_kind, _states_kind, _channels_kind)


def _prepare_kind(call: KdaBackward) -> type:
    return Prepare if aligned(call.q, call.k, call.g) else portable.Prepare


def _states_kind(call: KdaBackward, do: torch.Tensor) -> Callable:
    """For values of 128 channels that TMA can read, the passes below."""
    tokens = (call.v, do)
    fits = call.V == HEAD_DIM and do.dtype == call.v.dtype
    fits = fits and aligned(*tokens) and all(map(lies_for_tma, tokens))
    return kda_backward_states if fits else gdn_backward_states


def _channels_kind(call: KdaBackward, do: torch.Tensor) -> Callable:
    """For values of 128 channels and tensors that TMA can read, the kernel below. Triton 3.5 ends
    the process over its tiles of three dimensions, which it transposes."""
    tokens = (call.q, call.k, call.g, do)
    fits = TRITON_VERSION >= (3, 6) and call.V == HEAD_DIM and do.dtype == call.v.dtype
    fits = fits and aligned(*tokens) and all(map(lies_for_tma, tokens))
    return channels_gradient if fits else kda_backward_channels


@functools.lru_cache(maxsize=256)
def _pass(shape, rows, N, dtype, where, packed, steps_in, strides, reverse: bool) -> Launch:
    """The launch of one pass for values of a shape; steps_in: strides of v or do; strides: of the
    states at both ends."""
    B, T, HV, D = shape
    dense, units = (T * HV * D, HV * D, D, 1), rows * HV
    keys, block = token_map(shape, dense, dtype, D, packed), block_map(units, dtype)
    given, out = (token_map(shape, x, dtype, 64, packed) for x in (steps_in, dense))
    state = tile_map(dtype, (units * D, D), (D, 1), D, 64)
    gam = tile_map(torch.float32, (units * D,), (1,), D)
    return Launch(
        kda_states_kernel, N * HV * 2, where,
        maps=(keys, keys, keys, given, out, state, block, block, gam),
        numbers=(*strides, T, HV), constexprs=(reverse, REGISTERS[1][1]),
        options=(("num_warps", 4), ("maxnreg", CAP[1]), ("launch_pdl", not reverse)),
    )  # fmt: skip


def kda_backward_states(call: KdaBackward, do, d_final, tb, p, gam, config: dict, ke) -> tuple:
    """h, dh, vt, dv and the initial state's gradient, as gdn_backward_states returns them.

    call.q and call.k are Qd and Kd.
    """
    qd, kd, v, initial, ends = call.q, call.k, call.v, call.initial_state, call.cu_seqlens
    rows, v_first = tb.shape[0], call.options.state_v_first
    h, dh = v.new_empty((2, rows, call.HV, HEAD_DIM, HEAD_DIM)).unbind(0)
    vt, dv = v.new_empty(v.shape), v.new_empty(v.shape)
    d_initial = None if initial is None else torch.empty_like(initial)
    facts = (v.shape, rows, call.N, v.dtype, v.device, ends is not None)
    from_start = (kv_strides(initial, v_first), kv_strides(None, v_first))
    from_end = (kv_strides(d_final, v_first), kv_strides(d_initial, v_first))
    reverse = _pass(*facts, do.stride(), from_end, True)
    reverse(ke, kd, qd, do, dv, dh, tb, p, gam, tb, d_final, d_initial, ends)
    forward = _pass(*facts, v.stride(), from_start, False)
    forward(kd, ke, qd, v, vt, h, tb, p, gam, tb, initial, None, ends)
    return h, dh, vt, dv, d_initial


@functools.lru_cache(maxsize=256)
def _channels(facts: tuple, rows, N, packed, scale, lower, count: int, where) -> Launch:
    """The launch of the channels' gradient. facts: (shape, strides, dtype) of q, k, g and do."""
    (B, T, H, D), _, dtype = facts[0]
    q, k, g = (token_map(*x, CHANNELS.value, packed) for x in facts[:3])
    HV = facts[3][0][2]
    dense = (T * HV * D, HV * D, D, 1)
    do, made = token_map(*facts[3], HALF.value, packed), (facts[3][0], dense, dtype)
    made, units = token_map(*made, HALF.value, packed), rows * HV
    state = tile_map(dtype, (units * D, D), (D, 1), CHANNELS.value, HALF.value)
    pairs = tile_map(dtype, (2 * units * CHUNK, CHUNK), (CHUNK, 1), CHUNK, 16)
    return Launch(
        kda_channels_bwd_kernel, units * (D // CHANNELS.value), where,
        maps=(q, k, g, do, made, made, state, state, pairs),
        numbers=(T, N, -(-T // CHUNK), scale), constexprs=(HV, HV // H, lower, count),
        options=(("num_warps", 4), ("maxnreg", 255)),
    )  # fmt: skip


def channels_gradient(call: KdaBackward, gates, do, vt, dv, h, dh, pairs, config: dict) -> tuple:
    """Returns what kda_backward_channels of portable/backward_channels.py does."""
    q, k, g, options = call.q, call.k, call.g, call.options
    rows, dg, sums = h.shape[0], g.new_empty(g.shape), None
    dq, dk = (gates.new_empty(call.B, call.T, call.HV, call.K) for _ in "qk")
    if call.A_log is not None or call.dt_bias is not None:
        sums = gates.new_empty(2, rows, call.HV, call.K)
    facts = tuple([(tuple(x.shape), x.stride(), x.dtype) for x in (q, k, g, do)])
    packed = call.cu_seqlens is not None
    launch = _channels(
        facts, rows, call.N, packed, options.scale, options.lower_bound, gates.shape[2], q.device
    )
    inputs = (q, k, g, do, vt, dv, h, dh, pairs, call.A_log, call.dt_bias, call.cu_seqlens, gates)
    launch(*inputs, dq, dk, dg, sums)
    return dq, dk, dg, sums
