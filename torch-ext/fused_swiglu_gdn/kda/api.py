"""Kimi Delta Attention with FLA's interface: in chunks, and token by token."""

from functools import partial
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..gdn.api_context import chunk_with_context, lengths_alone
from ..gdn.call import GdnOptions
from ..gdn.checks import pool_of_prompts
from ..gdn.ops import started
from ..parallel.context import known_call
from . import checks, ops
from .call import KdaCall


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: Optional[float] = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None, cu_seqlens_cpu: Optional[Tensor] = None, cp_context=None,
    use_graph: bool = False, max_num_seqs: Optional[int] = None,
    *, A_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None,
    state_indices: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None,
    inplace_final_state: bool = True, state_dtype: Optional[torch.dtype] = None,
    checkpoint_every: int = 0, chunk_size: int = 64,
):  # fmt: skip
    """Kimi Delta Attention (https://arxiv.org/abs/2510.26692) in chunks of 64 tokens.

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    For prompts and training. State, gates, cumulative sums and the triangular solve are in fp32
    (docs/kda.md). No exponent is ever positive, so that gates of any strength are exact, -inf and 0
    among them. The result of a sequence does not depend on the rest of the batch, nor that of a
    token on later tokens.

    Args:
        q, k: [B, T, H, K], K up to 256; fp32, bf16 or fp16. Head h of v uses head h // (HV / H).
        v: [B, T, HV, V], V up to 256, HV a multiple of H; the dtype of q.
        g: [B, T, HV, K], the natural logarithm of the decay of each channel, at most 0; or the raw
            input of the gate, see use_gate_in_kernel. Any floating dtype; fp32 is advised.
        use_gate_in_kernel: g is raw; -exp(A_log) * softplus(g + dt_bias) is used, or with
            lower_bound lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
        lower_bound: of the gates, negative, with use_gate_in_kernel; else it changes nothing.
        return_intermediate_states: refused; see checkpoint_every.
        cp_context: from build_cp_context, for sequences that are split among ranks, as in
            chunk_gated_delta_rule.
        safe_gate, disable_recompute, cu_seqlens_cpu, use_graph, max_num_seqs: accepted, and change
            nothing. All gates are safe, and a CUDA graph can capture any call.
        A_log: HV elements in any shape, for use_gate_in_kernel; may be None with lower_bound: the
            factor exp(A_log) is 1 then.
        dt_bias: [HV * K] or [HV, K], for use_gate_in_kernel; may be None.
        chunk_size: 32 or 64, as in FLA; it changes nothing, chunks have 64 tokens.
        beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, state_indices,
        has_initial_state, inplace_final_state, state_dtype, checkpoint_every: as in
            chunk_gated_delta_rule.

    Returns:
        (o, final_state), or (o, final_state, checkpoints) with checkpoint_every, as of
        chunk_gated_delta_rule: o [B, T, HV, V] in the dtype of q, final_state [N, HV, K, V] and
        checkpoints [B * (T // E), HV, K, V] in state_dtype.

    Raises:
        ValueError: a shape, device, scale, cu_seqlens or option does not fit, or
            return_intermediate_states is given.
        TypeError: an argument is no tensor or of the wrong dtype.

    Example:
        >>> B, T, H, K, V = 1, 100, 2, 16, 32
        >>> q, k, a = torch.randn(3, B, T, H, K).unbind(0)
        >>> v, beta = torch.randn(B, T, H, V), torch.rand(B, T, H)
        >>> o, state = chunk_kda(
        ...     q, k, v, a, beta, output_final_state=True, use_qk_l2norm_in_kernel=True,
        ...     use_gate_in_kernel=True, A_log=torch.zeros(H), dt_bias=torch.zeros(H * K),
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 16, 32]))
    """
    checks.refused(
        return_intermediate_states, cu_seqlens_cpu, max_num_seqs, safe_gate=safe_gate,
        disable_recompute=disable_recompute, inplace_final_state=inplace_final_state,
        use_graph=use_graph,
    )  # fmt: skip
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens)
    options = (
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, output_final_state, state_dtype, checkpoint_every, lower_bound,
        use_gate_in_kernel, chunk_size,
    )  # fmt: skip
    if has_initial_state is not None or not inplace_final_state:
        inplace = bool(inplace_final_state)
        known = inplace and cp_context is None
        if not known or ops.CHUNK_IN_POOL.find(tensors, options, True) is None:
            call = checks.chunk(KdaCall(*checks.flat(*tensors), options), inplace)
            pool_of_prompts(call, has_initial_state, cp_context)
        tensors = started(tensors, has_initial_state, inplace)
    if cp_context is not None:
        run = known_call(cp_context, tensors, options)
        if run is not None:
            return run(*tensors)
        call = KdaCall(*tensors, GdnOptions(*options[:9]))
        lengths = lengths_alone(call, cp_context)
        if lengths is None:
            check = partial(_checked, options=options)
            more = (options, "chunk_kda", checks.flat)
            return chunk_with_context(call, cp_context, check, *more)
        tensors = (*tensors[:-1], lengths)
    operation = ops.CHUNK if state_indices is None else ops.CHUNK_IN_POOL
    o, state, checkpoints = operation(tensors, options)
    if state_indices is not None:
        state = tensors[7]
    if not (output_final_state or state_indices is not None and inplace_final_state):
        state = None
    elif not inplace_final_state:
        state = state.to(state_dtype or state.dtype)
    return (o, state, checkpoints) if checkpoint_every else (o, state)


