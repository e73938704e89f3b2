"""Checks for the parts of a layer around the gated delta rule."""

from ..gdn.chunks import count_sequences
from ..runtime import checks
from ..runtime.activations import OF_CONVOLUTION, OF_GATED_NORM, SAME
from . import call as calls

MAX_TAPS = 8


def _conv(x, weight, bias, activation, sizes) -> None:
    checks.is_floating("x", x)
    checks.has_form("weight", weight, "D W", sizes, "x", x)
    if not 2 <= sizes["W"] <= MAX_TAPS:
        raise ValueError(f"weight must have 2 to {MAX_TAPS} taps, got {sizes['W']}")
    if bias is not None:
        checks.has_form("bias", bias, "D", sizes, "x", x)
    checks.is_one_of("activation", activation, OF_CONVOLUTION)


def causal_conv1d_fn(call: calls.Convolution) -> calls.Convolution:
    *tensors, (activation, return_final_states) = call
    x, weight, bias, seq_idx, cu_seqlens, initial_states = tensors
    checks.are_flags(return_final_states=return_final_states)
    sizes = {}
    checks.has_shape("x", x, "B D T", sizes)
    _conv(x, weight, bias, activation, sizes)
    sizes["N"], sizes["W-1"] = sizes["B"], sizes["W"] - 1
    if seq_idx is not None:
        if cu_seqlens is not None:
            raise ValueError("seq_idx must be None when cu_seqlens is given, got both")
        if initial_states is not None:
            raise ValueError(
                "initial_states must be None when seq_idx is given, got both: cu_seqlens has states"
            )
        checks.has_form("seq_idx", seq_idx, "B T", sizes, "x", x, checks.INDICES)
    if cu_seqlens is not None:
        checks.is_packed(cu_seqlens, "x", x, "D, T")
        sizes["N"] = count_sequences(sizes["B"], cu_seqlens)
    if initial_states is not None:
        checks.has_form("initial_states", initial_states, "N D W-1", sizes, "x", x)
    if cu_seqlens is not None:
        checks.holds_cu_seqlens("cu_seqlens", cu_seqlens, x.shape[2])
    return calls.Convolution(
        *tensors, calls.ConvolutionOptions(activation, bool(return_final_states))
    )


def causal_conv1d_update(call: calls.ConvolutionUpdate) -> calls.ConvolutionUpdate:
    *tensors, (activation, null_index) = call
    x, conv_state, weight, bias, indices, accepted, cu_seqlens, out = tensors
    checks.is_null_index(null_index)
    sizes = {}
    checks.has_shape("x", x, "B D T", sizes)
    _conv(x, weight, bias, activation, sizes)
    if cu_seqlens is not None:
        checks.is_packed(cu_seqlens, "x", x, "D, T")
    sizes["N"] = count_sequences(sizes["B"], cu_seqlens)
    checks.has_form(
        "conv_state", conv_state, "N D S" if indices is None else "P D S", sizes, "x", x
    )
    for name, y in (("conv_state_indices", indices), ("num_accepted_tokens", accepted)):
        if y is not None:
            checks.has_form(name, y, "N", sizes, "x", x, checks.INDICES)
    checks.has_memory("conv_state", conv_state)
    if out is not None:
        checks.is_written("out", out, "x", x)
    if sizes["S"] < sizes["W"] - 1:
        raise ValueError(
            f"conv_state must hold at least the {sizes['W'] - 1} inputs before a token, "
            f"got {sizes['S']}"
        )
    if cu_seqlens is not None:
        checks.holds_cu_seqlens("cu_seqlens", cu_seqlens, x.shape[2])
    if indices is not None:
        checks.names_rows("conv_state_indices", indices, conv_state.shape[0], null_index)
    if accepted is not None:
        _fits_drafts(x, conv_state.shape[2], weight.shape[1], accepted, cu_seqlens)
    return calls.ConvolutionUpdate(*tensors, calls.UpdateOptions(activation, null_index))


def _fits_drafts(x, columns, taps, accepted, cu_seqlens) -> None:
    """Checks that a state has a column for each token and for all but one of the inputs before
    them."""
    tokens = checks.longest(cu_seqlens, x.shape[2])
    if columns < taps - 2 + tokens:
        raise ValueError(
            f"conv_state must hold {taps - 2 + tokens} columns for {tokens} tokens whose number "
            f"may change, got {columns}"
        )
    checks.are_accepted(accepted, columns - taps + 2)


def rms_norm_gated(call: calls.GatedNorm) -> calls.GatedNorm:
    x, gate, weight, (eps, activation) = call
    checks.has_last("x", x, "D")
    checks.is_floating("x", x)
    checks.has_shape_of("gate", gate, "x", x)
    checks.is_floating("gate", gate)
    checks.same_device("gate", gate, "x", x)
    checks.has_form("weight", weight, "D", {"D": x.shape[-1]}, "x", x)
    checks.is_number("eps", eps, "non-negative")
    checks.is_one_of("activation", activation, OF_GATED_NORM)
    options = calls.GatedNormOptions(float(eps), SAME.get(activation, activation))
    return calls.GatedNorm(x, gate, weight, options)


def gated_delta_gate(a, A_log, dt_bias) -> None:
    checks.has_last("a", a, "HV")
    checks.is_floating("a", a)
    sizes = {"HV": a.shape[-1]}
    checks.has_form("A_log", A_log, "HV", sizes, "a", a)
    if dt_bias is not None:
        checks.has_form("dt_bias", dt_bias, "HV", sizes, "a", a)
