"""Decoding with the gated delta rule and deferred state write-back."""

from typing import Optional

import torch
from torch import Tensor

from . import checks_replay as checks
from . import ops_replay as ops
from .call import Ring


def make_ring(
    state: Tensor, heads: int, dtype: torch.dtype, *, rows: int = 16, max_tokens: int = 1
) -> Ring:
    """Allocates a ring for the latest tokens of states [P, HV, V, K] of one layer.

    For replay_gated_delta_rule. It is uninitialised: a cursor of zeros means an empty ring.

    Args:
        state: [P, HV, V, K], the states that the ring is for; only shape, dtype and device matter.
        heads: H, the heads of k.
        dtype: of k.
        rows: R, the capacity in tokens, at least 2 * max_tokens. A state is written once in about
            R - 2 * max_tokens + 2 tokens. With 16 rows and fp32 the ring takes a sixth of the
            memory of the states.
        max_tokens: the most tokens of a call: 1, or with drafts 1 + drafts.

    Returns:
        Ring(k, u, g, max_tokens): k [P, H, R, K] in `dtype`, u [P, HV, R, V] in the dtype of bf16
        or fp64 states and else fp32, g [P, HV, R] in fp32 (fp64 for fp64 states). Other tensors can
        be put in by `ring._replace(k=...)`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> ring = make_ring(torch.zeros(8, 4, 32, 16), 2, torch.bfloat16)
        >>> ring.k.shape, ring.u.shape, ring.g.shape
        (torch.Size([8, 2, 16, 16]), torch.Size([8, 4, 16, 32]), torch.Size([8, 4, 16]))
    """
    checks.new_ring(state, heads, dtype, rows, max_tokens)
    P, HV, V, K = state.shape
    gates = torch.float64 if state.dtype == torch.float64 else torch.float32
    values = torch.bfloat16 if state.dtype == torch.bfloat16 else gates
    return Ring(
        state.new_empty(P, heads, rows, K, dtype=dtype),
        state.new_empty(P, HV, rows, V, dtype=values),
        state.new_empty(P, HV, rows, dtype=gates),
        max_tokens,
    )


def replay_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, ring: Ring,
    cursor: Tensor,
    *, scale: Optional[float] = None, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_indices: Optional[Tensor] = None,
    force_flush: Optional[Tensor] = None, null_index: int = -1, out: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """The gated delta rule (arXiv:2412.06464) for one token, or a few drafts, with deferred state
    write-back.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    fused_recurrent_gated_delta_rule writes the state at every token, which is half of its time for
    many sequences. This function reads the state and stores a token's update, k and a vector of V
    numbers, in a ring; when the ring is full, all of its updates are added to the state
    (docs/gdn_decode.md). After the last layer of a step, `advance_ring` moves the cursor, which all
    layers share. The host reads no values, so a step can be captured in a CUDA graph.

    `initial_state` does not include the tokens of the ring; materialise_ring returns states that
    do.

    Args:
        q, k, v, g, beta, A_log, dt_bias, and the options: as in chunk_gated_delta_rule, with
            q, k [N, T, H, K] and v [N, T, HV, V] for T of 1 to ring.max_tokens tokens.
        initial_state: [N, HV, V, K], any floating dtype, written when a sequence's ring is full;
            with state_indices the pool [P, HV, V, K].
        ring: from make_ring for these states; this call's tokens are written to it.
        cursor: [N, 2] int32, contiguous: the ring's first row and its number of tokens. Zeros for
            a new sequence, whatever row it gets. It belongs to a row of the batch, not to a row
            of the pool. Its values are not checked on a GPU.
        state_indices: [N], int32 or int64: row n of the batch has this row of states and ring.
            Negative: its outputs are zero and no row is read or written.
        force_flush: [N] bool: these sequences write their state in this call. If ring.max_tokens is
            1, that state includes this call's token; else only the tokens of the ring before it.
            Pass the same to advance_ring.
        null_index: -1, or 0 for pools whose row 0 is a null slot, as in vLLM: indices up to it
            count as negative. Pass the same to advance_ring and materialise_ring.
        out: [N, T, HV, V], the dtype of v: o is written there, and `out` is returned.

    Returns:
        o [N, T, HV, V], the dtype of q.

    Raises:
        ValueError: a shape, device, value or option does not fit, or a gradient is needed.
        TypeError: an argument is no tensor or of the wrong dtype.

    Example:
        >>> N, H, HV, K, V = 3, 2, 4, 16, 32
        >>> q, k = torch.randn(2, N, 1, H, K).unbind(0)
        >>> v, g, beta = torch.randn(N, 1, HV, V), -torch.rand(N, 1, HV), torch.rand(N, 1, HV)
        >>> state, cursor = torch.zeros(N, HV, V, K), torch.zeros(N, 2, dtype=torch.int32)
        >>> ring = make_ring(state, H, k.dtype)
        >>> o = replay_gated_delta_rule(q, k, v, g, beta, state, ring, cursor)
        >>> advance_ring(cursor, ring)
        >>> o.shape, cursor[0].tolist()
        (torch.Size([3, 1, 4, 32]), [0, 1])
    """
    if not isinstance(ring, Ring):
        checks.no_ring(ring)
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, *ring[:3], cursor, force_flush,
        state_indices, out,
    )  # fmt: skip
    options = (
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        ring.max_tokens, null_index, use_gate_in_kernel,
    )  # fmt: skip
    o = ops.REPLAY(tensors, options)
    return o if out is None else out