def _checked(tensors: tuple, options: tuple) -> KdaCall:
    return checks.chunk(KdaCall(*checks.flat(*tensors), options))


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Optional[Tensor] = None,
    A_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    lower_bound: Optional[float] = None, state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    *, state_indices: Optional[Tensor] = None, output_state_indices: Optional[Tensor] = None,
    inplace_final_state: bool = False, output_all_states: bool = False,
    num_accepted_tokens: Optional[Tensor] = None, null_index: int = -1,
    out: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """Kimi Delta Attention token by token: for decoding, one or a few tokens a sequence.

    The recurrence, shapes and options are those of chunk_kda; in addition

    Args:
        beta: may be None: a write strength of 1.
        initial_state: [N, HV, K, V], any floating dtype, or None for zeros; with state_indices
            the pool [P, HV, K, V].
        state_indices, output_state_indices, inplace_final_state, output_all_states,
        num_accepted_tokens, null_index, out: as in fused_recurrent_gated_delta_rule: rows of a pool
            of states to start from and to write, states that are written in place or returned
            after every token, the verification of drafts, and where o is written.

    Returns:
        (o, state), as of fused_recurrent_gated_delta_rule.

    Raises:
        ValueError, TypeError: as chunk_kda.

    Example:
        >>> B, H, K, V = 3, 2, 16, 32
        >>> q, k, g = torch.randn(3, B, 1, H, K).unbind(0)
        >>> v, beta, state = torch.randn(B, 1, H, V), torch.rand(B, 1, H), torch.zeros(B, H, K, V)
        >>> o, new = fused_recurrent_kda(
        ...     q, k, v, -g.abs(), beta, initial_state=state, inplace_final_state=True
        ... )
        >>> o.shape, new is state
        (torch.Size([3, 1, 2, 32]), True)
    """
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
        num_accepted_tokens, cu_seqlens, out,
    )  # fmt: skip
    options = (
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, output_final_state, inplace_final_state, output_all_states, null_index,
        lower_bound, use_gate_in_kernel,
    )  # fmt: skip
    inplace = isinstance(inplace_final_state, int) and inplace_final_state  # others are refused
    operation = ops.RECURRENT_IN_PLACE if inplace else ops.RECURRENT
    o, state = operation(tensors, options)
    if inplace_final_state:
        state = initial_state
    elif not (output_final_state or output_all_states):
        state = None
    return o if out is None else out, state
