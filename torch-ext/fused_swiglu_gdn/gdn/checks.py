"""Checks of the gated-delta-rule functions."""

import numbers
from typing import Optional

import torch

from ..runtime import checks
from ..runtime.ops import needs_grad
from .call import GdnCall, GdnOptions, RecurrentCall, RecurrentOptions

MAX_HEAD_DIM = 256


def gated_delta_rule(
    call, use_gate_in_kernel: bool, written: bool = True, padded: bool = False
) -> None:
    """Checks the fields that GdnCall and RecurrentCall share; a scale of None is the default.

    written: the call writes rows of state_indices; rows that are only read may be shared. padded:
    as holds_cu_seqlens has it.
    """
    _shapes(call, use_gate_in_kernel)
    if call.cu_seqlens is not None:
        checks.holds_cu_seqlens("cu_seqlens", call.cu_seqlens, call.T, padded)
    if call.state_indices is not None:
        null = getattr(call.options, "null_index", -1)
        rows = call.initial_state.shape[0]
        checks.names_rows("state_indices", call.state_indices, rows, null, written)


def _shapes(call, use_gate_in_kernel) -> None:
    sizes, q = {}, call.q
    checks.has_shape("q", q, "B T H K", sizes)
    checks.has_shape("k", call.k, "B T H K", sizes)
    checks.has_shape("v", call.v, "B T HV V", sizes)
    checks.is_floating("q", q)
    checks.agrees("k", call.k, "q", q)
    checks.agrees("v", call.v, "q", q)
    _heads(sizes)
    gates = "B T HV K" if call.channels else "B T HV"
    checks.has_form("g", call.g, gates, sizes, "q", q)
    checks.has_form("beta", call.beta, "B T HV", sizes, "q", q)
    _gate(use_gate_in_kernel, call, sizes)
    _scale(call.options.scale)
    _sequences(call, sizes)
    _state(call, sizes)


def rule_flags(options, use_gate) -> None:
    checks.are_flags(
        output_final_state=options.output_final_state,
        use_qk_l2norm_in_kernel=options.use_qk_l2norm,
        use_beta_sigmoid_in_kernel=options.use_beta_sigmoid,
        allow_neg_eigval=options.allow_neg_eigval, state_v_first=options.state_v_first,
        use_gate_in_kernel=use_gate,
    )  # fmt: skip
    if options.allow_neg_eigval and not options.use_beta_sigmoid:
        raise ValueError(
            "allow_neg_eigval must be False unless use_beta_sigmoid_in_kernel is True: it doubles "
            "that sigmoid; a beta that is used as it is may be up to 2 by itself"
        )


def _heads(sizes) -> None:
    checks.share_heads("v", sizes["HV"], "q and k", sizes["H"])
    for name, dim in (("q and k", "K"), ("v", "V")):
        if not 1 <= sizes[dim] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must have a head dim {dim} of 1 to {MAX_HEAD_DIM}, got {sizes[dim]}"
            )


def _gate(use_gate_in_kernel, call, sizes) -> None:
    given = (("A_log", call.A_log), ("dt_bias", call.dt_bias))
    if not use_gate_in_kernel:
        for name, x in given:
            if x is not None:
                raise ValueError(
                    f"{name} must be None unless use_gate_in_kernel is True, got {type(x).__name__}"
                )
        return
    bound = getattr(call.options, "lower_bound", None)
    if call.A_log is None and bound is None:
        where = " without lower_bound" if call.channels else ""
        raise ValueError(f"A_log must be given when use_gate_in_kernel is True{where}, got None")
    sizes["HV*K"] = sizes["HV"] * sizes["K"]
    for (name, x), dims in zip(given, ("HV", "HV*K" if call.channels else "HV")):
        if x is not None:
            checks.has_form(name, x, dims, sizes, "q", call.q)


def _scale(scale: Optional[float]) -> None:
    if scale is not None:
        checks.is_number("scale", scale, "positive", " or None")


def _sequences(call, sizes) -> None:
    sizes["N"] = sizes["B"]
    if call.cu_seqlens is None:
        return
    checks.is_packed(call.cu_seqlens, "q", call.q, "T, H, K")
    sizes["N"] = call.N


def _state(call, sizes) -> None:
    dims = "HV V K" if call.options.state_v_first else "HV K V"
    if call.state_indices is not None:
        counts, kinds = getattr(call, "num_accepted_tokens", None), checks.INDICES
        rows = "N" if counts is None else "N 1+S"
        if counts is not None:
            checks.has_form("num_accepted_tokens", counts, "N", sizes, "q", call.q, kinds)
        checks.has_form("state_indices", call.state_indices, rows, sizes, "q", call.q, kinds)
        if call.initial_state is None:
            raise ValueError(
                "initial_state must be the state pool when state_indices is given, got None"
            )
        dims = "P " + dims
    else:
        dims = "N " + dims
    if call.initial_state is not None:
        checks.has_form("initial_state", call.initial_state, dims, sizes, "q", call.q)


def chunk_size(value: object) -> None:
    if not isinstance(value, numbers.Real) or value != 64:
        raise ValueError(f"chunk_size must be 64, the only supported chunk length, got {value!r}")


