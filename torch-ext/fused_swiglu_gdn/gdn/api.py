"""The gated delta rule with FLA's interface: in chunks, and token by token."""

from functools import partial
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..parallel.context import known_call
from ..runtime.checks import are_flags
from ..runtime.ops import needs_grad
from . import checks, ops
from .api_context import chunk_with_context, lengths_alone
from .call import GdnCall, GdnOptions
from .ops_train import CHUNK, CHUNK_IN_POOL, cast


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    *, use_gate_in_kernel: bool = False, A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None, state_indices: Optional[Tensor] = None,
    has_initial_state: Optional[Tensor] = None, inplace_final_state: bool = True,
    state_dtype: Optional[torch.dtype] = None, checkpoint_every: int = 0, chunk_size: int = 64,
    recompute: bool = True, cp_context=None,
):  # fmt: skip
    """The gated delta rule (https://arxiv.org/abs/2412.06464) in chunks of 64 tokens.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    For prompts and training. State, gates, cumulative sums and the triangular solve are in fp32
    (docs/gdn.md). The result of a sequence does not depend on the rest of the batch.

    Args:
        q, k: [B, T, H, K], K up to 256; fp32, bf16 or fp16. Head h of v uses head h // (HV / H).
        v: [B, T, HV, V], V up to 256, HV a multiple of H; the dtype of q.
        g: [B, T, HV], the natural logarithm of the decay, at most 0; or the raw input of the gate,
            see use_gate_in_kernel. Any floating dtype; fp32 is advised.
        beta: [B, T, HV], the write strength, any floating dtype.
        scale: factor of the outputs, K ** -0.5 by default. In fp16 kernels take 2^-10 to 2^5, plain
            torch any other.
        initial_state: [N, HV, K, V], any floating dtype, or None for zeros; with state_indices the
            pool [P, HV, K, V].
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum(x ** 2) + 1e-6) first.
        use_beta_sigmoid_in_kernel: beta is a logit; sigmoid(beta) is used.
        allow_neg_eigval: with use_beta_sigmoid_in_kernel alone: 2 * sigmoid(beta) is used.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1], int32 or int64, cumulative lengths of N sequences packed into a batch
            of one (as in FlashAttention); sequences may be empty. Tokens behind the last one are
            padding: their outputs and gradients are zero. On a GPU its values are not checked,
            because that would block the host.
        use_gate_in_kernel: g is raw; -exp(A_log) * softplus(g + dt_bias) is used.
        A_log, dt_bias: [HV], for use_gate_in_kernel; dt_bias may be None.
        state_indices: [N], int32 or int64: sequence n starts from row state_indices[n] of the pool
            `initial_state` and its final state is written there. A negative index skips the
            sequence: its outputs are zero and no row is read or written.
        has_initial_state: [N], bool, with state_indices: False: the sequence starts from zeros,
            and its row is not read.
        inplace_final_state: with state_indices: False leaves the pool unchanged, and final states
            are returned as without a pool (zeros for a sequence that is skipped). Then several
            sequences may start from one row, such as a prefix that they share.
        state_dtype: dtype of the returned states, fp32, bf16, fp16 or fp64: fp32 by default, fp64
            for inputs in fp64. They are computed in that default and rounded once.
        checkpoint_every: E = 0, or a multiple of 64: also return the states after every E tokens.
        chunk_size: 64; anything else is refused.
        recompute: for training: True saves only the inputs; False also saves the prepared blocks
            of each chunk, 272 bytes a token and head of v in half precision (528 in fp32), which
            the backward pass otherwise recomputes.
        cp_context: from build_cp_context, for sequences that are split among ranks. Then the
            tensors have the tokens of this rank, states are those of its local segments, and
            cu_seqlens, state_indices and checkpoint_every are not given.

    Returns:
        (o, final_state), or (o, final_state, checkpoints) with checkpoint_every.

        o: [B, T, HV, V], in the dtype of q.
        final_state: [N, HV, K, V], in state_dtype: the state after the last token of each sequence;
            None without output_final_state. With state_indices it is the pool itself.
        checkpoints: [B * (T // E), HV, K, V], in state_dtype. The state of sequence n after its
            first (j + 1) * E tokens is row n * (T // E) + j, or cu_seqlens[n] // E + j of a packed
            batch. Rows that belong to no sequence, or to one that is skipped, are undefined.

    Raises:
        ValueError: a shape, device, scale, cu_seqlens or option does not fit.
        TypeError: an argument is no tensor or of the wrong dtype.

    Example:
        >>> B, T, H, HV, K, V = 1, 100, 2, 4, 16, 32
        >>> q, k = torch.randn(2, B, T, H, K).unbind(0)
        >>> v, g, beta = torch.randn(B, T, HV, V), -torch.rand(B, T, HV), torch.rand(B, T, HV)
        >>> cu_seqlens = torch.tensor([0, 30, 100])  # two sequences, packed
        >>> o, state = chunk_gated_delta_rule(
        ...     q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True,
        ...     cu_seqlens=cu_seqlens,
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([2, 4, 16, 32]))
    """
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens,
    )  # fmt: skip
    options = (
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, output_final_state, state_dtype, checkpoint_every,
    )  # fmt: skip
    are_flags(inplace_final_state=inplace_final_state, recompute=recompute)
    settings = (use_gate_in_kernel, chunk_size, recompute)
    if has_initial_state is not None or not inplace_final_state:
        inplace = bool(inplace_final_state)
        known = inplace and cp_context is None
        if not known or CHUNK_IN_POOL.find(tensors, (*options, *settings), True) is None:
            call = _checked(tensors, options, settings, inplace)
            checks.pool_of_prompts(call, has_initial_state, cp_context)
        tensors = ops.started(tensors, has_initial_state, inplace)
    if cp_context is not None:
        run = known_call(cp_context, tensors, (*options, *settings))
        if run is not None:
            return run(*tensors)
        saves = not recompute and needs_grad(tensors)
        call = GdnCall(*tensors, GdnOptions(*options, save_blocks=saves))
        lengths = lengths_alone(call, cp_context)
        if lengths is None:
            every = (*options, *settings)
            check = partial(_checked, options=options, settings=settings)
            return chunk_with_context(call, cp_context, check, every, "chunk_gated_delta_rule")
        tensors = (*tensors[:-1], lengths)
    operation = CHUNK if state_indices is None else CHUNK_IN_POOL
    o, state, checkpoints, *_ = operation(tensors, (*options, *settings))
    if state_indices is not None:
        state = tensors[7]
    if not (output_final_state or state_indices is not None and inplace_final_state):
        state = None
    elif not inplace_final_state:
        state = state.to(state_dtype or state.dtype)
    return (o, state, checkpoints) if checkpoint_every else (o, state)


