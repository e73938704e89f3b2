"""The sequential half of the chunked gated delta rule, in portable Triton (docs/gdn.md).

Per chunk, with S [K, V] fp32 carried along and Tb, P, F from gdn/portable/prepare.py:

    X = V - F0 (K S)    vt = Tb X    O = F2 (Q S) + P vt    S = gam_C S + K^T (F1 vt)

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; E tokens between checkpoints. Segments of a
long sequence run concurrently (context.py): they start from states in o, stored in place of their
first rows (gdn/portable/cuts.py).
"""

import inspect
from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ...runtime.sizes import next_power_of_2
from ...runtime.tuning import lookup
from ..call import GdnCall
from ..chunks import CHUNK
from .cuts import chunks_in_segment, count_cuts, segment_of, word_at_cut, words
from .padding import zero_padding
from .primitives import kv_strides, locate, precision
from .state import (
    block_at,
    load_factors,
    load_state,
    own_rows,
    read,
    read_both,
    store_checkpoint,
    store_final,
    times,
    write,
    write_to,
)

if "disable_licm" not in inspect.signature(tl.range.__init__).parameters:
    raise ImportError("Triton 3.5 or newer is needed")  # then dispatch takes the reference


@triton.jit
def _start_state(
    s0_ptr, o_ptr, s0_strides, at_s0, cuts, d, e, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, WORDS: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """The state before a segment [K, V] fp32, in blocks of rows.

    It is the call's initial state, or is read from o if the sequence is cut.
    """
    BLOCK_K: tl.constexpr = d.shape[0]
    BLOCK_V: tl.constexpr = e.shape[0]
    s = ()
    for i in tl.static_range(0, K, BLOCK_K):
        is_state = (i + d < K)[:, None] & (e < V)[None, :]
        part = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        if s0_ptr is not None:
            at = at_s0 + (i + d)[:, None] * s0_strides[2] + e[None, :] * s0_strides[3]
            part = load_state(s0_ptr, at, is_state & (cuts == 0))
        if BEHIND:
            step = HV * (V // BLOCK_V * WORDS)
            at = word_at_cut(e[None, :], (i + d)[:, None], step, K, V, BLOCK_V, WORDS)
            start_ptr = o_ptr.to(tl.pointer_type(tl.float32))
            part += load_state(start_ptr, at, is_state & (cuts > 0))
        s += (part,)
    if BEHIND:
        tl.debug_barrier()  # no thread may write its o over a state that another has yet to read
    return s


@triton.jit
def _zero_rows(o_ptr, chunks, length, stride, columns, V: tl.constexpr):
    """Zeroes the outputs of a sequence that is skipped."""
    t = tl.arange(0, 64)
    for c in range(chunks):
        at = o_ptr + t[:, None] * stride + columns[None, :]
        zero = tl.zeros((64, columns.shape[0]), o_ptr.dtype.element_ty)
        tl.store(at, zero, mask=(t < length - c * 64)[:, None] & (columns < V)[None, :])
        o_ptr += 64 * stride


@triton.jit(do_not_specialize=["T", "N", "NS", "ROW", "E"])
def _scan_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    o_ptr,  # [B, T, HV, V]
    tb_ptr,  # [rows, HV, C, C]
    p_ptr,  # [rows, HV, C, C]
    f_ptr,  # [rows, HV, 4, C] fp32
    cu_ptr,  # [N + 1] int32 | int64 or None
    s0_ptr,  # [N | pool, HV, K, V] or None
    index_ptr,  # [N] int32 | int64 or None
    s1_ptr,  # [N | pool, HV, K, V] or None
    mid_ptr,  # [checkpoint rows, HV, K, V] or None
    s_ptr,  # [programs, K in whole blocks, BLOCK_V] fp32 or None: S, where it is not in registers
    ke_ptr,  # [B, T, HV, K] or None: q, k are Qd, Kd with it, and f_ptr is gam [rows, HV, K]
    q_strides,  # of B, T, H
    k_strides,
    v_strides,  # of B, T, HV
    s0_strides,  # of sequence or slot, HV, K, V
    s1_strides,
    T, N,
    NS,  # segments a sequence, equal length
    ROW,  # chunks of a row of programs: the shortest segment's
    E,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    LONGEST: tl.constexpr,  # chunks of the longest segment
    BEHIND: tl.constexpr,  # tokens behind a cut at least; 0 where no sequence is cut
    WORDS: tl.constexpr,  # fp32 words in BLOCK_V columns of o
    STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one value head of one segment, from its first token to its last.

    ke_ptr: of Kimi Delta Attention (kda/portable/prepare.py), where the row factors are in the
    operands: X = V - Kd S, O = Qd S + P vt, S = gam S + Ke^T vt.
    """
    HV: tl.constexpr = H * R
    FACTORS: tl.constexpr = 256 if ke_ptr is None else K
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    row = pid // (NV * HV)
    hv = ((pid // NV) % HV).to(tl.int64)
    h = hv // R
    e = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.num_programs(0) // (NV * HV)
    zero_padding(o_ptr + hv * V, cu_ptr, T, N, row, rows, HV * V, e, e < V)
    n, part, start, length = locate(row, cu_ptr, T, N, NS, ROW * 64)
    chunks = (length + 63) // 64
    segment = segment_of(length, ROW, LONGEST) if BEHIND else ROW
    cuts = count_cuts(length, segment * 64, BEHIND)
    if part > cuts:
        return
    first = part * segment
    own_chunks = tl.where(part == cuts, chunks - first, segment)
    n = n.to(tl.uint32).to(tl.int64)  # signed it keeps a register more through the loop
    b = n
    chunk_row = n * chunks
    mid_row = n * (length // E)
    if cu_ptr is not None:
        b = n * 0
        chunk_row = start // 64 + n
        mid_row = start // E
    t = tl.arange(0, 64)
    d = tl.arange(0, BLOCK_K)
    token = start + first * 64
    q_ptr += b * q_strides[0] + token * q_strides[1] + h * q_strides[2]
    k_ptr += b * k_strides[0] + token * k_strides[1] + h * k_strides[2]
    v_ptr += b * v_strides[0] + token * v_strides[1] + hv * v_strides[2]
    o_ptr += ((b * T + token) * HV + hv) * V
    slot = n
    if index_ptr is not None:
        slot = tl.load(index_ptr + n).to(tl.int64)
        if slot < 0:
            _zero_rows(o_ptr, own_chunks, length - first * 64, HV * V, e, V)
            return

    s = _start_state(
        s0_ptr, o_ptr, s0_strides, slot * s0_strides[0] + hv * s0_strides[1], cuts, d, e, HV, K, V,
        WORDS, BEHIND,
    )  # fmt: skip
    if s_ptr is not None:
        s_ptr += (n * 0 + pid) * (len(s) * BLOCK_K * BLOCK_V)
        for i in tl.static_range(len(s)):
            tl.store(block_at(s_ptr, i * BLOCK_K, BLOCK_K, BLOCK_V), s[i])
        tl.debug_barrier()

    tb_ptr += ((chunk_row + first) * HV + hv) * 4096
    p_ptr += ((chunk_row + first) * HV + hv) * 4096
    f_ptr += ((chunk_row + first) * HV + hv) * FACTORS
    if ke_ptr is not None:
        ke_ptr += b * k_strides[0] + token * k_strides[1] + h * k_strides[2]
    if mid_ptr is not None:
        mid_ptr += (mid_row * HV + hv) * (K * V)
    left = length - first * 64  # tokens; carried along, it leaves registers to the loop
    for c in tl.range(0, own_chunks, num_stages=STAGES, disable_licm=STAGES == 1):
        ok = t < left
        own = own_rows(left, STAGES)
        in_v = ok[:, None] & (e < V)[None, :]
        go = n * 0 + c * 64  # 64-bit offsets to the chunk, 32-bit ones inside it
        k_tile = k_ptr + go * k_strides[1]
        q_tile = q_ptr + go * q_strides[1]
        v_tile = v_ptr + go * v_strides[1] + own[:, None] * v_strides[1] + e[None, :]
        block = t[:, None] * 64 + t[None, :]
        if ke_ptr is None:
            f0, f1, f2, decay = load_factors(f_ptr + go * (HV * 4))
            gam = None
            end_tile = k_tile
        else:
            f0, f1, f2 = None, None, None  # they are in the operands
            decay = 1.0
            gam = f_ptr + (n * 0 + c) * (HV * K)
            end_tile = ke_ptr + go * k_strides[1]

        # loads stand before their use: held in registers from the top they spill
        if STAGES == 1:
            k_at, q_at = own * k_strides[1], own * q_strides[1]
            ks, qs = read_both(k_tile, k_at, q_tile, q_at, ok, s, s_ptr, K, PREC)
            v = tl.load(v_tile, mask=in_v, other=0.0)  # [C, V]
            x = v.to(tl.float32) - times(ks, f0)
            k = v  # is loaded again
        else:
            ks, k = read(k_tile, own * k_strides[1], ok, s, K, PREC)  # [C, V] fp32
            v = tl.load(v_tile, mask=in_v, other=0.0)  # [C, V]
            x = v.to(tl.float32) - times(ks, f0)
            qs, _ = read(q_tile, own * q_strides[1], ok, s, K, PREC)
        tb = tl.load(tb_ptr + go * (HV * 64) + block)  # [C, C]
        vt = tl.dot(tb, x.to(tb.dtype), input_precision=PREC)  # [C, V] fp32
        w = times(vt, f1).to(tb.dtype)
        if s_ptr is None:
            again: tl.constexpr = STAGES == 1 or ke_ptr is not None
            s = write(k, end_tile, own * k_strides[1], ok, s, decay, w, K, again, PREC, gam)
        else:
            write_to(s_ptr, end_tile, own * k_strides[1], ok, decay, w, K, BLOCK_K, PREC, gam)
        p = tl.load(p_ptr + go * (HV * 64) + block)  # [C, C]
        o = tl.dot(p, vt.to(p.dtype), times(qs, f2), input_precision=PREC)
        o_tile = o_ptr + go * (HV * V) + t[:, None] * (HV * V) + e[None, :]
        tl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=in_v)
        if mid_ptr is not None:
            done = length - left + 64
            if (done % E == 0) & (done <= length):
                store_checkpoint(mid_ptr, done, E, s, s_ptr, e, HV * K * V, K, V, V_FIRST)

        left -= 64

    store_final(s1_ptr, s1_strides, slot, hv, s, s_ptr, d, e, left, K, V, BEHIND)


def segments(call: GdnCall, shortest: int, longest: int) -> tuple:
    """(rows of programs, rows of a sequence) for segments of `shortest` to `longest` chunks."""
    T = call.T
    if call.cu_seqlens is None:
        own = max(1, -(-T // (chunks_in_segment(T // CHUNK, shortest, longest) * CHUNK)))
        return call.B * own, own
    return T // (shortest * CHUNK) + call.N, 0


def configuration(kind: str, device: torch.device, units: int, K: int, rule: str = "gdn") -> dict:
    """Launch configuration of the kernel above, for `units` segments and value heads."""
    return lookup(f"portable_{rule}_scan{kind}", device, units=units, K=K)


class Scan:
    """The launch of the kernel above for all calls with the same shapes, strides, dtypes and
    options."""

    __slots__ = ("kernel", "scratch")

    def __init__(
        self,
        call: GdnCall,
        final: Optional[torch.Tensor],  # like the final states
        segment: tuple,  # chunks of the shortest and of the longest
        behind: int,  # tokens behind a cut at least, or 0
        kind: str,  # of configuration
    ):
        q, k, v, options = call.q, call.k, call.v, call.options
        K, V, HV = call.K, call.V, call.HV
        rows, own = segments(call, *segment)
        rule = "kda" if call.channels else "gdn"
        config = configuration(kind, v.device, rows * HV, K, rule)
        block_k = min(next_power_of_2(max(K, 16)), config["BLOCK_K"])
        programs = rows * HV * -(-V // config["BLOCK_V"])
        state = -(-K // block_k) * block_k * config["BLOCK_V"]
        self.scratch = programs * state if q.dtype == torch.float32 else None
        strides = (
            steps(q), steps(k), steps(v), kv_strides(call.initial_state, options.state_v_first),
            kv_strides(final, options.state_v_first),
        )  # fmt: skip
        every = max(options.checkpoint_every, CHUNK)
        numbers = (*strides, call.T, call.N, own, segment[0], every)
        constexprs = (
            call.H, HV // call.H, K, V, options.state_v_first, block_k, config["BLOCK_V"],
            segment[1], behind, words(config["BLOCK_V"], v.element_size()), config["STAGES"],
            precision(q.dtype),
        )  # fmt: skip
        launched = (("num_warps", config["num_warps"]), ("num_stages", config["STAGES"]))
        if "maxnreg" in config and torch.version.hip is None:  # else ptxas may spill to fit in more
            launched += (("maxnreg", config["maxnreg"]),)
        self.kernel = Launch(
            _scan_kernel, programs, v.device, numbers=numbers,
            constexprs=constexprs, options=launched, guarded=True,
        )  # fmt: skip

    def __call__(
        self,
        # q, k [B, T, H, K], v [B, T, HV, V] and o like v, contiguous (written)
        tokens: tuple,
        blocks: tuple,  # Tb, P [rows, HV, C, C] and F [rows, HV, 4, C] fp32
        cu_seqlens: Optional[torch.Tensor],  # [N + 1]
        # initial_state [N | pool, HV, K, V], state_indices [N], final_state (written), checkpoints
        # [.., HV, K, V] (written): each may be None
        states: tuple,
        k_end: Optional[torch.Tensor] = None,  # Ke [B, T, HV, K]: q, k are Qd, Kd then, F is gam
    ) -> None:
        memory = None  # for the states of all programs, where they are not in registers
        if self.scratch is not None:
            memory = blocks[2].new_empty(self.scratch)
        self.kernel(*tokens, *blocks, cu_seqlens, *states, memory, k_end)
