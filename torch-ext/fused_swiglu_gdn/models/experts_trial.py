"""Compares the loop of a class of experts with the formula, on small weights."""

from typing import NamedTuple, Optional

import torch

from ..experts import reference
from ..experts.call import ALPHA, Experts, ExpertsOptions
from .stand_ins import same


class Form(NamedTuple):
    """The differences of a class's gate from act_fn(gate) * up."""

    limit: Optional[str] = None  # the attribute with what gate and up are clamped by
    activation: Optional[str] = None  # whatever act_fn is
    alpha: Optional[str] = None  # the attribute with swigluoai's factor
    interleaved: bool = False  # gate and up in turn


FLAGS = {  # of transformers' classes, where they have none
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
    "has_post_expert_norm": False,
}  # fmt: skip


# tokens, experts, experts of a token and the scale of the weights' values; an expert has none of
# the tokens, one, or many
PROBES = ((4, 3, 2, 1.0), (1, 4, 1, -1.0), (9, 5, 3, 0.3), (33, 2, 1, -2.0))
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def computes(kind: type, forward, form: Form, flags: dict, **more: object) -> bool:
    """The class's own loop over its experts gives the formula, with and without gradients. more:
    what the loop finds in the module besides."""
    return all(
        _agrees(kind, forward, form, flags, more, seed, dtype)
        for seed in range(len(PROBES))
        for dtype in TOLERANCES
    )


def _agrees(
    kind: type, forward, form: Form, flags: dict, more: dict, seed: int, dtype: torch.dtype
) -> bool:
    random, trains = torch.Generator().manual_seed(seed), seed % 2 == 1
    T, E, K, scale = PROBES[seed]
    x, w_gate_up, w_down, weights, *biases = (
        torch.randn(shape, generator=random, dtype=torch.float64).mul(scale).to(dtype)
        for shape in ((T, 5), (E, 12, 5), (E, 5, 6), (T, K), (E, 12), (E, 5))
    )
    x[0, 0] = x[0, 0].abs() * (1 if trains else -1)
    turned = flags["is_transposed"]
    ids = torch.rand(T, E, generator=random).argsort(-1)[:, :K]
    limit = None if form.limit is None else 0.5
    parts = {
        "num_experts": E, "hidden_dim": 5, "intermediate_dim": 6, "training": trains,
        "gate_up_proj": w_gate_up.mT if turned else w_gate_up,
        "down_proj": w_down.mT if turned else w_down,
        "gate_up_proj_bias": biases[0], "down_proj_bias": biases[1],
        "_apply_gate": kind._apply_gate, **more,
    }  # fmt: skip
    parts.update({form.limit: limit} if form.limit else {})
    parts.update({form.alpha: ALPHA} if form.alpha else {})
    stand_in = type("StandIn", (), parts)
    activation = form.activation or ("silu", "relu")[seed % 2]
    stand_in.act_fn = staticmethod(reference.ACTIVATIONS[activation])
    try:
        with torch.set_grad_enabled(trains):
            found = forward(stand_in(), x.clone(), ids, weights)
        gated = stand_in()._apply_gate(biases[0].clone())  # which the loop need not call
    except Exception:  # it wants something that the formula has not
        return False
    both = biases[0].view(E, 6, 2).unbind(-1) if form.interleaved else biases[0].chunk(2, -1)
    z = reference.gated(*both, activation, limit)
    added = biases if flags["has_bias"] else (None, None)
    options = ExpertsOptions(activation, limit, interleaved=form.interleaved)
    expected = reference.experts_fwd(Experts(x, w_gate_up, w_down, ids, weights, *added, options))
    return all(
        type(x) is torch.Tensor and same(x, y, TOLERANCES[y.dtype])
        for x, y in ((found, expected), (gated, z))
    )