def advance_ring(
    cursor: Tensor, ring: Ring, num_accepted_tokens: Optional[Tensor] = None,
    *, state_indices: Optional[Tensor] = None, force_flush: Optional[Tensor] = None,
    null_index: int = -1,
) -> None:  # fmt: skip
    """Moves the cursor, in place, past the tokens of a step: once, after its last layer.

    Drafts that are not counted are dropped: the next call overwrites them.

    Args:
        cursor, state_indices, force_flush, null_index: those of the step's
            replay_gated_delta_rule. Skipped rows are unchanged.
        ring: the ring of any layer; only its sizes matter.
        num_accepted_tokens: [N], int32 or int64, if ring.max_tokens is above 1: how many of the
            step's tokens, from its first on, are kept. None if it is 1.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> ring = make_ring(torch.zeros(2, 4, 32, 16), 2, torch.float32, max_tokens=4)
        >>> cursor = torch.zeros(2, 2, dtype=torch.int32)
        >>> advance_ring(cursor, ring, torch.tensor([1, 4]))  # of four tokens each
        >>> cursor.tolist()
        [[0, 1], [0, 4]]
    """
    if not isinstance(ring, Ring):
        checks.no_ring(ring)
    tensors = (cursor, num_accepted_tokens, force_flush, state_indices, *ring[:3])
    ops.ADVANCE(tensors, (ring.max_tokens, null_index))


def materialise_ring(
    state: Tensor, ring: Ring, cursor: Tensor,
    *, state_indices: Optional[Tensor] = None, null_index: int = -1, inplace: bool = False,
) -> Tensor:  # fmt: skip
    """The states of one layer including all tokens of the ring, for callers that read states.

        S = exp(g_1 + .. + g_m) S_0 + sum_j exp(g_{j+1} + .. + g_m) u_j k_j^T

    Args:
        state: [N, HV, V, K], or with state_indices the pool [P, HV, V, K].
        ring, cursor, state_indices, null_index: those of replay_gated_delta_rule, after
            advance_ring.
        inplace: write the states in place. They then include the ring's tokens, so set the
            cursor's rows to zero (`cursor.zero_()`) once all layers are written.

    Returns:
        New states [N, HV, V, K] in fp32 (fp64 for fp64 states), zeros for skipped rows; with
        inplace `state`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> state = torch.ones(2, 4, 32, 16)
        >>> ring, cursor = make_ring(state, 2, torch.float32), torch.zeros(2, 2, dtype=torch.int32)
        >>> torch.equal(materialise_ring(state, ring, cursor), state)  # an empty ring
        True
    """
    if not isinstance(ring, Ring):
        checks.no_ring(ring)
    tensors = (state, *ring[:3], cursor, state_indices)
    written = isinstance(inplace, int) and inplace  # others are refused
    operation = ops.MATERIALISE_IN_PLACE if written else ops.MATERIALISE
    found = operation(tensors, (ring.max_tokens, null_index, inplace))
    return state if written else found
