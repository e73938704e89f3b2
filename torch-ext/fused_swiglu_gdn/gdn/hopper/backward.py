"""The gradient of Gated DeltaNet prefill on Hopper.

It is portable/backward.py with other kernels for the states (gradient_states.py) and for queries
and keys (gradient.py).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, C = 64 tokens a chunk,
rows of chunks as in docs/gdn.md.
"""

from typing import Callable, Optional

import torch

from ...runtime.copies import on_dense
from ...runtime.device import multiprocessor_count
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch, steps
from ...runtime.workspace import Workspace
from ..call import GdnBackward
from ..portable.backward import APART, TOKENS, configuration, lies_near
from ..portable.backward_beta import small_betas
from ..portable.backward_gates import Gates
from ..portable.padding import Padded, padding_launch
from ..portable.primitives import kv_strides, on_read
from .gradient import gdn_gradient_kernel
from .gradient_states import gdn_states_kernel
from .plan import (
    CAP,
    REGISTERS,
    Prepare,
    block_map,
    computes,
    lies_for_tma,
    prepare_of,
    token_map,
)

# Registers of the gradient kernel's 12 warps: of the keys' (the queries' get as many), of those
# that load or have little to do; and the cap at launch
KEY_REGISTERS, FEW_REGISTERS, GRADIENT_CAP = 232, 40, 168


def prepare_gdn_chunk_bwd(call: GdnBackward) -> Optional[Callable]:
    """The function that prepare_gdn_chunk_bwd of portable/backward.py describes, by these kernels.

    For fp16 or bf16 and K = V = 128; tokens of other layouts are copied.
    """
    return on_dense(_prepare, call, *APART) if computes(call) else None


def is_readable(x: torch.Tensor) -> bool:
    """True if TMA can read tokens as they lie, from multiples of 16 bytes on."""
    return lies_for_tma(x) and lies_near(x)


def _prepare(call: GdnBackward) -> Callable:
    return on_read(Gradient, call, *TOKENS, lies=is_readable)


class Gradient(Padded):
    """The launches for all calls with the same shapes, strides, dtypes and options."""

    __slots__ = (
        "where", "values_only", "ahead", "prepare", "own", "reverse", "forward", "chunks", "gates",
        "betas", "workspace", "padding",
    )  # fmt: skip

    def __init__(self, call: GdnBackward, ahead: bool = False):
        """ahead: `begun` runs the forward pass, before d_final_state is known."""
        self.ahead = ahead
        do, d_final, prepared = call.do, call.d_final_state, call.prepared
        self.values_only, self.where = call.options.values_only, call.device
        self.padding = padding_launch(call)
        low, fp32 = call.q.dtype, torch.float32
        self.prepare, blocks = None if prepared else prepare_of(call), ()
        self.own = isinstance(self.prepare, Prepare)
        if self.own:
            blocks = self.prepare.arrays(low)
        ends = d_final, gradient_like(call.initial_state)
        self.reverse = pass_over_states(call, do, *ends, reverse=True)
        ends = call.initial_state, None
        self.forward = pass_over_states(call, call.v, *ends, reverse=False, alone=ahead)
        tokens, units = call.B * call.T * call.HV, call.rows * call.HV
        arrays = [(units * call.K * call.V, low), (units * call.K * call.V, low)]  # S, dS
        arrays.append((tokens * call.V, low))  # vt
        if not self.values_only:
            config = configuration(call.N * call.HV, call.K, call.V, low.itemsize, call.device)
            self.chunks = _chunks(call, do)
            self.gates = Gates(call, 1, 1, config["gates"])
            self.betas = small_betas(call, do, config["beta"])
            # cumsum(g), the vectors of queries and of keys, <S, dS>
            arrays += [(units * size, fp32) for size in (64, 8 * 64, 8 * 64, 1)]
        self.workspace = Workspace(*arrays, *blocks)

    def launched(self, *tensors) -> tuple:
        return self.begun(*tensors)(tensors[10])

    def begun(
        self, q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, do, _, *prepared
    ) -> Callable:  # fmt: skip
        """Launches what needs no d_final_state; returns a function of it, of the gradients."""
        memory, (h, dh, vt, *places) = self.workspace(v)
        if self.own:
            *places, tb, p, f, decay = places
            self.prepare.launch(q, k, g, beta, A_log, dt_bias, cu_seqlens, (tb, p, f, decay))
        elif self.prepare is not None:
            tb, p, f, _ = self.prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
        else:
            tb, p, f = prepared
        blocks = (tb, p, f, tb)
        forward = (k, q, v, vt, h, *blocks, initial, None, cu_seqlens, None)
        if self.ahead:
            self.forward(*forward)

        def finish(d_final: Optional[torch.Tensor], memory=memory) -> tuple:
            dv = v.new_empty(v.shape)
            d_initial = None if initial is None else torch.empty_like(initial)
            self.reverse(k, q, do, dv, dh, *blocks, d_final, d_initial, cu_seqlens, None)
            if not self.ahead:
                self.forward(*forward)
            d_initial = None if initial is None else d_initial.contiguous()
            if self.values_only:
                return None, None, dv, None, None, None, None, d_initial
            cumulative, by_query, by_key, ends = places
            dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
            own = (g, A_log, dt_bias, cu_seqlens)
            parts = (by_query, by_key, ends)
            self.chunks(q, k, do, vt, dv, h, dh, *own, f, dq, dk, cumulative, *parts)
            own = (g, beta, A_log, dt_bias, cu_seqlens)
            gates = self.gates(*own, f, *parts)  # dg, dbeta, dA_log, ddt_bias
            of_chunks = (p, f, cumulative, None, None)
            self.betas(k, v, beta, cu_seqlens, *of_chunks, do, vt, dv, h, dh, gates[1])
            return (dq, dk, dv, *gates, d_initial)

        return finish