def _checked(tensors: tuple, options: tuple, settings: tuple, written: bool = True) -> GdnCall:
    """Checks the arguments and returns the call that they make."""
    return checks.chunk(GdnCall(*cast(*tensors), (*options, *settings)), written)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, beta: Optional[Tensor] = None,
    scale: Optional[float] = None, initial_state: Optional[Tensor] = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    *, state_indices: Optional[Tensor] = None, output_state_indices: Optional[Tensor] = None,
    inplace_final_state: bool = False, output_all_states: bool = False,
    num_accepted_tokens: Optional[Tensor] = None, null_index: int = -1,
    out: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """The gated delta rule token by token: for decoding, one or a few tokens a sequence.

    The recurrence, shapes and options are those of chunk_gated_delta_rule; in addition

    Args:
        g, beta: may be None: no decay, and a write strength of 1.
        initial_state: [N, HV, K, V], any floating dtype, or None for zeros; with state_indices
            the pool [P, HV, K, V].
        state_indices: [N], int32 or int64: the pool rows to start from. A negative index skips
            the sequence: its outputs are zero and no row is read or written.
        output_state_indices: [N]: the pool rows to write, state_indices by default. If they are
            given, several sequences may start from one row; but no sequence may write a row that
            another one starts from, because the order of the two is undefined.
        inplace_final_state: the final state overwrites `initial_state` (its rows, with
            state_indices) and that tensor is returned.
        output_all_states: return the state after every token, [B, T, HV, K, V], for speculative
            decoding: the state to go on from is the one after the last token that was accepted.
        num_accepted_tokens: [N], int32 or int64, for verifying drafts in a pool, with state_indices
            [N, 1 + S] and inplace_final_state: each sequence has 1 + S rows of its own. It starts
            from row state_indices[n, num_accepted_tokens[n] - 1], and the state after its token t
            is written to row state_indices[n, t]. So the next call only passes how many of these
            tokens were accepted, 1 to 1 + S. A negative index writes nothing, and skips the
            sequence that would start there.
        null_index: -1, or 0 for pools whose row 0 is a null slot, as in vLLM: an index up to this
            one names no row, as a negative one does.
        out: [B, T, HV, V], the dtype of v: o is written there, and `out` is returned. It shares no
            memory with the other tensors. One that is not contiguous is written by a copy.

    Returns:
        (o, state).

        o: [B, T, HV, V], in the dtype of q; `out` itself if it is given.
        state: [N, HV, K, V] fp32, the state after the last token of each sequence; [B, T, HV, K, V]
            with output_all_states; `initial_state` itself with inplace_final_state; None without
            any of the three options.

    Raises:
        ValueError, TypeError: as chunk_gated_delta_rule.

    Example:
        >>> B, H, HV, K, V = 3, 2, 4, 16, 32
        >>> q, k = torch.randn(2, B, 1, H, K).unbind(0)
        >>> v, g, beta = torch.randn(B, 1, HV, V), -torch.rand(B, 1, HV), torch.rand(B, 1, HV)
        >>> state = torch.zeros(B, HV, K, V)
        >>> o, new = fused_recurrent_gated_delta_rule(
        ...     q, k, v, g, beta, initial_state=state, inplace_final_state=True
        ... )
        >>> o.shape, new is state
        (torch.Size([3, 1, 4, 32]), True)

        Rows 2 and 1 of a pool, and a row of the batch without a sequence:

        >>> pool, out = torch.zeros(4, HV, K, V), torch.empty(B, 1, HV, V)
        >>> o, _ = fused_recurrent_gated_delta_rule(
        ...     q, k, v, g, beta, initial_state=pool, state_indices=torch.tensor([2, 0, 1]),
        ...     inplace_final_state=True, null_index=0, out=out,
        ... )
        >>> o is out, [bool(row.any()) for row in pool], bool(o[1].any())
        (True, [False, True, True, False], False)
    """
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
        num_accepted_tokens, cu_seqlens, out,
    )  # fmt: skip
    options = (
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, output_final_state, inplace_final_state, output_all_states, null_index,
        use_gate_in_kernel,
    )  # fmt: skip
    inplace = isinstance(inplace_final_state, int) and inplace_final_state  # others are refused
    operation = ops.RECURRENT_IN_PLACE if inplace else ops.RECURRENT
    o, state = operation(tensors, options)
    if inplace_final_state:
        state = initial_state
    elif not (output_final_state or output_all_states):
        state = None
    return o if out is None else out, state
