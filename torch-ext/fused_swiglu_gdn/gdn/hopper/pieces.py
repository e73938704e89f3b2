"""Sequences that are split among ranks, on Hopper (gdn/ops_context.py, docs/parallel.md).

One prepare launch serves both the values that the rank sends for its segments (summary.py) and the
ordinary scan, which starts from the states computed from all ranks' values. In the backward the
gradient's pass over the states, without intermediate stores, computes the gradient of the state
before a segment, and its prepare launch serves the ordinary backward, too.

Sizes: T tokens, HV value heads, K = V = 128, C = 64 tokens a chunk.
"""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ...runtime import device
from ...runtime.cache import CallCache
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch
from ..call import GdnCall, GdnGradient
from ..portable import prepare as portable
from ..portable.backward import near
from ..portable.primitives import kv_strides
from .backward import supports_gdn_chunk_bwd
from .chunk import supports_gdn_chunk_fwd
from .gradient_states import gdn_states_kernel
from .plan import CAP, REGISTERS, Prepare, Scan, block_map, reads_by_tma, token_map
from .summary import gdn_summary_kernel


def supports_gdn_pieces_fwd(
    call: GdnCall, rows: Optional[Tensor], sent: Tensor, start: Optional[Tensor]
) -> bool:
    return supports_gdn_chunk_fwd(call) and call.cu_seqlens is not None


_kept, _entries = CallCache(), CallCache()


def gdn_pieces_fwd(
    call: GdnCall,
    rows: Optional[
        Tensor
    ],  # [N] int32: rows of `sent` for segments that continue elsewhere, or < 0
    sent: Tensor,  # [slots, HV, V or V + K, K] fp32, contiguous: receives N^T, and M^T below it
    start: Optional[Tensor],  # [N, HV, V, K] fp32, contiguous: states before the segments, or zeros
) -> Callable:
    """Launches the computation of the values to send, and returns a function for the rest.

    That function maps initial states [N, HV, K, V] to o, states and blocks. call.initial_state
    stands for those initial states: it has their layout.
    """
    key = ((*call.tensors, rows, sent, start), call.options)
    kept = _kept.find(*key) or _kept.keep(*key, _Pieces(call, sent.shape[2] > call.V))
    q, k, v, g, beta, A_log, dt_bias, _, _, cu_seqlens, options = call
    with device.on(call.device):
        blocks = kept.prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
        tb, _, f, decay = blocks
        if rows is not None:
            kept.summary(k, v, tb, f, start, sent, rows, cu_seqlens, decay)

    def finish(initial_state: Tensor) -> tuple:
        with device.on(call.device):
            warm = decay.new_empty(kept.scan.warm)
            o, states, _ = kept.scan(q, k, v, blocks, warm, initial_state, None, cu_seqlens)
        return o, states, tuple(blocks[:3]) if options.save_blocks else None

    return finish


class _Pieces:
    """The launches for all calls with the same shapes, strides, dtypes and options."""

    __slots__ = ("prepare", "scan", "summary")

    def __init__(self, call: GdnCall, with_m: bool):
        k, v, T, HV, units = call.k, call.v, call.T, call.HV, call.rows * call.HV
        self.prepare = Prepare(call) if Prepare.serves(call) else portable.Prepare(call)
        self.scan = Scan(call, behind_prepare=False)
        self.summary = Launch(
            gdn_summary_kernel,
            call.N * HV * (2 if with_m else 1),
            v.device,
            maps=(
                token_map(k.shape, k.stride(), k.dtype, call.K, True),
                token_map(v.shape, v.stride(), v.dtype, 64, True),
                block_map(units, v.dtype),
                tile_map(torch.float32, (units * 256,), (1,), 256),
            ),
            numbers=(T, HV, call.H),
            constexprs=(with_m, *REGISTERS[2]),
            options=(("num_warps", 4), ("maxnreg", CAP[2])),
            guarded=True,
        )


def supports_gdn_entry_bwd(call: GdnCall, gradient: GdnGradient) -> bool:
    tokens = (call.q, call.k, call.v, gradient.do)
    readable = all(reads_by_tma(x) and near(x) is x for x in tokens)
    given = call.initial_state is not None and call.cu_seqlens is not None
    return readable and given and supports_gdn_chunk_bwd(call)


def gdn_entry_bwd(call: GdnCall, gradient: GdnGradient) -> Tuple[Tensor, tuple]:
    """The gradient of initial_state, and Tb, P and F of the chunks."""
    q, k, v, g, beta, A_log, dt_bias, initial, _, cu_seqlens, _ = call
    do, d_final = gradient.do, gradient.d_final_state
    key = ((*call.tensors, do, d_final), call.options)
    kept = _entries.find(*key) or _entries.keep(*key, _Entry(call, do, d_final))
    with device.on(call.device):
        tb, p, f, decay = kept.prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
        d_initial = torch.empty_like(initial)
        # with decays it keeps neither tokens nor states: their maps are of what it reads
        kept.states(k, q, do, do, tb, tb, p, f, tb, d_final, d_initial, cu_seqlens, decay)
    return d_initial, (tb, p, f)


class _Entry:
    """The launches for all calls with the same shapes, strides, dtypes and options."""

    __slots__ = ("prepare", "states")

    def __init__(self, call: GdnCall, do: Tensor, d_final: Optional[Tensor]):
        q, k, T, HV, v_first = call.q, call.k, call.T, call.HV, call.options.state_v_first
        self.prepare = Prepare(call) if Prepare.serves(call) else portable.Prepare(call)
        d_initial = torch.empty_like(call.initial_state, device="meta")
        packed, block = call.cu_seqlens is not None, block_map(call.rows * HV, q.dtype)
        tokens = token_map(do.shape, do.stride(), do.dtype, 64, packed)
        self.states = Launch(
            gdn_states_kernel,
            call.N * HV * 2,
            q.device,
            maps=(
                *(token_map(x.shape, x.stride(), x.dtype, call.K, packed) for x in (k, q)),
                *(tokens, tokens, block, block, block),
                tile_map(torch.float32, (call.rows * HV * 256,), (1,), 256),
            ),
            numbers=(kv_strides(d_final, v_first), kv_strides(d_initial, v_first), T, HV, call.H),
            constexprs=(True, REGISTERS[1][1]),
            options=(("num_warps", 4), ("maxnreg", CAP[1])),
            guarded=True,
        )