def pass_over_states(
    call: GdnBackward, x, first, last, reverse: bool, stores: bool = True, alone: bool = False
) -> Launch:
    """The launch of one pass over the states: the backward one of x = dO for the gradient, or the
    forward one of x = v for S.

    first, last: the states at its two ends. stores: it keeps states and deltas of all chunks.
    alone: a forward pass that does not come right behind the backward one, beside which it runs.
    """
    q, v, T, K, HV, rows = call.q, call.v, call.T, call.K, call.HV, call.rows
    v_first, packed = call.options.state_v_first, call.cu_seqlens is not None
    given, block = (
        token_map(x.shape, x.stride(), x.dtype, 64, packed),
        block_map(rows * HV, q.dtype),
    )
    kept = given, block  # never written
    if stores:
        out = token_map(v.shape, (T * HV * K, HV * K, K, 1), v.dtype, 64, packed)
        kept = out, tile_map(q.dtype, (rows * HV * K, K), (K, 1), K, 64)
    maps = (
        *(token_map(y.shape, y.stride(), y.dtype, K, packed) for y in (call.k, q)),
        *(given, *kept, block, block, tile_map(torch.float32, (rows * HV * 256,), (1,), 256)),
    )
    return Launch(
        gdn_states_kernel, call.N * HV * 2, q.device, maps=maps,
        numbers=(kv_strides(first, v_first), kv_strides(last, v_first), T, HV, call.H),
        constexprs=(reverse, REGISTERS[1][1]),
        options=(("num_warps", 4), ("maxnreg", CAP[1]), ("launch_pdl", not (reverse or alone))),
        guarded=True,
    )  # fmt: skip


def gradient_like(state: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """A tensor without memory with the layout of an initial state's gradient.

    The state may be a view; its gradient is dense.
    """
    return None if state is None else torch.empty_like(state, device="meta")


def _chunks(call: GdnBackward, do) -> Launch:
    """Returns the launch for the queries and keys of all chunks."""
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
    return Launch(
        gdn_gradient_kernel, min(multiprocessor_count(q.device.index), rows * H), q.device,
        maps=maps, numbers=(steps(g), *chunks, call.options.scale, rows * H),
        constexprs=(H, HV // H, call.options.use_qk_l2norm, KEY_REGISTERS, FEW_REGISTERS),
        options=(("num_warps", 4), ("maxnreg", GRADIENT_CAP)), guarded=True,
    )  # fmt: skip
