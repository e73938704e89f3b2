"""Checks of the routed experts and of top-k routing."""

from ..runtime import checks
from ..runtime.activations import OF_EXPERTS, SAME
from ..runtime.call import tensors_in
from ..runtime.ops import needs_grad
from .call import EPS, Experts, ExpertsOptions, Topk, TopkOptions

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")


def fused_experts(call: Experts) -> Experts:
    x, w_gate_up, w_down, top_k_index, top_k_weights, b_gate_up, b_down, options = call
    activation, limit, recompute, main_grad, interleaved = options
    checks.are_flags(recompute=recompute, main_grad=main_grad)
    sizes: dict = {}
    checks.has_shape("x", x, "T H", sizes)
    checks.is_floating("x", x)
    checks.has_shape("w_down", w_down, "E H I", sizes)
    checks.is_tensor("w_gate_up", w_gate_up)
    expected = [sizes["E"], 2 * sizes["I"], sizes["H"]]
    if list(w_gate_up.shape) != expected:  # either weight may be the wrong one
        raise ValueError(
            f"w_gate_up must have shape [E, 2*I, H] = {expected} beside w_down of shape [E, H, I] "
            f"= {list(w_down.shape)}, got {list(w_gate_up.shape)}"
        )
    sizes["2*I"] = 2 * sizes["I"]
    if sizes["E"] == 0:
        raise ValueError("w_down must hold at least one expert, got 0")
    checks.has_shape("top_k_index", top_k_index, "T K", sizes)
    checks.has_dtype("top_k_index", top_k_index, checks.INDICES)
    checks.has_shape("top_k_weights", top_k_weights, "T K", sizes)
    checks.is_floating("top_k_weights", top_k_weights)
    for name, weight in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        checks.agrees(name, weight, "x", x)
    for name, routing in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        checks.same_device(name, routing, "x", x)
    for name, bias, shape in (("b_gate_up", b_gate_up, "E 2*I"), ("b_down", b_down, "E H")):
        if bias is not None:
            checks.has_shape(name, bias, shape, sizes)
            checks.agrees(name, bias, "x", x)
    checks.are_flags(interleaved=interleaved)
    checks.is_one_of("activation", activation, OF_EXPERTS)
    if limit is not None:
        checks.is_number("limit", limit, "positive", " or None")
    keeps = needs_grad(tensors_in(call))
    checks.is_eager(keeps and main_grad)
    limit, activation = None if limit is None else float(limit), SAME.get(activation, activation)
    flags = (keeps, bool(recompute), bool(main_grad), bool(interleaved))
    return Experts(*tensors_in(call), ExpertsOptions(activation, limit, *flags))


def fused_topk(call: Topk) -> Topk:
    logits, bias, (top_k, scoring, renormalize, scale, dtype, *groups, eps, rounds) = call
    sizes: dict = {}
    checks.has_shape("logits", logits, "T E", sizes)
    checks.is_floating("logits", logits)
    if sizes["E"] == 0:
        raise ValueError("logits must be of at least one expert, got 0")
    most = _are_groups(sizes["E"], *groups)
    of_groups = " of these groups" if groups[0] > 1 else ""
    checks.is_int("top_k", top_k, 1, most, f", the number of experts{of_groups}")
    checks.is_one_of("scoring", scoring, SCORINGS)
    if bias is not None:
        checks.has_form("bias", bias, "E", sizes, "logits", logits)
    checks.are_flags(renormalize=renormalize, rounds=rounds)
    checks.is_number("scale", scale, "positive")
    if eps is not None:
        checks.is_number("eps", eps, "non-negative", " or None")
    if dtype is not None:
        checks.is_floating_dtype("dtype", dtype, ", or None")
    eps = EPS[scoring] if eps is None else float(eps)
    more = (float(scale), dtype or logits.dtype, *groups, eps, bool(rounds))
    return Topk(logits, bias, TopkOptions(top_k, scoring, bool(renormalize), *more))


def _are_groups(E: int, n_group, topk_group, group_score) -> int:
    """The number of experts among which a token chooses."""
    checks.is_int("n_group", n_group, 1, E, ", the number of experts")
    checks.is_one_of("group_score", group_score, GROUP_SCORES)
    if E % n_group:
        raise ValueError(f"n_group must divide the number of experts, {E}, got {n_group}")
    checks.is_int("topk_group", topk_group, 1, n_group, ", the number of groups")
    if n_group > 1 and group_score == "top2" and E // n_group < 2:
        raise ValueError(
            f'n_group must leave two experts in each group where group_score is "top2", got '
            f"{n_group} groups of {E} experts"
        )
    return E // n_group * topk_group
