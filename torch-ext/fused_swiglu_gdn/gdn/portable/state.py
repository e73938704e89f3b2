"""The state S [K, V] fp32 of the portable kernels, BLOCK_V columns a program, in blocks of rows.

It stays in registers. In fp32, where an operand takes four times as many registers as in bf16 or
fp16 (two parts of each number), it is stored in memory, with one block at a time in registers
(docs/gdn.md).
"""

import triton
import triton.language as tl


@triton.jit
def load_factors(ptr):
    """The row factors F0, F1 and F2 of a chunk [C] fp32, and its decay."""
    t = tl.arange(0, 64)
    f0 = tl.load(ptr + t)
    f1 = tl.load(ptr + 64 + t)
    f2 = tl.load(ptr + 128 + t)
    return f0, f1, f2, tl.load(ptr + 192)


@triton.jit
def times(x, f):
    """Rows of x [C, BLOCK], multiplied by factors [C] if there are any."""
    return x if f is None else x * f[:, None]


@triton.jit
def own_rows(left, STAGES: tl.constexpr):
    """Rows 0 to C - 1 of a chunk, for addresses; `left` tokens remain from its first on.

    A loop that does not load ahead clamps them to the end of the sequence, which changes no row
    that is read: so the addresses are computed anew in each chunk. As constants they would be kept
    from chunk to chunk and take more registers than there are.
    """
    t = tl.arange(0, 64)
    return t if STAGES > 1 else tl.minimum(t, left - 1)


