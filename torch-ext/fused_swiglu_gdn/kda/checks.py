"""Checks of the functions of Kimi Delta Attention."""

from ..runtime.checks import are_flags, is_int, is_number, is_tensor


def gates(A_log: object, dt_bias: object, lower_bound: object, use_gate: object) -> tuple:
    """A_log and dt_bias as [HV] and [HV * K], of any shapes of so many elements, and the bound,
    which means nothing where gates are not raw."""
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            is_tensor(name, x)
    if lower_bound is not None:
        is_number("lower_bound", lower_bound, or_none=" or None")
        if lower_bound >= 0:
            raise ValueError(f"lower_bound must be negative, got {lower_bound}")
    A_log, dt_bias = (x if x is None or x.ndim == 1 else x.reshape(-1) for x in (A_log, dt_bias))
    return A_log, dt_bias, float(lower_bound) if use_gate and lower_bound is not None else None


def refused(
    return_intermediate_states: object,
    cp_context: object,
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
    if cp_context is not None:
        kind = type(cp_context).__name__
        raise ValueError(
            f"cp_context must be None: sequences are not shared among processes here, got {kind}"
        )
    if cu_seqlens_cpu is not None:
        is_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
    if max_num_seqs is not None:
        is_int("max_num_seqs", max_num_seqs, 0)
