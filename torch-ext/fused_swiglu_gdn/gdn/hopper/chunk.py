"""Gated DeltaNet prefill on Hopper: prepare, then the warp-specialised scan (docs/gdn_hopper.md).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, N sequences, C = 64 tokens
a chunk.
"""

from typing import Optional, Tuple

import torch

from ...runtime import device
from ...runtime.cache import CallCache
from ...runtime.launch import aligned
from ..portable import prepare as common
from .backward import gdn_chunk_bwd, supports_gdn_chunk_bwd  # noqa: F401
from .plan import HEAD_DIM, Prepare, Scan, has_wgmma, reads_by_tma


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
        has_wgmma(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[3] == v.shape[3] == HEAD_DIM
        and 0 < q.shape[0] * q.shape[1] < 2**30
        and (cu_seqlens is None or cu_seqlens.shape[0] > 1)
        and all(reads_by_tma(x) for x in (q, k, v))
        and _dense_heads(initial_state)
    )


def supports_gdn_prepare(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid,
    allow_neg_eigval,
) -> bool:  # fmt: skip
    """As for the scan, and _heads_in_warps. Other calls are for the common kernel."""
    return (
        has_wgmma(q.device)
        and _heads_in_warps(q, g, use_qk_l2norm)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype
        and q.shape[3] == HEAD_DIM
        and 0 < q.shape[0] * q.shape[1] < 2**30
        and (cu_seqlens is None or cu_seqlens.shape[0] > 1)
        and reads_by_tma(q)
        and reads_by_tma(k)
    )


def _heads_in_warps(q: torch.Tensor, g: torch.Tensor, use_qk_l2norm: bool) -> bool:
    """Keys of norm 1, whose products fp16 holds, and an even number of value heads for each."""
    return use_qk_l2norm and g.shape[2] // q.shape[2] % 2 == 0


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
    tensors = (q, k, g, beta, A_log, dt_bias, cu_seqlens)
    with device.on(q.device):
        return Prepare(*tensors, scale, use_beta_sigmoid, allow_neg_eigval)(*tensors)


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
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens)
    call = _call(
        *tensors, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
        output_final_state, state_dtype, checkpoint_every,
    )  # fmt: skip
    return call(*tensors, prepared)


def plan_gdn_chunk_fwd(*args):
    """gdn_chunk_fwd for all calls like this one, from their ten tensors."""
    if not aligned(*args[:3]):
        return None
    call, options = _call(*args), args[10:]

    def run(*tensors):
        if aligned(*tensors[:3]):
            return call(*tensors)
        tokens = (x if reads_by_tma(x) else x.clone() for x in tensors[:3])
        return gdn_chunk_fwd(*tokens, *tensors[3:], *options)

    return run


_calls = CallCache()


def _call(*args) -> "_Call":
    """The _Call of these arguments, from among those that have been made."""
    if not aligned(*args[:3]):
        return _Call(*args)
    return _calls.get(_Call, args[:10], args[10:])


class _Call:
    """gdn_chunk_fwd for calls of one kind: shapes, strides, dtypes and options are known."""

    __slots__ = ("prepare", "scan", "args")

    def __init__(self, *args):
        q, k, v, g, beta, A_log, dt_bias, state, indices, cu_seqlens, scale, *flags = args
        l2norm, sigmoid, neg, *rest = flags
        self.prepare = None
        if _heads_in_warps(q, g, l2norm):
            self.prepare = Prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, sigmoid, neg)
        self.scan = Scan(q, k, v, state, indices, cu_seqlens, *rest)
        self.args = tuple(args[10:])

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens,
        prepared=None,
    ):  # fmt: skip
        gates = (g, beta, A_log, dt_bias, cu_seqlens)
        rest = (initial_state, state_indices, cu_seqlens)
        with device.on(q.device):
            if prepared is None and self.prepare is not None:
                memory, (*blocks, warm) = self.prepare.places(q, self.scan.warm)
                self.prepare.launch(q, k, gates, blocks)
            else:
                blocks = prepared or common.gdn_prepare(q, k, *gates, *self.args[:4])
                warm = blocks[3].new_empty(self.scan.warm)
            return self.scan(q, k, v, blocks, warm, *rest)
