"""Checks of the functions of Kimi Delta Attention."""

import numbers

from torch import Tensor

from ..gdn.call import GdnOptions, RecurrentOptions
from ..gdn.checks import in_chunks, in_steps
from ..runtime.checks import are_flags, is_int, is_number, is_tensor
from ..runtime.ops import autocast
from .call import KdaCall, KdaStepCall


def flat(q, k, v, g, beta, A_log, dt_bias, *more) -> tuple:
    """The tensors in autocast's dtype, with A_log and dt_bias as [HV] and [HV * K], whatever their
    shapes."""
    A_log, dt_bias = [
        x.reshape(-1) if isinstance(x, Tensor) and x.ndim != 1 and not x.is_nested else x
        for x in (A_log, dt_bias)
    ]
    return (*autocast(q, k, v), g, beta, A_log, dt_bias, *more)


def chunk(call: KdaCall, written: bool = True) -> KdaCall:
    """Checks a call of chunk_kda.

    Its options are those of GdnOptions but save_blocks, and use_gate_in_kernel and chunk_size.
    written: False for a pool that is left unchanged.
    """
    *options, bound, use_gate, size = call.options
    call = call._replace(options=GdnOptions(*options, _bound(bound, use_gate)))
    if not isinstance(size, numbers.Real) or size not in (32, 64):
        raise ValueError(f"chunk_size must be 32 or 64, got {size!r}")
    return in_chunks(call, use_gate, written)


def recurrent(call: KdaStepCall) -> KdaStepCall:
    """Checks a call of fused_recurrent_kda.

    Its options are those of RecurrentOptions, and use_gate_in_kernel.
    """
    *options, bound, use_gate = call.options
    call = call._replace(options=RecurrentOptions(*options, _bound(bound, use_gate)))
    return in_steps(call, use_gate)


def _bound(lower_bound: object, use_gate: object):
    """The bound, which means nothing where gates are not raw."""
    if lower_bound is None:
        return None
    is_number("lower_bound", lower_bound, or_none=" or None")
    if lower_bound >= 0:
        raise ValueError(f"lower_bound must be negative, got {lower_bound}")
    return float(lower_bound) if use_gate else None


def refused(
    return_intermediate_states: object,
    cu_seqlens_cpu: object,
    max_num_seqs: object,
    **flags: object,
) -> None:
    """Refuses arguments of FLA's function that this one does not support."""
    are_flags(return_intermediate_states=return_intermediate_states, **flags)
    if return_intermediate_states:
        raise ValueError(
            "return_intermediate_states must be False: checkpoint_every returns the states after "
            f"every so many tokens, got {return_intermediate_states!r}"
        )
    if cu_seqlens_cpu is not None:
        is_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
    if max_num_seqs is not None:
        is_int("max_num_seqs", max_num_seqs, 0)
