"""Checks of decoding with a ring."""

import torch

from ..runtime import checks
from . import call as calls
from . import checks as rule


def new_ring(state, heads, dtype, rows, max_tokens) -> None:
    checks.has_shape("state", state, "P HV V K", {})
    checks.is_floating("state", state)
    for name, value in (("heads", heads), ("rows", rows), ("max_tokens", max_tokens)):
        checks.is_int(name, value, 1)
    if state.shape[1] == 0 or state.shape[1] % heads != 0:
        raise ValueError(f"heads must divide the {state.shape[1]} heads of state, got {heads}")
    checks.is_floating_dtype("dtype", dtype)
    _has_capacity(rows, max_tokens)


def _has_capacity(rows: int, max_tokens: int) -> None:
    if rows < 2 * max_tokens:
        raise ValueError(
            f"ring must have a capacity of twice max_tokens, {2 * max_tokens} tokens, got {rows}"
        )


def no_ring(ring: object) -> None:
    raise TypeError(f"ring must come from make_ring, got {type(ring).__name__}")


def _ring(ring, like: torch.Tensor, first: str) -> dict:
    """Checks a ring on the device of `like`, and returns its sizes."""
    sizes = {}
    checks.has_shape("ring.k", ring.k, "P H R K", sizes)
    checks.has_shape("ring.u", ring.u, "P HV R V", sizes)
    checks.has_shape("ring.g", ring.g, "P HV R", sizes)
    for name, x in (("ring.k", ring.k), ("ring.u", ring.u), ("ring.g", ring.g)):
        checks.is_floating(name, x)
        checks.same_device(name, x, first, like)
    checks.has_dtype("ring.g", ring.g, (torch.float32, torch.float64))
    if sizes["H"] == 0 or sizes["HV"] % sizes["H"]:
        raise ValueError(
            f"ring.k must have heads that divide the {sizes['HV']} of ring.u, got {sizes['H']}"
        )
    checks.is_int("ring.max_tokens", ring.max_tokens, 1)
    _has_capacity(sizes["R"], ring.max_tokens)
    return sizes


def _cursor(cursor, sizes: dict, like: torch.Tensor, first: str) -> None:
    checks.has_form("cursor", cursor, "N 2", {**sizes, "2": 2}, first, like, (torch.int32,))
    if not cursor.is_contiguous():
        raise ValueError(f"cursor must be contiguous, got strides {cursor.stride()}")


def _of_sequences(sizes: dict, like: torch.Tensor, first: str, **tensors) -> None:
    """Checks tensors [N], if given: flags or row indices."""
    for name, x in tensors.items():
        if x is None:
            continue
        dtypes = (torch.bool,) if name == "force_flush" else checks.INDICES
        checks.has_form(name, x, "N", sizes, first, like, dtypes)


def _is_within(cursor: torch.Tensor, rows: int, max_tokens: int) -> None:
    """Checks the values of a cursor, if the host can read them."""
    if not checks.readable(cursor) or cursor.numel() == 0:
        return
    first, count = cursor.unbind(1)
    last, most = rows - 1 if max_tokens > 1 else 0, rows - max_tokens
    if first.min() < 0 or first.max() > last or count.min() < 0 or count.max() > most:
        raise ValueError(
            f"cursor must have first rows of {checks.between(0, last)} and counts of "
            f"{checks.between(0, most)}, as advance_ring leaves it, got {cursor.tolist()}"
        )


def replay(call: calls.ReplayCall) -> calls.ReplayCall:
    """Checks a call of replay_gated_delta_rule.

    Its options are those of ReplayOptions, and use_gate_in_kernel.
    """
    *options, use_gate = call.options
    call = call._replace(options=calls.ReplayOptions(*options))
    function, tensors = "replay_gated_delta_rule", {"q": call.q, "k": call.k, "v": call.v}
    tensors.update(g=call.g, beta=call.beta, initial_state=call.initial_state)
    rule.forward_only(function, "chunk_gated_delta_rule", **tensors)
    rule.rule_flags(call.options, use_gate)
    checks.is_null_index(call.options.null_index)
    checks.is_tensor("initial_state", call.initial_state)
    rule.gated_delta_rule(call, use_gate)
    _replay(call)
    checks.may_be_written(out=call.out)
    _is_within(call.cursor, call.R, call.options.max_tokens)
    return rule.with_scale(call)