@triton.jit
def _rows(ptr, at, ok, first, D: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Loads BLOCK columns, from `first` on, of a chunk's rows [C, D] at `at` [C]; zeros outside."""
    d = first + tl.arange(0, BLOCK)[None, :]
    mask = ok[:, None] & (d < D)
    return tl.load(ptr + at[:, None] + d, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def read(ptr, at, ok, s, K: tl.constexpr, PREC: tl.constexpr):
    """x S for a chunk's rows x [C, K], and the last block of x."""
    BLOCK: tl.constexpr = s[0].shape[0]
    out = tl.zeros((64, s[0].shape[1]), tl.float32)
    for i in tl.static_range(len(s)):
        x = _rows(ptr, at, ok, i * BLOCK, K, BLOCK, "")
        out = tl.dot(x, s[i].to(x.dtype), out, input_precision=PREC)
    return out, x


@triton.jit
def block_at(s_ptr, first, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Addresses of BLOCK_K rows, from `first` on, of a program's state in memory [K, BLOCK_V]."""
    d = first + tl.arange(0, BLOCK_K)
    return s_ptr + d[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]


@triton.jit
def read_both(k_ptr, k_at, q_ptr, q_at, ok, s, s_ptr, K: tl.constexpr, PREC: tl.constexpr):
    """k S and q S, block by block of S: as an operand of both a block is in registers only once."""
    BLOCK: tl.constexpr = s[0].shape[0]
    BLOCK_V: tl.constexpr = s[0].shape[1]
    ks = tl.zeros((64, BLOCK_V), tl.float32)
    qs = ks
    if s_ptr is None:
        for i in tl.static_range(len(s)):
            k = _rows(k_ptr, k_at, ok, i * BLOCK, K, BLOCK, "")
            ks = tl.dot(k, s[i].to(k.dtype), ks, input_precision=PREC)
            q = _rows(q_ptr, q_at, ok, i * BLOCK, K, BLOCK, "")
            qs = tl.dot(q, s[i].to(q.dtype), qs, input_precision=PREC)
    else:
        for first in tl.range(0, K, BLOCK, num_stages=1):
            part = tl.load(block_at(s_ptr, first, BLOCK, BLOCK_V))
            k = _rows(k_ptr, k_at, ok, first, K, BLOCK, "")
            ks = tl.dot(k, part, ks, input_precision=PREC)
            q = _rows(q_ptr, q_at, ok, first, K, BLOCK, "")
            qs = tl.dot(q, part, qs, input_precision=PREC)
    return ks, qs


@triton.jit
def _decayed(s, decay, gam_ptr, first, K: tl.constexpr):
    """A block of S, from row `first` on, times decay; rows of it times their own, where gam_ptr
    [K] has them."""
    if gam_ptr is None:
        s *= decay
    else:
        d = first + tl.arange(0, s.shape[0])
        s *= tl.load(gam_ptr + d, mask=d < K, other=0.0)[:, None]
    return s


@triton.jit
def write(
    x, ptr, at, ok, s, decay, w, K: tl.constexpr, RELOAD: tl.constexpr, PREC: tl.constexpr,
    gam_ptr=None,
):  # fmt: skip
    """decay S + x^T w for a chunk's rows x [C, K]. RELOAD: x is loaded again, else one block holds
    it."""
    BLOCK: tl.constexpr = s[0].shape[0]
    new = ()
    for i in tl.static_range(len(s)):
        if RELOAD:
            x = _rows(ptr, at, ok, i * BLOCK, K, BLOCK, "evict_first")
        part = _decayed(s[i], decay, gam_ptr, i * BLOCK, K)
        new += (tl.dot(tl.trans(x), w, part, input_precision=PREC),)
    return new


@triton.jit
def write_to(
    s_ptr, ptr, at, ok, decay, w, K: tl.constexpr, BLOCK: tl.constexpr, PREC: tl.constexpr,
    gam_ptr=None,
):  # fmt: skip
    """Does the work of `write` for a state in memory."""
    for first in tl.range(0, K, BLOCK, num_stages=1):
        x = _rows(ptr, at, ok, first, K, BLOCK, "evict_first")
        to = block_at(s_ptr, first, BLOCK, w.shape[1])
        part = _decayed(tl.load(to), decay, gam_ptr, first, K)
        s = tl.dot(tl.trans(x), w, part, input_precision=PREC)
        tl.debug_barrier()  # every thread has read what is now overwritten
        tl.store(to, s)
    tl.debug_barrier()  # and sees what another wrote


@triton.jit
def part_of(s, s_ptr, i: tl.constexpr):
    """The i-th block of rows of the state."""
    BLOCK: tl.constexpr = s[0].shape[0]
    if s_ptr is None:
        part = s[i]
    else:
        part = tl.load(block_at(s_ptr, i * BLOCK, BLOCK, s[0].shape[1]))
    return part


@triton.jit
def store_checkpoint(
    ptr, done, E, s, s_ptr, e, STEP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    V_FIRST: tl.constexpr,
):  # fmt: skip
    """Stores the state after `done` tokens, a multiple of E; STEP: stride of checkpoints."""
    BLOCK: tl.constexpr = s[0].shape[0]
    for i in tl.static_range(len(s)):
        d = i * BLOCK + tl.arange(0, BLOCK)
        at = (done // E - 1).to(tl.int64) * STEP
        at += d[:, None] + e[None, :] * K if V_FIRST else d[:, None] * V + e[None, :]
        store_state(ptr, at, part_of(s, s_ptr, i), (d < K)[:, None] & (e < V)[None, :])


@triton.jit
def load_state(ptr, at, mask):
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_state(ptr, at, s, mask):
    tl.store(ptr + at, s.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_final(
    s1_ptr, s1_strides, slot, hv, s, s_ptr, d, e, left, K: tl.constexpr, V: tl.constexpr,
    BEHIND: tl.constexpr,
):  # fmt: skip
    """The state after a segment, if it is wanted: of a sequence with cuts only where that is the
    sequence's end."""
    for i in tl.static_range(len(s) if s1_ptr is not None else 0):
        kv = i * d.shape[0] + d
        at = slot * s1_strides[0] + hv * s1_strides[1]
        at += kv[:, None] * s1_strides[2] + e[None, :] * s1_strides[3]
        is_state = (kv < K)[:, None] & (e < V)[None, :]
        is_end = left <= 0  # the sequence's; behind a cut there is more
        store_state(s1_ptr, at, part_of(s, s_ptr, i), is_state & is_end if BEHIND else is_state)