def pool_of_prompts(call, kept, cp_context) -> None:
    """Checks a GdnCall with has_initial_state, or without inplace_final_state."""
    if call.state_indices is None:
        raise ValueError(
            "state_indices must be given where has_initial_state is, or inplace_final_state=False, "
            "got None"
        )
    if cp_context is not None:
        if kept is None:
            raise ValueError("inplace_final_state must be True when cp_context is given, got False")
        kind = type(kept).__name__
        raise ValueError(f"has_initial_state must be None when cp_context is given, got {kind}")


def has_initial_state(kept, indices: torch.Tensor) -> None:
    """Checks the flags of sequences, with indices [N] of a checked call."""
    if kept is not None:
        sizes = {"N": indices.shape[0]}
        checks.has_form("has_initial_state", kept, "N", sizes, "q", indices, (torch.bool,))


def checkpoint_every(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value % 64 != 0:
        raise ValueError(f"checkpoint_every must be 0 or a positive multiple of 64, got {value!r}")


def state_dtype(value: object) -> None:
    if value is not None:
        checks.is_floating_dtype("state_dtype", value, ", or None")


def forward_only(function: str, instead: Optional[str], **tensors: Optional[torch.Tensor]) -> None:
    """Checks that no gradient is wanted of any of the tensors. instead: a function that has one."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:  # what is no tensor is refused later
            other = "" if instead is None else f"use {instead}, or "
            raise ValueError(
                f"{name} must not require a gradient: {function} is forward only; "
                f"{other}call it under torch.no_grad()"
            )


def pool_is_written(initial_state: torch.Tensor) -> None:
    """Checks that states can be updated in place."""
    checks.has_memory("initial_state", initial_state)
    checks.may_be_written(initial_state=initial_state)


def decode_states(call) -> None:
    """Checks the fields that only a RecurrentCall has."""
    inplace, all_states = call.options.inplace, call.options.all_states
    if call.output_state_indices is not None:
        written, sizes = call.output_state_indices, {"N": call.N}
        checks.has_form("output_state_indices", written, "N", sizes, "q", call.q, checks.INDICES)
        if call.state_indices is None:
            raise ValueError("state_indices must be given when output_state_indices is, got None")
        rows = call.initial_state.shape[0]
        checks.names_rows("output_state_indices", written, rows, call.options.null_index)
    if call.num_accepted_tokens is not None:
        _accepted(call)
    if inplace and call.initial_state is None:
        raise ValueError("initial_state must be given when inplace_final_state is True, got None")
    if inplace and all_states:
        raise ValueError("output_all_states must be False when inplace_final_state is True")
    if call.state_indices is not None and not inplace and not all_states:
        raise ValueError("inplace_final_state must be True when state_indices is given")
    if inplace:
        pool_is_written(call.initial_state)
    if call.out is not None:
        checks.is_written("out", call.out, "v", call.v)
    checks.may_be_written(out=call.out)


def chunk(call: GdnCall, written: bool = True) -> GdnCall:
    """Checks a call of chunk_gated_delta_rule.

    Its options are those of GdnOptions but the last two, and use_gate_in_kernel, chunk_size and
    recompute. written: as in gated_delta_rule; False also for a pool that is left unchanged.
    """
    *options, use_gate, size, recompute = call.options
    options = GdnOptions(*options, save_blocks=not recompute and needs_grad(call))
    chunk_size(size)
    return in_chunks(call._replace(options=options), use_gate, written)


def in_chunks(call, use_gate: object, written: bool):
    """Checks a call of a chunked form with its own options."""
    options = call.options
    rule_flags(options, use_gate)
    checkpoint_every(options.checkpoint_every)
    state_dtype(options.state_dtype)
    gated_delta_rule(call, use_gate, written, padded=True)
    if written and call.state_indices is not None:
        pool_is_written(call.initial_state)
    return with_scale(call)


def recurrent(call: RecurrentCall) -> RecurrentCall:
    """Checks a call of fused_recurrent_gated_delta_rule.

    Its options are those of RecurrentOptions, and use_gate_in_kernel.
    """
    *options, use_gate = call.options
    return in_steps(call._replace(options=RecurrentOptions(*options)), use_gate)


def in_steps(call, use_gate: object):
    """Checks a call of a recurrent form with its own options."""
    options = call.options
    checks.is_tensor("v", call.v)
    rule_flags(options, use_gate)
    checks.are_flags(inplace_final_state=options.inplace, output_all_states=options.all_states)
    checks.is_null_index(options.null_index)
    written = bool(options.inplace) and call.output_state_indices is None
    gated_delta_rule(call, use_gate, written)
    decode_states(call)
    return with_scale(call)


def with_scale(call):
    """The call with the default scale if none was given."""
    scale = call.options.scale
    scale = call.K**-0.5 if scale is None else float(scale)
    return call._replace(options=call.options._replace(scale=scale))


def _accepted(call) -> None:
    """Checks a call with num_accepted_tokens."""
    counts, rows = call.num_accepted_tokens, call.state_indices
    if rows is None:
        raise ValueError("state_indices must be given when num_accepted_tokens is, got None")
    if call.output_state_indices is not None:
        raise ValueError(
            "output_state_indices must be None when num_accepted_tokens is given, got a tensor"
        )
    if not call.options.inplace:
        raise ValueError("inplace_final_state must be True when num_accepted_tokens is given")
    columns, tokens = rows.shape[1], checks.longest(call.cu_seqlens, call.T)
    if columns < max(tokens, 1):
        raise ValueError(
            f"state_indices must have a column for each token of a sequence, {tokens}, "
            f"got {columns}"
        )
    checks.are_accepted(counts, columns)
