"""Sequences that are split among ranks, on Hopper (gdn/ops_context.py, docs/parallel.md).

One prepare launch serves both the values that the rank sends for its segments (summary.py) and the
ordinary scan, which starts from the states computed from all ranks' values. In the backward the
gradient's pass over the states, without intermediate stores, computes the gradient of the state
before a segment, and its prepare launch serves the ordinary backward, too.

Sizes: T tokens, HV value heads, K = V = 128, C = 64 tokens a chunk.
"""

import functools
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ...runtime import device
from ...runtime.copies import on_dense
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch
from ..call import GdnBackward, GdnEntry, GdnPieces
from ..portable.backward import APART, TOKENS
from ..portable.primitives import on_read
from .backward import Gradient, is_readable, pass_over_states
from .chunk import Halves, prompts
from .plan import CAP, REGISTERS, Scan, block_map, computes, prepare_of, token_map
from .summary import gdn_summary_kernel


def prepare_gdn_pieces_fwd(call: GdnPieces) -> Optional[Callable]:
    """The call's tensors -> a function for the rest, once what is to be sent is launched.

    That function maps initial states [N, HV, K, V] to o, states, and Tb, P and F if the call saves
    them. call.initial_state stands for those initial states: it has their layout.
    """
    prepare = functools.partial(prompts, _Pieces)
    return on_dense(prepare, call, "g", "beta", "initial_state", "sent", "start")


class _Pieces(Halves):
    __slots__ = ("summary",)

    def __init__(self, call: GdnPieces):
        super().__init__(call, Scan(call, behind_prepare=False))
        with_m = call.sent.shape[2] > call.V
        k, v, T, HV, units = call.k, call.v, call.T, call.HV, call.rows * call.HV
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

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens, rows, sent, start
    ) -> Callable:  # fmt: skip
        with device.on(v.device):
            blocks, warm, saved, memory = self.first(q, k, g, beta, A_log, dt_bias, cu_seqlens)
            tb, _, f, decay = blocks
            if rows is not None:
                self.summary(k, v, tb, f, start, sent, rows, cu_seqlens, decay)

        def finish(initial_state: Tensor, _of_the_blocks=memory) -> tuple:
            with device.on(v.device):
                o, states, _ = self.scan(q, k, v, blocks, warm, initial_state, None, cu_seqlens)
            return o, states, saved if self.saves else None

        return finish


def prepare_gdn_entry_bwd(call: GdnEntry) -> Optional[Callable]:
    """The call's tensors -> Tb, P and F of the chunks; E goes to call.sent."""
    return on_dense(_prepare_entry, call, *APART, "sent") if computes(call) else None


def _prepare_entry(call: GdnEntry) -> Optional[Callable]:
    fits = all(is_readable(call[i]) for i in TOKENS)
    return on_read(_Entry, call, *TOKENS, lies=is_readable) if fits else None


class _Entry:
    """The launches for all calls with the same shapes, strides, dtypes and options."""

    __slots__ = ("prepare", "states")

    def __init__(self, call: GdnEntry):
        self.prepare, (slot, head, *_) = prepare_of(call), call.sent.stride()
        shape, strides = (call.N, *call.state_shape), (slot, head, call.V, 1)
        ends = call.d_final_state, torch.empty_strided(shape, strides, device="meta")
        self.states = pass_over_states(call, call.do, *ends, reverse=True, stores=False)

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens, do, d_final, sent
    ) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        with device.on(q.device):
            tb, p, f, decay = self.prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
            # with decays it keeps neither tokens nor states: their maps are of what it reads
            self.states(k, q, do, do, tb, tb, p, f, tb, d_final, sent, cu_seqlens, decay)
        return tb, p, f


def prepare_gdn_begun_bwd(call: GdnBackward) -> Optional[Callable]:
    """The call's tensors -> a function of d_final_state, which returns the gradients as
    prepare_gdn_chunk_bwd has them. What does not need it is launched before.

    call.d_final_state stands for it: it has its layout.
    """
    return on_dense(_prepare_begun, call, *APART) if computes(call) else None


def _prepare_begun(call: GdnBackward) -> Callable:
    return on_read(_Begun, call, *TOKENS, lies=is_readable)


class _Begun(Gradient):
    """The launches for all calls with the same shapes, strides, dtypes and options."""

    __slots__ = ()

    def __init__(self, call: GdnBackward):
        super().__init__(call, ahead=True)

    def __call__(self, *tensors) -> Callable:
        with device.on(self.where):
            finish = self.begun(*tensors)

        def on_device(d_final_state: Tensor) -> tuple:
            with device.on(self.where):  # no padding: a rank's segments have all its tokens
                return finish(d_final_state)

        return on_device
