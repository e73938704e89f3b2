"""The gradient of Gated DeltaNet prefill on Hopper: portable/backward.py with kernels of its own
for the states (gradient_states.py) and for queries and keys (gradient.py).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, C = 64 tokens a chunk,
rows of chunks as in docs/gdn.md.
"""

import torch

from ...runtime.cache import CallCache
from ...runtime.device import multiprocessor_count
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch, steps
from ..portable import backward as common
from ..portable.backward_states import kv_strides
from .gradient import gdn_gradient_kernel
from .gradient_states import gdn_states_kernel
from .plan import CAP, HEAD_DIM, REGISTERS, block_map, has_wgmma, reads_by_tma, token_map

# Registers of the gradient kernel's 12 warps: of the keys' (the queries' get as many), of those
# that load or have little to do; and the cap at launch
KEY_REGISTERS, FEW_REGISTERS, GRADIENT_CAP = 232, 40, 168


def supports_gdn_chunk_bwd(q, k, v, *_) -> bool:
    """Half precision, K = V = 128; layouts are the launcher's to mend."""
    return (
        has_wgmma(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[3] == v.shape[3] == HEAD_DIM
        and v.shape[2] > 0
        and 0 < q.shape[0] * q.shape[1] < 2**30
    )


def gdn_chunk_bwd(q, k, v, *args):
    """As common's."""
    *before, do = args[:7]
    q, k, v, do = (
        x if reads_by_tma(x) else x.clone(memory_format=torch.contiguous_format)
        for x in (q, k, v, do)
    )
    return common.gdn_chunk_bwd(q, k, v, *before, do, *args[7:], _passes, _query_and_key)


_passing, _chunking = CallCache(), CallCache()


def _passes(q, k, v, do, tb, p, f, initial_state, d_final_state, cu_seqlens, v_first, config):
    """As common's gdn_backward_states; config is not used."""
    inputs = (q, k, v, do, tb, p, f, initial_state, d_final_state, cu_seqlens)
    return _passing.get(_Passes, inputs, (v_first,))(*inputs)


class _Passes:
    """Both launches over the states, for calls of one kind."""

    __slots__ = ("shape", "launches")

    def __init__(self, q, k, v, do, tb, p, f, initial, d_final, cu_seqlens, v_first):
        (B, T, H, K), (rows, HV) = q.shape, f.shape[:2]
        packed = cu_seqlens is not None
        N = cu_seqlens.shape[0] - 1 if packed else B
        self.shape = (rows, HV, K, K)
        keys = [token_map(x.shape, x.stride(), x.dtype, K, packed) for x in (k, q)]
        out = token_map(v.shape, (T * HV * K, HV * K, K, 1), v.dtype, 64, packed)
        state = tile_map(q.dtype, (rows * HV * K, K), (K, 1), K, 64)
        block = block_map(rows * HV, q.dtype)
        factors = tile_map(torch.float32, (rows * HV * 256,), (1,), 256)
        self.launches = []
        # an initial state may be a view; its gradient is then dense
        d_initial = None if initial is None else torch.empty_like(initial, device="meta")
        for reverse, x, first, last in (
            (True, do, d_final, d_initial),
            (False, v, initial, None),
        ):
            strides = (kv_strides(first, v_first), kv_strides(last, v_first))
            given = token_map(x.shape, x.stride(), x.dtype, 64, packed)
            kernel = Launch(
                gdn_states_kernel,
                N * HV * 2,
                q.device,
                maps=(*keys, given, out, state, block, block, factors),
                numbers=(*strides, T, HV, H),
                constexprs=(reverse, REGISTERS[1][1]),
                options=(("num_warps", 4), ("maxnreg", CAP[1]), ("launch_pdl", not reverse)),
                guarded=True,
            )
            self.launches.append(kernel)

    def __call__(self, q, k, v, do, tb, p, f, initial, d_final, cu_seqlens):
        h, dh = q.new_empty(self.shape), q.new_empty(self.shape)
        vt, dv = v.new_empty(v.shape), v.new_empty(v.shape)
        d_initial = None if initial is None else torch.empty_like(initial)
        reverse, forward = self.launches
        for kernel, tokens, states in (
            (reverse, (do, dv, dh), (d_final, d_initial)),
            (forward, (v, vt, h), (initial, None)),
        ):
            kernel(k, q, *tokens, tb, p, f, tb, *states, cu_seqlens)
        return h, dh, vt, dv, d_initial


def _query_and_key(
    q, k, g, A_log, dt_bias, cu_seqlens, f, do, h, dh, vt, dv, scale, use_qk_l2norm, config
):
    """As common's query_and_key; config is not used."""
    inputs = (q, k, g, A_log, dt_bias, cu_seqlens, f, do)
    return _chunking.get(_Chunks, inputs, (scale, use_qk_l2norm))(*inputs, h, dh, vt, dv)


class _Chunks:
    """The launch for all chunks, for calls of one kind."""

    __slots__ = ("kernel",)

    def __init__(self, q, k, g, A_log, dt_bias, cu_seqlens, f, do, scale, use_qk_l2norm):
        (B, T, H, K), (rows, HV) = q.shape, f.shape[:2]
        packed = cu_seqlens is not None
        made = (T * HV * K, HV * K, K, 1)  # strides of vt and dv
        states = tile_map(q.dtype, (rows * HV * K, K), (K, 1), K, 64)
        maps = (
            *(token_map(x.shape, x.stride(), x.dtype, K, packed) for x in (q, k)),
            token_map(do.shape, do.stride(), do.dtype, 64, packed),
            *(token_map(do.shape, made, do.dtype, 64, packed) for _ in range(2)),
            *(states, states),
        )
        N = cu_seqlens.shape[0] - 1 if packed else B
        self.kernel = Launch(
            gdn_gradient_kernel,
            min(multiprocessor_count(q.device.index), rows * H),
            q.device,
            maps=maps,
            numbers=(steps(g), T, N, -(-T // 64), scale, rows * H),
            constexprs=(H, HV // H, use_qk_l2norm, KEY_REGISTERS, FEW_REGISTERS),
            options=(("num_warps", 4), ("maxnreg", GRADIENT_CAP)),
            guarded=True,
        )

    def __call__(self, q, k, g, A_log, dt_bias, cu_seqlens, f, do, h, dh, vt, dv):
        rows, HV = f.shape[:2]
        dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
        cumulative, ends = f.new_empty(rows, HV, 64), f.new_empty(rows, HV, 1)
        by_query, by_key = f.new_empty(rows, HV, 1, 8, 64), f.new_empty(rows, HV, 1, 8, 64)
        tensors = (q, k, do, vt, dv, h, dh)
        made = (dq, dk, cumulative, by_query, by_key, ends)
        self.kernel(*tensors, g, A_log, dt_bias, cu_seqlens, f, *made)
        return dq, dk, cumulative, by_query, by_key, ends
