"""Gated DeltaNet prefill on Hopper: prepare, then the warp-specialised scan (docs/gdn_hopper.md).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, N sequences, C = 64 tokens
a chunk.
"""

import functools
from typing import Optional, Tuple

import torch

from ..common import gdn_prepare as common
from ..common.launch import prepare, specialized_on, steps
from ..device import multiprocessor_count
from .gdn_prepare import gdn_prepare_fwd_kernel
from .gdn_scan import gdn_scan_fwd_kernel, scatter_states_kernel
from .gluon_compat import Descriptor, gl

HEAD_DIM = 128
MIN_SEGMENT_TOKENS = 2048  # gdn_place.MIN_SEGMENT chunks

# By state warpgroups: registers of the second one and of the loader, and the cap at launch.
REGISTERS = {1: (0, 32), 2: (240, 24)}
CAP = {1: 136, 2: 168}
# Registers of a thread of prepare by its warps: 16 and 12 warps a multiprocessor
PREPARE_CAP = {4: 128, 2: 168}


def _reads_by_tma(x: torch.Tensor) -> bool:
    """The copy engine wants a dense last dimension and 16-byte steps in the others."""
    if x.stride(3) != 1 or x.data_ptr() % 16:
        return False
    return all(s > 0 and s % 8 == 0 for n, s in zip(x.shape[:3], x.stride()[:3]) if n > 1)


def _dense_heads(state: Optional[torch.Tensor]) -> bool:
    """A state or pool whose rows may be apart, but whose heads lie together."""
    return state is None or state.stride()[1:] == (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)


