"""Chunked Kimi Delta Attention on Hopper: prepare in one launch, then the scan (docs/kda.md)."""

from typing import Callable, Optional

import torch

from ...gdn.chunks import CHUNK
from ...gdn.hopper.chunk import dense_heads
from ...gdn.hopper.plan import (
    CAP,
    MIN_SEGMENT_TOKENS,
    REGISTERS,
    block_map,
    carry_launch,
    count_long,
    count_slots,
    lies_for_tma,
    most_segments,
    token_map,
)
from ...gdn.hopper.scan import gdn_scan_fwd_kernel
from ...gdn.hopper.scheduler import LONE_LOOK_BACK, LOOK_BACK
from ...gdn.portable.cuts import FEWEST
from ...gdn.portable.primitives import are_served
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch, aligned, by_alignment
from ..call import KdaCall
from ..portable import chunk as portable
from ..portable.recurrent import on_dense_gates
from .backward import prepare_kda_chunk_bwd  # noqa: F401
from .plan import HEAD_DIM, Prepare, computes

SHORT_SEGMENT_TOKENS = 256  # the shortest of a sequence in three or more


def prepare_kda_chunk_fwd(call: KdaCall) -> Optional[Callable]:
    """The function that prepare_kda_chunk_fwd of portable/chunk.py describes, with the prepare
    above; None for other calls."""
    return on_dense_gates(_prepare, call, "initial_state") if are_served(call) else None


def _prepare(call: KdaCall) -> Optional[Callable]:
    return by_alignment(_made, call, 0, 1, 2, 3) if computes(call) else None


def _made(call: KdaCall) -> Callable:
    return (Chunked if aligned(*call[:4]) else portable.Chunked)(call)


class Scan:
    """The launches of the gated delta rule's scan for calls of one kind, one state warpgroup a CTA.

    A sequence is cut where heads are few (docs/gdn_hopper.md). Short ones, and those of so many
    heads that there are two segments, only where the gates show that the state before has no
    effect: to find it would take as long as not to cut. Raw gates without a bound hardly ever do, a
    chunk of a call that may be cut takes longer, which given gates may not be worth, and a pool's
    row is read by the first segment and written by the last.
    """

    __slots__ = ("cuts", "warm", "transition", "carry", "kernel")

    def __init__(self, call: KdaCall):
        v, N, HV, options, dtype = call.v, call.N, call.HV, call.options, call.v.dtype
        units, packed = call.rows * HV, call.cu_seqlens is not None
        size = (call.B, call.T, HV, HEAD_DIM)
        dense = (call.T * HV * HEAD_DIM, HV * HEAD_DIM, HEAD_DIM, 1)
        operand, block = token_map(size, dense, dtype, HEAD_DIM, packed), block_map(units, dtype)
        maps = (
            operand, operand, token_map(v.shape, v.stride(), dtype, 64, packed),
            token_map(size, dense, dtype, 64, packed), block, block,
            tile_map(torch.float32, (units * HEAD_DIM,), (1,), HEAD_DIM), operand,
        )  # fmt: skip
        pool_step = 0 if call.initial_state is None else call.initial_state.stride(0)
        every = max(options.checkpoint_every // CHUNK, 1)
        in_place = call.state_indices is not None
        facts = (N, call.T, HV, packed, v.device)
        several = most_segments(HV, v.device) > 2
        bounded = options.lower_bound is not None
        lone = 0
        if not in_place and (bounded or call.A_log is None and not several):
            lone = SHORT_SEGMENT_TOKENS if several else MIN_SEGMENT_TOKENS
        split, slots = count_slots(*facts, lone=lone) if lone or several else (1, N)
        found = several and split > 1 and call.T >= FEWEST * MIN_SEGMENT_TOKENS
        look_back = (LOOK_BACK if found else LONE_LOOK_BACK).value
        self.cuts = split, lone or MIN_SEGMENT_TOKENS, look_back

        def launch(transition: int) -> Launch:
            programs = slots * HV * 2
            if transition:
                programs = count_long(N, call.T, packed) * split * HV * 4
            return Launch(
                gdn_scan_fwd_kernel, programs, v.device, maps=maps,
                numbers=(call.T, HV, HV, N, every, split, pool_step, transition),
                constexprs=(in_place, 1, options.state_v_first, *REGISTERS[1], False, lone),
                options=(("num_warps", 4), ("maxnreg", CAP[1]), ("launch_pdl", True)),
                guarded=True,
            )  # fmt: skip

        self.kernel = launch(0)
        self.warm = slots * HV if found else 0
        self.transition = launch(1) if found else None
        self.carry = carry_launch(call, split, slots, lone) if found else None

    @staticmethod
    def serves(call: KdaCall) -> bool:
        """True for values of 128 channels that TMA can read, at multiples of 16 bytes."""
        return call.V == HEAD_DIM and lies_for_tma(call.v) and dense_heads(call.initial_state)

    def __call__(self, tokens, blocks, cu_seqlens, states, k_end, decay=None) -> None:
        """The arguments of gdn/portable/scan.py's Scan, with Ke, and with cuts decay."""
        initial_state, state_indices, final, checkpoints = states
        operands, o = (*tokens, *blocks, k_end), tokens[3]
        warm = None if self.transition is None else decay.new_empty(self.warm)
        rest = (state_indices, cu_seqlens, decay, warm, o)
        if self.transition is not None:
            pool = None if state_indices is None else initial_state
            self.transition(*operands, initial_state, final, None, *rest)
            self.carry(pool, state_indices, cu_seqlens, warm, o)
        self.kernel(*operands, initial_state, final, checkpoints, *rest)


class Chunked(portable.Chunked):
    """portable.Chunked with the prepare above, and the scan where it serves."""

    __slots__ = ()
    PREPARE = Prepare

    def __init__(self, call: KdaCall):
        super().__init__(call)
        if Scan.serves(call):
            self.scan = Scan(call)
            self.prepare = Prepare(call, cuts=self.scan.cuts)
