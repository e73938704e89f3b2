"""The gradient of Gated DeltaNet prefill on Hopper: portable/backward.py with kernels of its own
for the states (gradient_states.py) and for queries and keys (gradient.py).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, C = 64 tokens a chunk,
rows of chunks as in docs/gdn.md.
"""

from typing import Optional

import torch

from ...runtime import device
from ...runtime.cache import CallCache
from ...runtime.device import multiprocessor_count
from ...runtime.dtypes import HALF
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch, steps
from ..call import GdnCall, GdnGradient
from ..portable import backward as common
from ..portable.primitives import kv_strides
from .gradient import gdn_gradient_kernel
from .gradient_states import gdn_states_kernel
from .plan import CAP, HEAD_DIM, REGISTERS, Prepare, block_map, has_wgmma, reads_by_tma, token_map

# Registers of the gradient kernel's 12 warps: of the keys' (the queries' get as many), of those
# that load or have little to do; and the cap at launch
KEY_REGISTERS, FEW_REGISTERS, GRADIENT_CAP = 232, 40, 168


def supports_gdn_chunk_bwd(call: GdnCall, gradient: Optional[GdnGradient] = None) -> bool:
    """Half precision, K = V = 128; layouts are the launcher's to mend."""
    return (
        has_wgmma(call.device)
        and call.q.dtype in HALF
        and call.q.dtype == call.k.dtype == call.v.dtype
        and call.K == call.V == HEAD_DIM
        and call.HV > 0
        and 0 < call.B * call.T < 2**30
    )


def gdn_chunk_bwd(call: GdnCall, gradient: GdnGradient) -> tuple:
    """As common's."""
    if gradient.prepared is None and Prepare.serves(call):
        with device.on(call.device):
            gates = (call.g, call.beta, call.A_log, call.dt_bias)
            *blocks, _ = Prepare(call)(call.q, call.k, *gates, call.cu_seqlens)
        gradient = gradient._replace(prepared=tuple(blocks))
    q, k, v, do = (
        x if reads_by_tma(x) else x.clone(memory_format=torch.contiguous_format)
        for x in (call.q, call.k, call.v, gradient.do)
    )
    call, gradient = call._replace(q=q, k=k, v=v), gradient._replace(do=do)
    return common.gdn_chunk_bwd(call, gradient, _passes, _query_and_key)


_passing, _chunking = CallCache(), CallCache()


def _passes(call: GdnCall, do, d_final, tb, p, f, config: dict) -> tuple:
    """As common's gdn_backward_states; config is not used."""
    key = ((*call.tensors, do, d_final), call.options)
    both = _passing.find(*key) or _passing.keep(*key, _Passes(call, do, d_final))
    return both(call, do, d_final, tb, p, f)


class _Passes:
    """Both launches over the states, for calls of one kind."""

    __slots__ = ("shape", "launches")

    def __init__(self, call: GdnCall, do, d_final):
        q, v, T, H, K, HV, rows = call.q, call.v, call.T, call.H, call.K, call.HV, call.rows
        v_first, packed = call.options.state_v_first, call.cu_seqlens is not None
        self.shape = (rows, HV, K, K)
        keys = [token_map(x.shape, x.stride(), x.dtype, K, packed) for x in (call.k, q)]
        out = token_map(v.shape, (T * HV * K, HV * K, K, 1), v.dtype, 64, packed)
        state = tile_map(q.dtype, (rows * HV * K, K), (K, 1), K, 64)
        block = block_map(rows * HV, q.dtype)
        factors = tile_map(torch.float32, (rows * HV * 256,), (1,), 256)
        self.launches = []
        # an initial state may be a view; its gradient is then dense
        initial = call.initial_state
        d_initial = None if initial is None else torch.empty_like(initial, device="meta")
        for reverse, x, first, last in (
            (True, do, d_final, d_initial),
            (False, v, initial, None),
        ):
            strides = (kv_strides(first, v_first), kv_strides(last, v_first))
            given = token_map(x.shape, x.stride(), x.dtype, 64, packed)
            kernel = Launch(
                gdn_states_kernel,
                call.N * HV * 2,
                q.device,
                maps=(*keys, given, out, state, block, block, factors),
                numbers=(*strides, T, HV, H),
                constexprs=(reverse, REGISTERS[1][1]),
                options=(("num_warps", 4), ("maxnreg", CAP[1]), ("launch_pdl", not reverse)),
                guarded=True,
            )
            self.launches.append(kernel)

    def __call__(self, call: GdnCall, do, d_final, tb, p, f) -> tuple:
        q, k, v, initial = call.q, call.k, call.v, call.initial_state
        h, dh = q.new_empty(self.shape), q.new_empty(self.shape)
        vt, dv = v.new_empty(v.shape), v.new_empty(v.shape)
        d_initial = None if initial is None else torch.empty_like(initial)
        reverse, forward = self.launches
        for kernel, tokens, states in (
            (reverse, (do, dv, dh), (d_final, d_initial)),
            (forward, (v, vt, h), (initial, None)),
        ):
            kernel(k, q, *tokens, tb, p, f, tb, *states, call.cu_seqlens)
        return h, dh, vt, dv, d_initial


def _query_and_key(call: GdnCall, f, do, h, dh, vt, dv, config: dict) -> tuple:
    """As common's query_and_key; config is not used."""
    key = ((*call.tensors, do), call.options)
    all_chunks = _chunking.find(*key) or _chunking.keep(*key, _Chunks(call, do))
    return all_chunks(call, f, do, h, dh, vt, dv)


class _Chunks:
    """The launch for all chunks, for calls of one kind."""

    __slots__ = ("kernel",)

    def __init__(self, call: GdnCall, do):
        q, g, T, H, K, HV, rows = call.q, call.g, call.T, call.H, call.K, call.HV, call.rows
        packed = call.cu_seqlens is not None
        made = (T * HV * K, HV * K, K, 1)  # strides of vt and dv
        states = tile_map(q.dtype, (rows * HV * K, K), (K, 1), K, 64)
        maps = (
            *(token_map(x.shape, x.stride(), x.dtype, K, packed) for x in (q, call.k)),
            token_map(do.shape, do.stride(), do.dtype, 64, packed),
            *(token_map(do.shape, made, do.dtype, 64, packed) for _ in range(2)),
            *(states, states),
        )
        chunks = (T, call.N, -(-T // 64))
        self.kernel = Launch(
            gdn_gradient_kernel,
            min(multiprocessor_count(q.device.index), rows * H),
            q.device,
            maps=maps,
            numbers=(steps(g), *chunks, call.options.scale, rows * H),
            constexprs=(H, HV // H, call.options.use_qk_l2norm, KEY_REGISTERS, FEW_REGISTERS),
            options=(("num_warps", 4), ("maxnreg", GRADIENT_CAP)),
            guarded=True,
        )

    def __call__(self, call: GdnCall, f, do, h, dh, vt, dv) -> tuple:
        q, k, rows, HV = call.q, call.k, call.rows, call.HV
        dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
        cumulative, ends = f.new_empty(rows, HV, 64), f.new_empty(rows, HV, 1)
        by_query, by_key = f.new_empty(rows, HV, 1, 8, 64), f.new_empty(rows, HV, 1, 8, 64)
        tokens = (q, k, do, vt, dv, h, dh)
        gates = (call.g, call.A_log, call.dt_bias, call.cu_seqlens)
        self.kernel(*tokens, *gates, f, dq, dk, cumulative, by_query, by_key, ends)
        return dq, dk, cumulative, by_query, by_key, ends