def _replay(call: calls.ReplayCall) -> None:
    ring = call.ring
    sizes = _ring(ring, call.q, "q")
    checks.agrees("ring.k", ring.k, "k", call.k)
    sizes.update(N=call.N)
    if call.state_indices is None:
        checks.has_shape("initial_state", call.initial_state, "N HV V K", sizes)
    checks.has_shape("initial_state", call.initial_state, "P HV V K", sizes)
    checks.has_shape("k", call.k, "N T H K", sizes)
    checks.has_shape("v", call.v, "N T HV V", sizes)
    if not 1 <= call.T <= ring.max_tokens:
        raise ValueError(
            f"q must have a number of tokens T of {checks.between(1, ring.max_tokens)}, the ring's "
            f"max_tokens, got {call.T}"
        )
    checks.has_memory("initial_state", call.initial_state)
    _cursor(call.cursor, sizes, call.q, "q")
    _of_sequences(sizes, call.q, "q", force_flush=call.force_flush)
    if call.out is not None:
        checks.is_written("out", call.out, "v", call.v)


def advance(call: calls.RingAdvance) -> calls.RingAdvance:
    """Checks a call of advance_ring."""
    call = call._replace(options=calls.AdvanceOptions(*call.options))
    cursor, accepted, force_flush, state_indices, *_, (max_tokens, null_index) = call
    checks.is_null_index(null_index)
    checks.is_tensor("cursor", cursor)
    sizes = _ring(call.ring, cursor, "cursor")
    _cursor(cursor, sizes, cursor, "cursor")
    sizes["N"] = cursor.shape[0]
    _of_sequences(
        sizes, cursor, "cursor", num_accepted_tokens=accepted, force_flush=force_flush,
        state_indices=state_indices,
    )  # fmt: skip
    if (accepted is None) != (max_tokens == 1):
        needed = "be None" if max_tokens == 1 else "be given"
        raise ValueError(
            f"num_accepted_tokens must {needed} where ring's max_tokens is {max_tokens}"
        )
    _is_within(cursor, sizes["R"], max_tokens)
    if checks.readable(accepted) and accepted.numel():
        if accepted.min() < 0 or accepted.max() > max_tokens:
            raise ValueError(
                f"num_accepted_tokens must be {checks.between(0, max_tokens)}, "
                f"got {accepted.tolist()}"
            )
    if state_indices is not None:
        checks.names_rows("state_indices", state_indices, sizes["P"], null_index)
    return call


def materialise(call: calls.RingMaterialise) -> calls.RingMaterialise:
    """Checks a call of materialise_ring."""
    call = call._replace(options=calls.MaterialiseOptions(*call.options))
    state, _, _, _, cursor, state_indices, (max_tokens, null_index, inplace) = call
    checks.is_null_index(null_index)
    checks.are_flags(inplace=inplace)
    rule.forward_only("materialise_ring", None, state=state)
    checks.is_tensor("state", state)
    sizes = _ring(call.ring, state, "state")
    checks.has_shape("state", state, "P HV V K", sizes)
    checks.is_floating("state", state)
    checks.is_tensor("cursor", cursor)
    if state_indices is None:
        sizes["N"] = sizes["P"]
    _cursor(cursor, sizes, state, "state")
    sizes["N"] = cursor.shape[0]
    _of_sequences(sizes, state, "state", state_indices=state_indices)
    if inplace:
        checks.has_memory("state", state)
    _is_within(cursor, sizes["R"], max_tokens)
    if state_indices is not None:
        checks.names_rows("state_indices", state_indices, sizes["P"], null_index)
    return call._replace(options=call.options._replace(inplace=bool(inplace)))
