"""The launches of GDN prefill on Hopper for all calls with the same facts (docs/gdn_hopper.md).

`Prepare` and `Scan` compute everything that follows from shapes, strides, dtypes and options once;
a call of them only passes the tensors.

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, N sequences, C = 64 tokens
a chunk, rows of chunks as in docs/gdn.md.
"""

from typing import Optional, Tuple, Union

import torch

from ...runtime import device
from ...runtime.dtypes import HALF
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch, steps
from ...runtime.maps import Map, RawPointer
from ..call import GdnCall
from ..portable import prepare as portable
from ..portable.chunk import NewStates
from ..portable.cuts import FEWEST
from ..portable.primitives import EXACT_FP32, are_served
from .carry import gdn_carry_kernel
from .prepare import gdn_prepare_fwd_kernel
from .scan import gdn_scan_fwd_kernel

HEAD_DIM = 128
MIN_SEGMENT_TOKENS = 1024  # scheduler.MIN_SEGMENT chunks

# One of so few sequences with so many tokens may be longer than the rest together: its chunks
# follow each other faster with one state warpgroup a CTA. Whether it is is seen on the device. Of
# so few heads that it may be cut, that gains less than a launch that finds nothing to do takes, but
# for two sequences, of which one nearly always is the longer.
FEW_SEQUENCES, LONG = 8, 8192

# By state warpgroups: registers of the second one and of the loader, and the cap at launch.
REGISTERS = {1: (0, 32), 2: (240, 24)}
CAP = {1: 136, 2: 168}
# Registers of a thread of prepare by its warps: 16 and 12 warps an SM
PREPARE_CAP = {4: 128, 2: 168, 1: 255}


def computes(call) -> bool:
    """True for dtypes and sizes of the kernels of this folder, on a GPU that has their products."""
    return (
        device.has_wgmma(call.device)
        and are_served(call)
        and call.q.dtype in HALF
        and call.q.dtype == call.k.dtype == call.v.dtype
        and call.K == call.V == HEAD_DIM
        and 0 < call.B * call.T < 2**30
        and call.N > 0
    )


def lies_for_tma(x: torch.Tensor) -> bool:
    """True for a contiguous last dimension and other strides of a multiple of 16 bytes."""
    strides = zip(x.shape[:3], x.stride()[:3])
    return x.stride(3) == 1 and all(s > 0 and s % 8 == 0 for n, s in strides if n > 1)


def token_map(shape, strides, dtype: torch.dtype, columns: int, packed: bool) -> Map:
    """Boxes [1, 1, C, 1, columns] of a tensor [B, T, H, D], cut at the end of each sequence.

    Equal lengths: dimensions (1, B, T, H, D), whose third ends at T. Packed: token i of a sequence
    [start, end) is (2^30, end, 2^30 - length + i, h, d) with strides (2^34 - s, s, s, ..). That
    addresses token start + i, since 2^64 elements wrap to nothing, and the third dimension ends at
    i = length.
    """
    B, T, H, D = shape
    token = strides[1] if T > 1 else H * D
    head = strides[2] if H > 1 else D
    if packed:
        shape = (0x7FFF0000, 0x7FFF0000, 1 << 30, H, D)
        strides = ((1 << 34) - token, token, token, head, 1)
    else:
        batch = strides[0] if B > 1 else token
        shape, strides = (1, B, T, H, D), (batch, batch, token, head, 1)
    return tile_map(dtype, shape, strides, 1, 1, 64, 1, columns)


def block_map(units: int, dtype: torch.dtype) -> Map:
    """Boxes [C, C] of Tb or P [rows, HV, C, C], rows HV = units."""
    return tile_map(dtype, (units * 64, 64), (64, 1), 64, 64)


def prepare_of(call):
    """The launch of the first half: this room's for keys of norm 1, whose products fit fp16."""
    return Prepare(call) if call.options.use_qk_l2norm else portable.Prepare(call)


