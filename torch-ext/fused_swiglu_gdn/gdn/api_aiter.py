"""The two prefill functions of aiter (pull request ROCm/aiter#2686), forward only."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import checks, checks_aiter
from .api import chunk_gated_delta_rule


def chunk_gated_delta_rule_opt(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """chunk_gated_delta_rule with aiter's interface: forward only, states [N, HV, K, V].

    Args, Returns: as chunk_gated_delta_rule.

    Raises:
        ValueError: also when a gradient would be needed.

    Example:
        >>> q, k = torch.randn(2, 1, 100, 2, 16).unbind(0)
        >>> v, g, beta = torch.randn(1, 100, 4, 32), -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> o, state = chunk_gated_delta_rule_opt(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 16, 32]))
    """
    checks.forward_only(
        "chunk_gated_delta_rule_opt", "chunk_gated_delta_rule",
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state,
    )  # fmt: skip
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def chunk_gated_delta_rule_opt_vk(
    q: Tensor, k: Tensor, v: Tensor, o: Optional[Tensor] = None, g: Optional[Tensor] = None,
    beta: Optional[Tensor] = None, scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Optional[Tensor] = None,
    use_chunk_hip: bool = False, use_chunk_flydsl: bool = False, use_prepare_flydsl: bool = False,
    state_dtype: Optional[torch.dtype] = None, use_exp2: bool = True, num_decodes: int = 0,
    num_decode_tokens: int = 0, seq_lens_cpu: Optional[Tensor] = None,
    prefill_metadata: Optional[object] = None, initial_state_indices: Optional[Tensor] = None,
    inplace_final_state: Optional[bool] = None, snapshot_dtype: Optional[torch.dtype] = None,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """chunk_gated_delta_rule with aiter's interface: forward only, states [N, HV, V, K].

    Note the order: `o` comes before `g`. Arguments not listed are as in chunk_gated_delta_rule.

    Args:
        o: [B, T, HV, V], written and returned, or None.
        use_chunk_hip, use_chunk_flydsl, use_prepare_flydsl: other backends of aiter; must be False.
        state_dtype: dtype of the returned state, as in chunk_gated_delta_rule.
        use_exp2, seq_lens_cpu, prefill_metadata, snapshot_dtype: accepted and without effect (there
            is no host copy of lengths, and no state is stored for each chunk).
        num_decodes, num_decode_tokens: cu_seqlens begins with this many decode sequences and
            tokens, which the other tensors do not contain.
        initial_state_indices: [N], rows of the pool `initial_state`; a negative one skips.
        inplace_final_state: with indices, True (the default) writes the final states to the pool,
            False to a new [N, HV, V, K].

    Raises:
        ValueError: also when a gradient would be needed, or for a backend of aiter's.

    Example:
        >>> q, k = torch.randn(2, 1, 100, 2, 16).unbind(0)
        >>> v, g, beta = torch.randn(1, 100, 4, 32), -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> o, state = chunk_gated_delta_rule_opt_vk(
        ...     q, k, v, g=g, beta=beta, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 32, 16]))
    """
    checks.forward_only(
        "chunk_gated_delta_rule_opt_vk", "chunk_gated_delta_rule",
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state,
    )  # fmt: skip
    checks_aiter.options(
        use_chunk_hip, use_chunk_flydsl, use_prepare_flydsl, use_exp2, seq_lens_cpu,
        snapshot_dtype, initial_state_indices, inplace_final_state, o, v,
    )  # fmt: skip
    cu_seqlens = checks_aiter.without_decodes(cu_seqlens, num_decodes, num_decode_tokens, v)
    indices = initial_state_indices
    in_place = indices is None or inplace_final_state is not False
    checks_aiter.pool(indices, initial_state, cu_seqlens, v, in_place)
    out, state = chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        state_v_first=True, cu_seqlens=cu_seqlens, state_indices=indices, state_dtype=state_dtype,
        inplace_final_state=in_place,
    )  # fmt: skip
    if o is not None:
        out = o.copy_(out)
    return out, state if output_final_state else None
