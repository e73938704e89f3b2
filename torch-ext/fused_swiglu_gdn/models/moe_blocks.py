"""Routers of transformers' mixtures, and blocks that add a shared expert to routed ones.

A class is served if its forward is, word for word, one of those below, which are transformers' own,
and a run of it on small stand-ins gives what ours gives. The parts of a block stay modules that are
called, so that hooks on them, which record a router's logits or sum over ranks, see what they saw.
"""

import functools
from types import SimpleNamespace
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..experts import ops_shared, ops_topk
from ..experts.api_topk import fused_topk
from ..layers.pinned import Pinned, torchs_own
from ..layers.plain import PLAIN_TENSORS, parameters_of, why_not_tensor
from ..layers.untouched import untouched
from ..runtime import dispatch
from ..runtime.dtypes import HALF
from .code import Refused, source_of, spelled
from .report import Row
from .serving import is_served, own_class, serve, why_not_on, why_replaced
from .stand_ins import quiet


class Router(NamedTuple):
    """What the forward of a router does with the logits, x @ weight.T. Names are of attributes."""

    wide: bool = False  # the product is made in fp32
    scoring: str = "softmax"
    renormalize: Union[bool, str] = True
    dtype: Optional[torch.dtype] = None  # of the weights; None: that of the logits
    bias: Optional[str] = None
    scale: Optional[str] = None
    groups: Optional[str] = None  # of experts, of which some are chosen first
    added: Optional[str] = None  # to the product: the logits are x @ weight.T + this
    flat: bool = False  # of tokens in one dimension


_SOFTMAX = """hidden_states = hidden_states.reshape(-1, self.hidden_dim)
router_logits = F.linear(hidden_states, self.weight)
router_probs = torch.nn.functional.softmax({softmax}, dim=-1)
router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
{normalize}
{cast}router_scores = router_top_value
return (router_logits, router_scores, router_indices)"""
_SUM = "router_top_value /= router_top_value.sum(dim=-1, keepdim=True)"
_CAST = "router_top_value = router_top_value.to(router_logits.dtype)\n"
_IN_FP32 = "router_logits, dtype=torch.float"
_GROUPED_SIGMOID = """hidden_states = hidden_states.view(-1, self.hidden_dim)
router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
scores = router_logits.sigmoid()
scores_for_choice = scores + self.e_score_correction_bias
group_scores = scores_for_choice.view(-1, self.num_group, self.num_experts // self.num_group)\
.topk(2, dim=-1)[0].sum(dim=-1)
group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
group_mask = torch.zeros_like(group_scores)
group_mask.scatter_(1, group_idx, 1)
score_mask = group_mask.unsqueeze(-1).expand(-1, self.num_group, \
self.num_experts // self.num_group).reshape(-1, self.num_experts)
scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float('-inf'))
topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
topk_weights = scores.gather(1, topk_indices)
if self.norm_topk_prob:
    denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
    topk_weights /= denominator
topk_weights = topk_weights * self.routed_scaling_factor
return (router_logits, topk_weights, topk_indices)"""
_SOFTMAX_OF_CHOSEN = """router_logits = F.linear(hidden_states, self.weight, self.bias)
router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)
router_scores = torch.nn.functional.softmax(router_top_value, dim=1, dtype=router_top_value.dtype)
return (router_logits, router_scores, router_indices)"""
ROUTERS = {
    _SOFTMAX.format(
        softmax=_IN_FP32, normalize=f"if self.norm_topk_prob:\n    {_SUM}", cast=_CAST
    ): Router(renormalize="norm_topk_prob"),
    _SOFTMAX.format(softmax=_IN_FP32, normalize=_SUM, cast=_CAST): Router(),
    _SOFTMAX.format(softmax="router_logits.float()", normalize=_SUM, cast=""): Router(
        dtype=torch.float32
    ),
    _GROUPED_SIGMOID: Router(
        True, "sigmoid", "norm_topk_prob", None, "e_score_correction_bias",
        "routed_scaling_factor", "num_group",
    ),
    # which is the softmax of all, renormalized
    _SOFTMAX_OF_CHOSEN: Router(added="bias", flat=True),
}  # fmt: skip
BLOCK = """batch_size, sequence_length, hidden_dim = hidden_states.shape
hidden_states_reshaped = hidden_states.view(-1, hidden_dim)
shared_expert_output = self.shared_expert(hidden_states_reshaped)
_, routing_weights, selected_experts = self.gate(hidden_states_reshaped)
expert_output = self.experts(hidden_states_reshaped, selected_experts, routing_weights)
shared_expert_output = F.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) \
* shared_expert_output
expert_output = expert_output + shared_expert_output
expert_output = expert_output.reshape(batch_size, sequence_length, hidden_dim)
return expert_output"""


