"""Exact context parallelism inside one GPU: segments of a long sequence run concurrently.

A segment maps the state before it to the state after it, S -> M S + N, with N its final state from
S = 0, and M the same recurrence without V from S = I. Three launches (docs/gdn.md):

    transition: M and N of every segment but a sequence's last, at once
    carry:      S_1 = M_0 S_0 + N_0, S_2 = M_1 S_1 + N_1, ... in fp32
    scan:       scan.py from those states, S_0 too, all segments at once

These states are stored in o, in place of the first rows of the segment that starts from them
(gdn/portable/cuts.py). A remainder too short for that is not a segment of its own but the end of
the one before.

A chunk's transition stretches no state by more than 2^decay (prepare). If the decays of a segment's
last chunks multiply to less than 2^-30, only those chunks are run from zero, and M is zero: the
device decides for each segment and head, and nothing that fp32 could represent is lost.

The start of a segment depends on its sequence alone, so results do not depend on the rest of the
batch.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ...runtime.primitives import sequence_bounds
from ...runtime.sizes import next_power_of_2
from ..call import GdnCall
from .cuts import FORGOTTEN, count_cuts, segment_of, tokens_at_cut, word_at_cut, words
from .primitives import EXACT_FP32, kv_strides, locate, precision
from .scan import configuration, segments
from .state import load_factors, own_rows, read, times, write


@triton.jit(do_not_specialize=["T", "N", "NS", "ROW"])
def _transition_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    tb_ptr,  # [rows, HV, C, C]
    f_ptr,  # [rows, HV, 4, C] fp32
    decay_ptr,  # [rows, HV] fp32, log2 of a bound of the norm of a chunk's transition
    cu_ptr,  # [N + 1] int32 | int64 or None
    o_ptr,  # [B, T, HV, V]: N and M, fp32, go where word_at_cut says
    k_strides,  # of B, T, H
    v_strides,  # of B, T, HV
    T, N,
    NS,  # segments a sequence, equal length
    ROW,  # chunks of a row of programs: the shortest segment's
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LONGEST: tl.constexpr,  # chunks of the longest segment
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BEHIND: tl.constexpr,  # tokens behind a cut at least
    SLICE: tl.constexpr,  # columns of a program of the scan
    WORDS: tl.constexpr,  # fp32 words in those of a row of o
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of [N, M] of one value head of one segment, stored transposed."""
    HV: tl.constexpr = H * R
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    NW: tl.constexpr = NV + (K + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    row = pid // (NW * HV)
    hv = ((pid // NW) % HV).to(tl.int64)
    h = hv // R
    n, part, start, length = locate(row, cu_ptr, T, N, NS, ROW * 64)
    segment = segment_of(length, ROW, LONGEST)
    first = part * segment
    if part >= count_cuts(length, segment * 64, BEHIND):  # nothing comes behind the last
        return
    n = n.to(tl.int64)
    b = n
    chunk_row = n * ((length + 63) // 64) + first
    if cu_ptr is not None:
        b = n * 0
        chunk_row = start // 64 + n + first
    t = tl.arange(0, 64)
    d = tl.arange(0, BLOCK_K)
    is_m = pid % NW >= NV
    e = (pid % NW - tl.where(is_m, NV, 0)) * BLOCK_V + tl.arange(0, BLOCK_V)  # column of N or M
    token = start + first * 64
    k_ptr += b * k_strides[0] + token * k_strides[1] + h * k_strides[2]
    v_ptr += b * v_strides[0] + token * v_strides[1] + hv * v_strides[2]
    tb_ptr += (chunk_row * HV + hv) * 4096
    f_ptr += (chunk_row * HV + hv) * 256

    # the last chunk from which on all that was before is forgotten, or the first
    c = tl.arange(0, BLOCK_S)
    stretch = tl.load(decay_ptr + (chunk_row + c) * HV + hv, mask=c < segment, other=0.0)
    forgets = tl.cumsum(stretch, axis=0, reverse=True) < FORGOTTEN  # [BLOCK_S]
    begin = tl.max(tl.where(forgets & (c < segment), c, 0), axis=0)
    remembers = tl.max(forgets.to(tl.int32), axis=0) == 0
    begin = tl.where(is_m & (remembers == 0), segment, begin)  # M is zero

    s = ()  # [K, V or K] fp32, in blocks of rows
    for i in tl.static_range(0, K, BLOCK_K):
        s += (tl.where(is_m & remembers & (i + d[:, None] == e[None, :]), 1.0, 0.0),)
    in_v = tl.broadcast_to(((e < V) & (pid % NW < NV))[None, :], (64, BLOCK_V))
    for c in tl.range(begin, segment, num_stages=STAGES, disable_licm=STAGES == 1):
        go = n * 0 + c * 64  # 64-bit offsets to the chunk, 32-bit ones inside it
        left = length - (first + c) * 64  # a whole chunk at least
        own = own_rows(left, STAGES)
        k_tile = k_ptr + go * k_strides[1]
        v_tile = v_ptr + go * v_strides[1] + own[:, None] * v_strides[1] + e[None, :]
        ks, k = read(k_tile, own * k_strides[1], t < 64, s, K, PREC)  # [C, V or K] fp32
        v = tl.load(v_tile, mask=in_v, other=0.0)  # [C, V]
        tb = tl.load(tb_ptr + go * (HV * 64) + t[:, None] * 64 + t[None, :])  # [C, C]
        f0, f1, _, decay = load_factors(f_ptr + go * (HV * 4))
        x = v.to(tl.float32) - times(ks, f0)
        vt = tl.dot(tb, x.to(tb.dtype), input_precision=PREC)  # [C, V or K] fp32
        w = times(vt, f1).to(tb.dtype)
        s = write(k, k_tile, own * k_strides[1], t < 64, s, decay, w, K, STAGES == 1, PREC)
    o_ptr += ((b * T + token + segment * 64) * HV + hv) * V
    to = o_ptr.to(tl.pointer_type(tl.float32))
    x = (tl.where(is_m, V, 0) + e)[None, :]
    is_own = (e < tl.where(is_m, K, V))[None, :]
    for i in tl.static_range(len(s)):
        kd = (i * BLOCK_K + d)[:, None]
        at = word_at_cut(x, kd, HV * (V // SLICE * WORDS), K, V, SLICE, WORDS)
        tl.store(to + at, s[i], mask=(kd < K) & is_own)


@triton.jit(do_not_specialize=["T", "SHORTEST"])
def _carry_kernel(
    o_ptr,  # [B, T, HV, V]: of each segment behind a cut holds N and M
    s0_ptr,  # [N | pool, HV, K, V] or None
    index_ptr,  # [N] int32 | int64 or None
    cu_ptr,  # [N + 1] int32 | int64 or None
    s0_strides,  # of sequence or slot, HV, K, V
    T,
    SHORTEST,  # chunks of the shortest segment
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LONGEST: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BEHIND: tl.constexpr, SLICE: tl.constexpr,
    WORDS: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """S <- M S + N over the segments of a sequence; every S replaces its N.

    S_0 is stored in the first segment's rows: the last segment may overwrite the row of the pool
    from which it was read. Transposed: S^T <- S^T M^T + N^T for BLOCK_V columns of one value head's
    state.
    """
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    hv = ((pid // NV) % HV).to(tl.int64)
    n = (pid // (NV * HV)).to(tl.int64)
    token = n * T
    length = T
    if cu_ptr is not None:
        token, stop = sequence_bounds(cu_ptr, n, T)
        length = (stop - token).to(tl.int32)
    segment = segment_of(length, SHORTEST, LONGEST)
    cuts = count_cuts(length, segment * 64, BEHIND)
    if cuts == 0:
        return
    slot = n
    if index_ptr is not None:
        slot = tl.load(index_ptr + n).to(tl.int64)
        if slot < 0:
            return
    d = tl.arange(0, BLOCK_K)
    e = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_state = (e < V)[:, None] & (d < K)[None, :]
    is_m = (d < K)[:, None] & (d < K)[None, :]
    s = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)  # [V, K]
    if s0_ptr is not None:
        at = slot * s0_strides[0] + hv * s0_strides[1]
        at += e[:, None] * s0_strides[3] + d[None, :] * s0_strides[2]
        s = tl.load(s0_ptr + at, mask=is_state, other=0.0).to(tl.float32)
    step = HV * (V // SLICE * WORDS)  # words from a token to the next
    n_at = word_at_cut(e[:, None], d[None, :], step, K, V, SLICE, WORDS)
    m_at = word_at_cut(V + d[:, None], d[None, :], step, K, V, SLICE, WORDS)
    at_cut = (o_ptr + (token * HV + hv) * V).to(tl.pointer_type(tl.float32))
    tl.store(at_cut + n_at, s, mask=is_state)
    for _ in tl.range(cuts, num_stages=STAGES):
        at_cut += (segment * 64).to(tl.int64) * step
        m = tl.load(at_cut + m_at, mask=is_m, other=0.0)  # M^T
        own = tl.load(at_cut + n_at, mask=is_state, other=0.0)
        s = tl.dot(s, m, own, input_precision=PREC)
        tl.store(at_cut + n_at, s, mask=is_state)


class Carry:
    """The launches of the two kernels above for all calls with the same shapes, strides and
    dtypes."""

    __slots__ = ("transition", "carry")

    def __init__(
        self,
        call: GdnCall,
        segment: tuple,  # chunks of the shortest and of the longest
        kind: str,  # of configurations
        transition: dict,  # configurations
        carry: dict,
    ):
        k, v, K, V, HV = call.k, call.v, call.K, call.V, call.HV
        rows, own = segments(call, *segment)
        shortest, longest = segment
        across = configuration(kind, v.device, rows * HV, K)["BLOCK_V"]
        size = v.element_size()
        places = (tokens_at_cut(K, V, size), across, words(across, size))
        BLOCK_K, width = next_power_of_2(max(K, 16)), transition["BLOCK_V"]
        constexprs = (
            call.H, HV // call.H, K, V, longest, next_power_of_2(longest),
            min(BLOCK_K, transition["BLOCK_K"]), width, *places, transition["STAGES"],
            precision(k.dtype),
        )  # fmt: skip
        options = (("num_warps", transition["num_warps"]), ("num_stages", transition["STAGES"]))
        programs = rows * HV * (-(-V // width) - (-K // width))
        numbers = (steps(k), steps(v), call.T, call.N, own, shortest)
        self.transition = Launch(
            _transition_kernel, programs, k.device, numbers=numbers, constexprs=constexprs,
            options=options, guarded=True,
        )  # fmt: skip
        states = kv_strides(call.initial_state, call.options.state_v_first)
        sizes = (HV, K, V, longest, BLOCK_K, carry["BLOCK_V"])
        constexprs = (*sizes, *places, carry["STAGES"], EXACT_FP32)
        options = (("num_warps", carry["num_warps"]), ("num_stages", carry["STAGES"]))
        self.carry = Launch(
            _carry_kernel, call.N * HV * -(-V // carry["BLOCK_V"]), k.device,
            numbers=(states, call.T, shortest), constexprs=constexprs, options=options,
            guarded=True,
        )  # fmt: skip

    def __call__(
        self,
        k: torch.Tensor,  # [B, T, H, K]
        v: torch.Tensor,  # [B, T, HV, V]
        tb: torch.Tensor,  # [rows, HV, C, C]
        f: torch.Tensor,  # [rows, HV, 4, C] fp32
        decay: torch.Tensor,  # [rows, HV] fp32
        o: torch.Tensor,  # [B, T, HV, V], contiguous
        initial_state: Optional[torch.Tensor],
        state_indices: Optional[torch.Tensor],
        cu_seqlens: Optional[torch.Tensor],
    ) -> None:
        """Stores in o the state before each segment of a sequence that is cut."""
        self.transition(k, v, tb, f, decay, cu_seqlens, o)
        self.carry(o, initial_state, state_indices, cu_seqlens)