def supports_gdn_chunk_fwd(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens, scale,
    use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first, output_final_state,
    state_dtype, checkpoint_every,
) -> bool:  # fmt: skip
    """Half precision, K = V = 128, at least one token, tensors that the copy engine can address."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[3] == v.shape[3] == HEAD_DIM
        and 0 < q.shape[0] * q.shape[1] < 2**30
        and (cu_seqlens is None or cu_seqlens.shape[0] > 1)
        and all(_reads_by_tma(x) for x in (q, k, v))
        and _dense_heads(initial_state)
    )


def _heads_in_warps(q: torch.Tensor, g: torch.Tensor, use_qk_l2norm: bool) -> bool:
    """Keys of norm 1, whose products fp16 holds, and an even number of value heads for each."""
    return use_qk_l2norm and g.shape[2] // q.shape[2] % 2 == 0


def supports_gdn_prepare(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid,
    allow_neg_eigval,
) -> bool:  # fmt: skip
    """As for the scan, and _heads_in_warps. Other calls are for the common kernel."""
    return (
        _heads_in_warps(q, g, use_qk_l2norm)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype
        and q.shape[3] == HEAD_DIM
        and 0 < q.shape[0] * q.shape[1] < 2**30
        and (cu_seqlens is None or cu_seqlens.shape[0] > 1)
        and _reads_by_tma(q)
        and _reads_by_tma(k)
    )


def gdn_prepare(
    q: torch.Tensor,  # [B, T, H, K]
    k: torch.Tensor,  # [B, T, H, K]
    g: torch.Tensor,  # [B, T, HV]
    beta: torch.Tensor,  # [B, T, HV]
    A_log: Optional[torch.Tensor],  # [HV]
    dt_bias: Optional[torch.Tensor],  # [HV]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tb, P, F and decay of every chunk row and value head: the boundary of docs/gdn.md."""
    B, T, H, K = q.shape
    HV, packed = g.shape[2], cu_seqlens is not None
    rows = common.chunk_rows(T, B, cu_seqlens)
    tb = q.new_empty((rows, HV, 64, 64))
    p = torch.empty_like(tb)
    n = rows * HV
    small = q.new_empty(n * 257, dtype=torch.float32)  # F and decay: an allocation costs time
    f = small.as_strided((rows, HV, 4, 64), (HV * 256, 256, 64, 1))
    decay = small.as_strided((rows, HV), (HV, 1), n * 256)
    R = HV // H
    W = 4 if R % 4 == 0 else 2
    beta_max = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid else 0.0
    pointers = (g, beta, A_log, dt_bias, cu_seqlens)
    strides = (steps(g), steps(beta))
    options = (("num_warps", W), ("maxnreg", PREPARE_CAP[W]))
    kind = (q.device, q.dtype, *map(specialized_on, pointers), strides)
    prepare(gdn_prepare_fwd_kernel, (HV, R, W, beta_max), options, *kind).launch(
        (n // W, 1, 1),
        _token_desc(q, 128, packed), _token_desc(k, 128, packed), _block_desc(tb, W),
        _block_desc(p, W), *pointers, f, decay,
        *strides, T, cu_seqlens.shape[0] - 1 if packed else B, -(-T // 64), scale,
    )  # fmt: skip
    return tb, p, f, decay


def gdn_chunk_fwd(
    q: torch.Tensor,  # [B, T, H, K]
    k: torch.Tensor,  # [B, T, H, K]
    v: torch.Tensor,  # [B, T, HV, V]
    g: torch.Tensor,  # [B, T, HV]
    beta: torch.Tensor,  # [B, T, HV]
    A_log: Optional[torch.Tensor],  # [HV]
    dt_bias: Optional[torch.Tensor],  # [HV]
    initial_state: Optional[torch.Tensor],  # [N or pool, HV, K, V]
    state_indices: Optional[torch.Tensor],  # [N]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    state_dtype: Optional[torch.dtype],
    checkpoint_every: int,
    prepared: Optional[tuple] = None,  # what gdn_prepare gives, where the caller has it
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """o [B, T, HV, V]; the final state, the pool, or None; checkpoints or None."""
    if prepared is None:
        inputs = (q, k, g, beta, A_log, dt_bias, cu_seqlens, scale)
        inputs += (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval)
        own = _heads_in_warps(q, g, use_qk_l2norm)
        prepared = gdn_prepare(*inputs) if own else common.gdn_prepare(*inputs)
    return gdn_scan(
        q, k, v, *prepared, initial_state, state_indices, cu_seqlens, state_v_first,
        output_final_state, state_dtype, checkpoint_every,
    )  # fmt: skip


@functools.cache
def _box(dtype: torch.dtype, *shape: int):
    """(block shape, its shared-memory layout): 128-byte swizzle, none for the one-dimensional F."""
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[
        dtype
    ]
    return list(shape), gl.NVMMASharedLayout.get_default_for(list(shape), element)


def _token_desc(x: torch.Tensor, columns: int, packed: bool) -> Descriptor:
    """Boxes [1, 1, C, 1, columns] of x [B, T, H, D], cut at the end of each sequence.

    Equal lengths: dimensions (1, B, T, H, D), whose third ends at T. Packed: token i of a sequence
    [start, end) is (2^30, end, 2^30 - length + i, h, d) with strides (2^34 - s, s, s, ..). That
    comes to start + i tokens, since 2^64 elements wrap to nothing, and the third dimension ends at
    i = length.
    """
    B, T, H, D = x.shape
    token = x.stride(1) if T > 1 else H * D
    head = x.stride(2) if H > 1 else D
    if packed:
        shape = (0x7FFF0000, 0x7FFF0000, 1 << 30, H, D)
        strides = ((1 << 34) - token, token, token, head, 1)
    else:
        batch = x.stride(0) if B > 1 else token
        shape, strides = (1, B, T, H, D), (batch, batch, token, head, 1)
    return Descriptor(x, shape, strides, *_box(x.dtype, 1, 1, 64, 1, columns))


def _block_desc(x: torch.Tensor, heads: int = 1) -> Descriptor:
    """Boxes [heads C, C] of Tb or P [rows, HV, C, C]."""
    return Descriptor(x, (x.numel() // 64, 64), (64, 1), *_box(x.dtype, heads * 64, 64))


def _factor_desc(x: torch.Tensor) -> Descriptor:
    """Boxes [4 C] of F [rows, HV, 4, C]."""
    return Descriptor(x, (x.numel(),), (1,), *_box(x.dtype, 256))


def gdn_scan(
    q: torch.Tensor,  # [B, T, H, K]
    k: torch.Tensor,  # [B, T, H, K]
    v: torch.Tensor,  # [B, T, HV, V]
    Tb: torch.Tensor,  # [rows, HV, C, C]
    P: torch.Tensor,  # [rows, HV, C, C]
    F: torch.Tensor,  # [rows, HV, 4, C] fp32
    decay: torch.Tensor,  # [rows, HV] fp32
    initial_state: Optional[torch.Tensor],  # [N or pool, HV, K, V]
    state_indices: Optional[torch.Tensor],  # [N]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    state_v_first: bool,
    output_final_state: bool,
    state_dtype: Optional[torch.dtype],
    checkpoint_every: int,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """The second half of gdn_chunk_fwd, on what gdn_prepare made of q, k, g and beta."""
    B, T, H, K = q.shape
    HV, packed, device = v.shape[2], cu_seqlens is not None, v.device
    N = cu_seqlens.shape[0] - 1 if packed else B
    split, slots = _segments(N, T, HV, packed, device)
    pool = initial_state if state_indices is not None else None
    in_place = pool is not None and split == 1
    o = torch.empty(v.shape, dtype=v.dtype, device=device)
    final = checkpoints = None
    if in_place:
        final = pool
    elif output_final_state or pool is not None:
        dtype = pool.dtype if pool is not None else state_dtype or torch.float32
        final = torch.empty((N, HV, K, K), dtype=dtype, device=device)
    if checkpoint_every:
        rows = B * (T // checkpoint_every)
        dtype = state_dtype or torch.float32
        checkpoints = torch.zeros((rows, HV, K, K), dtype=dtype, device=device)
    pool_step = 0 if initial_state is None else initial_state.stride(0)
    W = 1 if 2 * slots * HV <= multiprocessor_count(device.index) else 2
    if checkpoint_every and not state_v_first:
        W = 1  # the addresses of a [K, V] state are more than two warpgroups have registers for
    constexprs = (in_place, W, state_v_first, *REGISTERS[W])
    pointers = (initial_state, final, checkpoints, state_indices, cu_seqlens)
    # the kernel waits for prepare itself, where it needs it: launch_pdl
    options = (("num_warps", 4), ("maxnreg", CAP[W]), ("launch_pdl", True))
    kind = (device, v.dtype, pool_step < 2**31, *map(specialized_on, pointers))
    prepare(gdn_scan_fwd_kernel, constexprs, options, *kind).launch(
        (slots * HV * 2 // W, 1, 1),
        _token_desc(q, 128, packed), _token_desc(k, 128, packed), _token_desc(v, 64, packed),
        _token_desc(o, 64, packed), _block_desc(Tb), _block_desc(P), _factor_desc(F),
        *pointers, decay, T, HV, H, N, max(checkpoint_every // 64, 1), split, pool_step,
    )  # fmt: skip
    if pool is not None and not in_place:
        size = HV * K * K
        grid = (N, -(-size // 4096))
        scatter_states_kernel[grid](final, state_indices, pool, pool_step, size)
        final = pool
    return o, final, checkpoints


def _segments(N: int, T: int, HV: int, packed: bool, device: torch.device) -> Tuple[int, int]:
    """(the most segments of a sequence, slots for all segments of the batch): gdn_place.py.

    A sequence is cut into as many parts as one alone needs to fill the GPU with 64 columns a CTA.
    """
    split = min(multiprocessor_count(device.index) // (2 * HV), T // MIN_SEGMENT_TOKENS)
    if split <= 1:
        return 1, N
    return split, min(N * split, N + T // MIN_SEGMENT_TOKENS) if packed else N * split