def _choose(self, form: Router, hidden_states: torch.Tensor) -> tuple:
    """(logits [T, E], weights [T, K], ids [T, K]): what a router returns."""
    x, weight = hidden_states.reshape(-1, self.hidden_dim), self.weight
    added = None if form.added is None else getattr(self, form.added)
    logits = F.linear(x.float(), weight.float()) if form.wide else F.linear(x, weight, added)
    normalize = form.renormalize
    weights, ids = fused_topk(
        logits,
        self.top_k,
        scoring=form.scoring,
        renormalize=bool(getattr(self, normalize)) if isinstance(normalize, str) else normalize,
        bias=None if form.bias is None else getattr(self, form.bias),
        scale=1.0 if form.scale is None else float(getattr(self, form.scale)),
        dtype=form.dtype,
    )
    return logits, weights, ids


def _with_shared(self, hidden_states: torch.Tensor, w_gate: torch.Tensor) -> torch.Tensor:
    """A block whose parts are modules: routed experts, and one that is shared by all tokens."""
    x = hidden_states.view(-1, hidden_states.shape[-1])
    shared = self.shared_expert(x)
    _, weights, ids = self.gate(x)
    routed = self.experts(x, ids, weights)
    out = ops_shared.add_shared(routed, shared, x, w_gate.view(-1))
    return out.reshape(hidden_states.shape)


class Known(NamedTuple):
    """A class's forward that was looked at."""

    forward: Callable
    form: Union[Router, str, None]  # BLOCK of a class of blocks; None: it is no known one
    pinned: Optional[Pinned]  # what of torch it calls; None where it was not read

    def holds(self, kind: type) -> bool:
        pinned = self.pinned
        return kind.forward is self.forward and (pinned is None or pinned.unchanged())


@functools.cache
def _forward(kind: type, known: Known) -> Callable:
    """A forward for the modules of a class: ours, or the class's own where they may differ."""
    form = known.form

    def router(self, hidden_states, **kwargs):
        own = kind.forward
        if type(hidden_states) not in PLAIN_TENSORS or not untouched() or not known.holds(kind):
            return own(self, hidden_states, **kwargs)
        if kwargs or why_not_router(self, form) or form.flat and hidden_states.dim() != 2:
            return own(self, hidden_states, **kwargs)
        try:
            return _choose(self, form, hidden_states)
        except (TypeError, ValueError):  # what does not fit is its own forward's to take or refuse
            return own(self, hidden_states)

    def block(self, hidden_states, **kwargs):
        x, w_gate, own = hidden_states, _gate_of(self), kind.forward
        if (
            kwargs
            or w_gate is None
            or type(x) not in PLAIN_TENSORS
            or x.dtype is not w_gate.dtype
            or x.dim() != 3
            or torch.is_autocast_enabled(x.device.type)
            or not untouched()
            or not known.holds(kind)
            or not dispatch.serves(ops_shared.FAMILY, "shared_fwd", x)
        ):
            return own(self, hidden_states, **kwargs)
        return _with_shared(self, hidden_states, w_gate)

    forward = block if form == BLOCK else router
    forward.__wrapped__ = known.forward
    return forward


def _gate_of(block: nn.Module) -> Optional[torch.Tensor]:
    """The weight [1, H] of a shared expert's gate, if calling the gate is no more than a product
    with it."""
    found = parameters_of(block._modules.get("shared_expert_gate"))
    if found is None or found[1] is not None or found[0].shape[0] != 1:
        return None
    return found[0]


_known: Dict[type, Known] = {}


def known_of(kind: type) -> Known:
    """What is known of a class. It is looked at again where torch has been patched since."""
    found = _known.get(kind)
    if found is None or not found.holds(kind):
        found = _known[kind] = Known(kind.forward, *_find_form(kind.forward))
    return found


def form_of(kind: type) -> Optional[Union[Router, str]]:
    """The form of a class of routers, BLOCK of a class of blocks, or None."""
    return known_of(kind).form


