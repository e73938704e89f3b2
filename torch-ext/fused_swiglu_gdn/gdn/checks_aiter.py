"""Checks of the functions with aiter's arguments."""

import torch

from ..runtime import checks


def options(
    use_chunk_hip, use_chunk_flydsl, use_prepare_flydsl, use_exp2, seq_lens_cpu, snapshot_dtype,
    initial_state_indices, inplace_final_state, o, v,
) -> None:  # fmt: skip
    """Checks aiter's arguments that chunk_gated_delta_rule does not have."""
    backends = {
        "use_chunk_hip": use_chunk_hip,
        "use_chunk_flydsl": use_chunk_flydsl,
        "use_prepare_flydsl": use_prepare_flydsl,
    }
    checks.are_flags(**backends, use_exp2=use_exp2, inplace_final_state=inplace_final_state)
    if seq_lens_cpu is not None:
        checks.is_tensor("seq_lens_cpu", seq_lens_cpu)
    if snapshot_dtype is not None and not isinstance(snapshot_dtype, torch.dtype):
        kind = type(snapshot_dtype).__name__
        raise TypeError(f"snapshot_dtype must be a torch.dtype or None, got {kind}")
    checks.is_tensor("v", v)
    for name, value in backends.items():
        if value:
            raise ValueError(f"{name} must be False: only Triton kernels are here, got {value!r}")
    if inplace_final_state and initial_state_indices is None:
        raise ValueError(
            "initial_state_indices must be given when inplace_final_state is True, got None"
        )
    if o is not None:
        checks.is_written("o", o, "v", v)
        checks.may_be_written(o=o)


def without_decodes(cu_seqlens, num_decodes, num_decode_tokens, v):
    """cu_seqlens, if given, without the leading decode sequences."""
    most, why = 0, ", where cu_seqlens is not given"
    if cu_seqlens is not None:
        checks.is_cu_seqlens("cu_seqlens", cu_seqlens, "v", v)
        most, why = len(cu_seqlens) - 1, ", the number of sequences"
    checks.is_int("num_decodes", num_decodes, 0, most, why)
    if cu_seqlens is None:
        checks.is_int("num_decode_tokens", num_decode_tokens, 0, 0, why)
        return None
    checks.is_int("num_decode_tokens", num_decode_tokens, 0)
    if not num_decodes and not num_decode_tokens:
        return cu_seqlens
    if checks.readable(cu_seqlens) and int(cu_seqlens[num_decodes]) != num_decode_tokens:
        raise ValueError(
            f"num_decode_tokens must be cu_seqlens[num_decodes], {int(cu_seqlens[num_decodes])}, "
            f"got {num_decode_tokens}"
        )
    return cu_seqlens[num_decodes:] - num_decode_tokens


def pool(initial_state_indices, initial_state, cu_seqlens, v, written) -> None:
    """Checks of state_indices with error messages for aiter's name of the argument."""
    name, rows, sizes = "initial_state_indices", initial_state_indices, {}
    if rows is None:
        return
    checks.is_tensor(name, rows)
    if initial_state is None:
        raise ValueError(f"initial_state must be the state pool when {name} is given, got None")
    checks.has_shape("v", v, "B T HV V", sizes)
    checks.has_shape("initial_state", initial_state, "P HV V K", sizes)
    sizes["N"] = sizes["B"]
    if cu_seqlens is not None:
        checks.is_cu_seqlens("cu_seqlens", cu_seqlens, "v", v)
        sizes["N"] = len(cu_seqlens) - 1
    checks.has_form(name, rows, "N", sizes, "v", v, checks.INDICES)
    checks.names_rows(name, rows, sizes["P"], -1, written)