class Prepare:
    """The launch of the first half, for all calls with the same facts and with unit keys."""

    __slots__ = ("shape", "units", "kernel")

    def __init__(self, call: GdnCall):
        q, k, H, HV, rows = call.q, call.k, call.H, call.HV, call.rows
        packed = call.cu_seqlens is not None
        W = next(n for n in (4, 2, 1) if HV // H % n == 0)
        self.shape = (rows, HV, 64, 64)
        self.units = rows * HV
        tokens = (token_map(x.shape, x.stride(), x.dtype, call.K, packed) for x in (q, k))
        block = block_map(rows * HV, q.dtype)
        chunks = (call.T, call.N, -(-call.T // 64))
        self.kernel = Launch(
            gdn_prepare_fwd_kernel, rows * HV // W, q.device, maps=(*tokens, block, block),
            numbers=(steps(call.g), steps(call.beta), *chunks, call.options.scale),
            constexprs=(HV, HV // H, W, call.options.beta_max),
            options=(("num_warps", W), ("maxnreg", PREPARE_CAP[W])), guarded=True,
        )  # fmt: skip

    def __call__(
        self,
        q: torch.Tensor,  # [B, T, H, K]
        k: torch.Tensor,  # [B, T, H, K]
        g: torch.Tensor,  # [B, T, HV]
        beta: torch.Tensor,  # [B, T, HV]
        A_log: Optional[torch.Tensor],  # [HV]
        dt_bias: Optional[torch.Tensor],  # [HV]
        cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tb, P [rows, HV, C, C]; F [rows, HV, 4, C] and decay [rows, HV], both fp32."""
        rows, HV, C, _ = self.shape
        f = q.new_empty((rows, HV, 4, C), dtype=torch.float32)
        blocks = q.new_empty(self.shape), q.new_empty(self.shape), f, f.new_empty((rows, HV))
        self.launch(q, k, g, beta, A_log, dt_bias, cu_seqlens, blocks)
        return blocks

    def launch(self, q, k, g, beta, A_log, dt_bias, cu_seqlens, blocks) -> None:
        tb, p, f, decay = blocks
        self.kernel(q, k, tb, p, g, beta, A_log, dt_bias, cu_seqlens, f, decay)

    def arrays(self, dtype: torch.dtype) -> tuple:
        """Sizes and dtypes of Tb, P, F and decay, for a Workspace."""
        units, fp32 = self.units, torch.float32
        return *[(units * 64 * 64, dtype)] * 2, (units * 4 * 64, fp32), (units, fp32)


class Scan:
    """The launches of the second half of a call, for all calls with the same facts."""

    __slots__ = (
        "split", "warm", "like_v", "states", "kernels", "transition", "carry",
    )  # fmt: skip

    def __init__(self, call: GdnCall, behind_prepare: bool = True):
        """behind_prepare: no launch comes between prepare and this one, so it may begin before that
        ends."""
        q, k, v, T, K, HV, N = call.q, call.k, call.v, call.T, call.K, call.HV, call.N
        packed, where, options = call.cu_seqlens is not None, v.device, call.options
        self.split, slots = count_slots(N, T, HV, packed, where)
        self.warm = slots * HV if self.split > 1 else 0
        self.like_v, self.states = torch.empty_like(v).is_contiguous(), NewStates(call)
        in_place, state_v_first = call.state_indices is not None, options.state_v_first
        checkpoint_every = options.checkpoint_every
        W = 1 if 2 * slots * HV <= device.multiprocessor_count(where.index) else 2
        few = 1 < N <= (FEW_SEQUENCES if self.split == 1 else 2)
        by_lengths = W == 2 and packed and few and T >= LONG
        if checkpoint_every and not state_v_first:
            W = 1  # the addresses of a [K, V] state are more than two warpgroups have registers for
            by_lengths = False
        pool_step = 0 if call.initial_state is None else call.initial_state.stride(0)
        numbers = (T, HV, call.H, N, max(checkpoint_every // 64, 1), self.split, pool_step)
        units = call.rows * HV
        dense, block = (T * HV * K, HV * K, K, 1), block_map(units, v.dtype)
        maps = (
            *(token_map(x.shape, x.stride(), x.dtype, K, packed) for x in (q, k)),
            token_map(v.shape, v.stride(), v.dtype, 64, packed),
            token_map(v.shape, dense, v.dtype, 64, packed),
            *(block, block, tile_map(torch.float32, (units * 256,), (1,), 256), None),
        )

        def launch(W: int, transition: int = 0) -> Launch:
            programs = slots * HV * 2 // W
            if transition:
                programs = count_long(N, T, packed) * self.split * HV * 4 // W
            # the kernel waits for prepare itself, where it needs it: launch_pdl
            return Launch(
                gdn_scan_fwd_kernel,
                programs,
                where,
                maps=maps,
                numbers=(*numbers, transition),
                constexprs=(
                    in_place,
                    W,
                    state_v_first,
                    *REGISTERS[W],
                    by_lengths > transition,
                    0,
                ),
                options=(("num_warps", 4), ("maxnreg", CAP[W]), ("launch_pdl", behind_prepare)),
                guarded=True,
            )

        self.kernels = [launch(1), launch(2)] if by_lengths else [launch(W)]
        self.transition = self.carry = None
        if self.split > 1:
            self.transition = launch(2, 1)  # half of the programs for M
            self.carry = carry_launch(call, self.split, slots)

    def __call__(
        self,
        q: torch.Tensor,  # [B, T, H, K]
        k: torch.Tensor,  # [B, T, H, K]
        v: torch.Tensor,  # [B, T, HV, V]
        blocks: tuple,  # Tb, P [rows, HV, C, C]; F [rows, HV, 4, C] and decay [rows, HV], both fp32
        warm: Union[torch.Tensor, RawPointer],  # self.warm fp32 words
        initial_state: Optional[torch.Tensor],  # [N or pool, HV, K, V]
        state_indices: Optional[torch.Tensor],  # [N]
        cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
        """o [B, T, HV, V]; the final state, the pool, or None; checkpoints or None."""
        *blocks, decay = blocks
        pool = None if state_indices is None else initial_state
        o = torch.empty_like(v) if self.like_v else v.new_empty(v.shape)
        final, checkpoints = self.states(v, initial_state, state_indices)
        tensors = (q, k, v, o, *blocks, None)  # Ke is of Kimi Delta Attention
        rest = (state_indices, cu_seqlens, decay, warm, o)
        if self.carry is not None:
            self.transition(*tensors, initial_state, final, None, *rest)
            self.carry(pool, state_indices, cu_seqlens, warm, o)
        for kernel in self.kernels:
            kernel(*tensors, initial_state, final, checkpoints, *rest)
        return o, final, checkpoints


def carry_launch(call, split: int, slots: int, lone: int = 0) -> Launch:
    """The launch between the transition's and the scan's, of which a sequence has `split` segments
    at most and the batch `slots`; lone: as for count_slots."""
    N, T, HV, in_place = call.N, call.T, call.HV, call.state_indices is not None
    pool_step = 0 if call.initial_state is None else call.initial_state.stride(0)
    spans = MIN_SEGMENT_TOKENS, lone or MIN_SEGMENT_TOKENS
    sizes = (*spans, 1 << (split - 1).bit_length(), 16, 32)
    return Launch(
        gdn_carry_kernel,
        (HV * HEAD_DIM // 16, count_long(N, T, call.cu_seqlens is not None)),
        call.v.device,
        numbers=(T, HV, N, split, slots, pool_step),
        constexprs=(in_place and call.options.state_v_first, *sizes, EXACT_FP32),
        options=(("num_warps", 4), ("launch_pdl", True)),  # few registers: fits beside it
        guarded=True,
    )


def most_segments(HV: int, where: torch.device) -> int:
    """Into how many parts a sequence is cut at most: as many as it alone needs to fill the GPU with
    64 columns a CTA."""
    return device.multiprocessor_count(where.index) // (2 * HV)


def count_long(N: int, T: int, packed: bool) -> int:
    """The most sequences that can be so long that a launch finds states for them."""
    return min(N, T // (FEWEST * MIN_SEGMENT_TOKENS)) if packed else N


def count_slots(
    N: int, T: int, HV: int, packed: bool, where: torch.device, lone: int = 0
) -> Tuple[int, int]:
    """(most segments of a sequence, slots for all segments of the batch): scheduler.py.

    A sequence has as many segments as most_segments says, if there is room for FEWEST of the
    shortest; lone: others, too, for two of so many tokens that no launch finds states for.
    """
    fewest, shortest = (2, lone) if lone else (FEWEST, MIN_SEGMENT_TOKENS)
    split = min(most_segments(HV, where), T // shortest)
    if split <= 1 or T < fewest * shortest:
        return 1, N
    return split, min(N * split, N + T // shortest) if packed else N * split