def _find_form(forward) -> Tuple[Optional[Union[Router, str]], Optional[Pinned]]:
    home = getattr(forward, "__module__", None) or ""
    if home.split(".")[0] == "torch":  # most modules of a model
        return None, None
    try:
        definition = source_of(forward)
    except Refused:
        return None, None
    taken, body = definition.args, spelled(definition)
    form = BLOCK if body == BLOCK else ROUTERS.get(body)
    if form is None or [a.arg for a in taken.args] != ["self", "hidden_states"]:
        return None, None
    if taken.posonlyargs or taken.vararg or taken.defaults or None in taken.kw_defaults:
        return None, None  # further keywords are its own, if a call has any
    seen, pinned = forward.__globals__, torchs_own(forward)
    if any(seen.get(name, module) is not module for name, module in (("torch", torch), ("F", F))):
        return None, pinned
    if pinned.patched is None:
        same = _same_block(forward) if form == BLOCK else _same_choice(forward, form)
        form = form if same else None
    return form, pinned


def _normal(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=random, device="cpu")


def _same_choice(forward, form: Router) -> bool:
    random = torch.Generator("cpu").manual_seed(0)
    router = SimpleNamespace(hidden_dim=8, top_k=3, num_experts=12, weight=_normal(random, 12, 8))
    router.e_score_correction_bias = router.bias = _normal(random, 12)
    router.routed_scaling_factor, router.num_group, router.topk_group = 2.5, 1, 1
    x = _normal(random, 18, 8) if form.flat else _normal(random, 2, 9, 8)
    for router.norm_topk_prob in (True, False):
        try:
            with quiet():
                theirs, ours = forward(router, x), _choose(router, form, x)
        except Exception:  # it wants something that the form has not
            return False
        dense = [x.new_zeros(18, 12).scatter(1, ids, weights) for _, weights, ids in (theirs, ours)]
        if not torch.equal(theirs[0], ours[0]) or not torch.allclose(*dense, 1e-5, 1e-6):
            return False
    return True


def _same_block(forward) -> bool:
    random = torch.Generator("cpu").manual_seed(0)
    x, w_gate, mix = _normal(random, 2, 3, 8), _normal(random, 1, 8), _normal(random, 8, 8)
    block = SimpleNamespace(
        gate=lambda x: (x, x.softmax(-1), x.argsort(-1)),
        experts=lambda x, ids, weights: x @ mix * weights + ids,
        shared_expert=lambda x: (x @ mix.T).tanh(),
        shared_expert_gate=lambda x: F.linear(x, w_gate),
    )
    try:
        with quiet():
            theirs, ours = forward(block, x), _with_shared(block, x, w_gate)
    except Exception:
        return False
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, 1e-5, 1e-6)


def why_not_router(router: nn.Module, form: Router) -> Optional[str]:
    """Why a router of a known class is not served; None if it is."""
    weight = router._parameters.get("weight")
    if weight is None or "weight" in router.__dict__:
        return "its weight is no parameter of its own"
    biases = [getattr(router, name) for name in (form.bias, form.added) if name is not None]
    for name, tensor in (("its weight", weight), *(("its bias", bias) for bias in biases)):
        reason = why_not_tensor(tensor)
        if reason is not None:
            return f"{name} {reason}"
    if form.groups is not None and getattr(router, form.groups) != 1:
        return "its experts are chosen by groups"
    return _why_not_dtype(weight, ops_topk.FAMILY, "topk_fwd")


def _why_not_dtype(weight: torch.Tensor, family: str, operation: str) -> Optional[str]:
    reason = why_not_on(weight.device, family, operation)
    if reason is None and weight.dtype not in HALF:
        return f"its weight is {str(weight.dtype).replace('torch.', '')}, not bfloat16 or float16"
    return reason


def _why_not_block(block: nn.Module) -> Optional[str]:
    w_gate = _gate_of(block)
    if w_gate is None:
        return "shared_expert_gate is no plain product"
    reason = why_not_tensor(w_gate)
    if reason is not None:
        return f"shared_expert_gate has a weight that {reason}"
    return _why_not_dtype(w_gate, ops_shared.FAMILY, "shared_fwd")


def serve_blocks(model: nn.Module) -> List[Row]:
    """Serves all routers, and blocks with a shared expert, whose class is a known one."""
    rows = []
    for name, module in model.named_modules():
        kind = own_class(module)
        form = None if is_served(module) else form_of(kind)
        if form is None:
            continue
        reason = _why_not_block(module) if form == BLOCK else why_not_router(module, form)
        reason = why_replaced(module) or known_of(kind).pinned.patched or reason
        layer = "add_shared" if form == BLOCK else "fused_topk"
        if reason is None:
            serve(module, layer, _forward(kind, known_of(kind)))
        rows.append(Row(name, type(module).__name__, layer, None, reason))
    return rows
