"""The gradient of Kimi Delta Attention on Hopper: portable/backward.py with this room's prepare
and passes over the states (docs/kda.md)."""

from typing import Callable, Optional

import torch

from ...gdn.hopper.plan import CAP, REGISTERS, block_map, lies_for_tma, token_map
from ...gdn.portable.backward_states import gdn_backward_states
from ...gdn.portable.primitives import kv_strides
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch, aligned
from ..call import KdaBackward
from ..portable import backward
from ..portable import prepare as portable
from .gradient_states import kda_states_kernel
from .plan import HEAD_DIM, Prepare, computes


def prepare_kda_chunk_bwd(call: KdaBackward) -> Optional[Callable]:
    """The function that prepare_kda_chunk_bwd of portable/backward.py describes, with Hopper's
    prepare; None for other calls."""
    if not computes(call):
        return None
    return backward.prepare_kda_chunk_bwd(call, _prepare_kind, _states_kind)


def _prepare_kind(call: KdaBackward) -> type:
    return Prepare if aligned(call.q, call.k, call.g) else portable.Prepare


def _states_kind(call: KdaBackward, do: torch.Tensor) -> Callable:
    """For values of 128 channels that TMA can read, the passes below."""
    tokens = (call.v, do)
    fits = call.V == HEAD_DIM and do.dtype == call.v.dtype
    fits = fits and aligned(*tokens) and all(map(lies_for_tma, tokens))
    return kda_backward_states if fits else gdn_backward_states


def kda_backward_states(call: KdaBackward, do, d_final, tb, p, gam, config: dict, ke) -> tuple:
    """h, dh, vt, dv and the initial state's gradient, as gdn_backward_states returns them.

    call.q and call.k are Qd and Kd.
    """
    qd, kd, v, HV, dtype = call.q, call.k, call.v, call.HV, call.v.dtype
    units, packed, initial = call.rows * HV, call.cu_seqlens is not None, call.initial_state
    h, dh = v.new_empty((2, call.rows, HV, HEAD_DIM, HEAD_DIM)).unbind(0)
    vt, dv = v.new_empty((2, *v.shape)).unbind(0)
    d_initial = None if initial is None else torch.empty_like(initial)
    dense = (call.T * HV * HEAD_DIM, HV * HEAD_DIM, HEAD_DIM, 1)
    keys = token_map(qd.shape, dense, dtype, HEAD_DIM, packed)
    out, block = token_map(v.shape, dense, dtype, 64, packed), block_map(units, dtype)
    state = tile_map(dtype, (units * HEAD_DIM, HEAD_DIM), (HEAD_DIM, 1), HEAD_DIM, 64)
    factors = tile_map(torch.float32, (units * HEAD_DIM,), (1,), HEAD_DIM)
    for reverse, k, e, x, y, states, first, last in (
        (True, ke, kd, do, dv, dh, d_final, d_initial),
        (False, kd, ke, v, vt, h, initial, None),
    ):
        given = token_map(x.shape, x.stride(), dtype, 64, packed)
        strides = (kv_strides(z, call.options.state_v_first) for z in (first, last))
        kernel = Launch(
            kda_states_kernel, call.N * HV * 2, v.device,
            maps=(keys, keys, keys, given, out, state, block, block, factors),
            numbers=(*strides, call.T, HV), constexprs=(reverse, REGISTERS[1][1]),
            options=(("num_warps", 4), ("maxnreg", CAP[1]), ("launch_pdl", not reverse)),
            guarded=True,
        )  # fmt: skip
        kernel(k, e, qd, x, y, states, tb, p, gam, tb, first, last, call.cu_seqlens)
    return h, dh, vt, dv, d_initial
