"""Routed experts, top-k routing and the shared expert in plain torch, on any device.

    out[t] = sum_k w[t, k] (act(x[t] Wg[e]^T) * (x[t] Wu[e]^T)) Wd[e]^T,   e = ids[t, k]

The experts are computed one after the other. An id outside [0, E) means that the expert is held by
another rank: it adds nothing, and the gradient of its weight is 0. Sizes: T tokens, K slots, E
experts, H model width, I hidden width of an expert.
"""

from typing import Iterator, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fp8 import reference as fp8
from ..runtime.dtypes import at_least_fp32
from ..swiglu import reference as swiglu
from .call import ALPHA, Experts, ExpertsBackward, TopkOptions

ACTIVATIONS = {**swiglu.ACTIVATIONS, "swigluoai": lambda x: F.silu(ALPHA * x) / ALPHA}
SLOPES = {  # as swiglu.SLOPES
    **swiglu.SLOPES,
    "swigluoai": lambda d, x: torch.ops.aten.silu_backward(d, ALPHA * x),
}
ADDED = {"swigluoai": 1.0}  # to up, behind the clamp


def _clamped(gate: Tensor, up: Tensor, activation: str, limit: Optional[float]) -> tuple:
    """The argument of the activation, and its factor."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate, up + ADDED[activation] if activation in ADDED else up


def gated(gate: Tensor, up: Tensor, activation: str, limit: Optional[float]) -> Tensor:
    """z [rows, I], in the precision of gate and up."""
    gate, up = _clamped(gate, up, activation, limit)
    return ACTIVATIONS[activation](gate) * up


def _chosen(ids: Tensor, experts: int) -> Iterator[Tuple[int, Tensor, Tensor]]:
    """Yields (expert, its tokens, their slots) for each chosen expert; the host reads the ids.

    If none is chosen, it yields expert 0 without tokens, so that gradients are zeros and not
    absent.
    """
    chosen = [expert for expert in ids.unique().tolist() if 0 <= expert < experts]
    for expert in chosen or [0]:
        yield (expert, *(ids == expert).nonzero(as_tuple=True))


def _gate_and_up(
    call: Union[Experts, ExpertsBackward], rows: Tensor, expert: int
) -> Tuple[Tensor, Tensor]:  # [rows, I] each
    bias = None if call.b_gate_up is None else call.b_gate_up[expert]
    both = at_least_fp32(F.linear(rows, call.w_gate_up[expert], bias))
    return (both[:, ::2], both[:, 1::2]) if call.options.interleaved else both.chunk(2, dim=-1)


def _summed(y: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """The weighted sum over the slots of y [T, K, H] fp32. The weight of an expert that is held
    elsewhere may be anything."""
    absent = (ids < 0) | (ids >= experts)
    weights = weights.to(y.dtype).masked_fill(absent, 0.0)
    return (y * weights.unsqueeze(-1)).sum(1)


def experts_fwd(call: Experts) -> Tensor:  # [T, H]
    """The routed experts; gate, up, z and the experts' results are rounded to the dtype of x.

    The weighted sum is computed in fp32.
    """
    x, _, w_down, ids, weights, _, b_down, options = call
    y = at_least_fp32(x.new_zeros((*ids.shape, x.shape[1])))  # [T, K, H]
    for expert, token, slot in _chosen(ids, w_down.shape[0]):
        gate, up = _gate_and_up(call, x[token], expert)
        z = gated(gate, up, options.activation, options.limit).to(x.dtype)
        bias = None if b_down is None else b_down[expert]
        y = y.index_put((token, slot), F.linear(z, w_down[expert], bias).to(y.dtype))
    return _summed(y, ids, weights, w_down.shape[0]).to(x.dtype)


def fp8_experts_fwd(
    x: Tensor,  # [T, H] bf16
    w_gate_up: Tensor,  # [E, 2 I, H] e4m3: gate above up
    s_gate_up: Tensor,  # [E, 2 I / 128, H / 128]
    w_down: Tensor,  # [E, H, I] e4m3
    s_down: Tensor,  # [E, H / 128, I / 128]
    ids: Tensor,  # [T, K]
    weights: Tensor,  # [T, K]
) -> Tensor:  # [T, H]
    """The same of weights in FP8 with block scales, x and z quantised: fp8/reference.py. Rounds to
    bf16 gate, up, silu(gate), z before it is quantised and the results of the experts."""
    y = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float32)  # [T, K, H]
    for expert, token, slot in _chosen(ids, w_down.shape[0]):
        if len(token):
            rows = fp8.quantise_fwd(x[token])
            both = fp8.multiply_fwd(w_gate_up[expert], s_gate_up[expert], rows)
            z = fp8.silu_mul_quantise_fwd(*both.chunk(2, 1))
            found = fp8.multiply_fwd(w_down[expert], s_down[expert], z)[: len(token)]
            y = y.index_put((token, slot), found.float())
    return _summed(y, ids, weights, w_down.shape[0]).to(x.dtype)


def _gated_gradient(
    dz: Tensor, gate: Tensor, up: Tensor, activation: str, limit: Optional[float],
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """[dgate, dup] [rows, 2 I], in the layout of gate and up, of z = gated(gate, up)."""
    passes = (gate <= limit, up.abs() <= limit) if limit is not None else None
    gate, up = _clamped(gate, up, activation, limit)
    dgate = SLOPES[activation](dz * up, gate)
    dup = dz * ACTIVATIONS[activation](gate)
    if passes is not None:
        dgate, dup = (torch.where(p, d, torch.zeros_like(d)) for p, d in zip(passes, (dgate, dup)))
    return torch.stack([dgate, dup], -1).flatten(1) if interleaved else torch.cat([dgate, dup], -1)


def experts_bwd(call: ExpertsBackward) -> Tuple[Optional[Tensor], ...]:
    """(dx, dw_gate_up, dw_down, dweights, db_gate_up, db_down), None if not needed.

    It is not recorded by autograd: an operator calls it.
    """
    x, w_gate_up, w_down, ids, weights, b_gate_up, b_down, dout, _, _, options = call
    needs, activation, limit, interleaved = options
    dx = at_least_fp32(x.new_zeros((*ids.shape, x.shape[1])))  # [T, K, H]
    dw_gate_up = torch.zeros_like(w_gate_up) if needs[1] else None
    dw_down = torch.zeros_like(w_down) if needs[2] else None
    dweights = torch.zeros_like(weights)
    dbiases = [torch.zeros_like(b) if n else None for b, n in zip((b_gate_up, b_down), needs[4:])]
    for expert, token, slot in _chosen(ids, w_down.shape[0]):
        gate, up = _gate_and_up(call, x[token], expert)
        z = gated(gate, up, activation, limit)
        dz = at_least_fp32(dout[token] @ w_down[expert])  # [rows, I], not yet weighted
        weight = weights[token, slot].to(z.dtype).unsqueeze(-1)
        dweight, wide = (dz * z).sum(-1), at_least_fp32(dout[token])
        if b_down is not None:
            dweight = dweight + wide @ at_least_fp32(b_down[expert])
        dweights[token, slot] = dweight.to(weights.dtype)
        d_gate_up = _gated_gradient(dz * weight, gate, up, activation, limit, interleaved)
        d_gate_up = d_gate_up.to(x.dtype)
        dx[token, slot] = (d_gate_up @ w_gate_up[expert]).to(dx.dtype)
        if needs[1]:
            dw_gate_up[expert] = d_gate_up.t() @ x[token]
        if needs[2]:
            dw_down[expert] = dout[token].t() @ (weight * z).to(x.dtype)
        if dbiases[0] is not None:
            dbiases[0][expert] = at_least_fp32(d_gate_up).sum(0).to(x.dtype)
        if dbiases[1] is not None:
            dbiases[1][expert] = (weight * wide).sum(0).to(x.dtype)
    found = (dx.sum(1).to(x.dtype), dw_gate_up, dw_down, dweights, *dbiases)
    return tuple(gradient if needed else None for gradient, needed in zip(found, needs))


def _scores(logits: Tensor, scoring: str) -> Tensor:
    wide = at_least_fp32(logits)
    return wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()


def group_scores(choice: Tensor, options: TopkOptions) -> Tensor:
    """[T, n_group] of scores for the choice [T, E]."""
    count = 2 if options.group_score == "top2" else 1
    return choice.unflatten(-1, (options.n_group, -1)).topk(count, -1)[0].sum(-1)


def outside_groups(choice: Tensor, options: TopkOptions) -> Tensor:
    """Mask [T, E] of the experts that may not be chosen."""
    order = group_scores(choice, options).sort(dim=-1, descending=True, stable=True)[1]
    outside = torch.zeros_like(order, dtype=torch.bool)
    outside.scatter_(1, order[:, options.topk_group :], True)
    return outside.repeat_interleave(choice.shape[-1] // options.n_group, 1)


def topk_fwd(
    logits: Tensor,  # [T, E]
    bias: Optional[Tensor],  # [E]
    options: TopkOptions,
) -> Tuple[Tensor, Tensor]:  # weights [T, K], ids [T, K] int64
    """Top-k routing by a stable sort.

    Both scores grow with their logit, and two different logits may have equal scores in fp32, so
    without a bias the logits themselves are compared. Groups are compared by scores.
    """
    scores = _scores(logits, options.scoring)
    choice = at_least_fp32(logits)
    if options.rounds:
        scores = choice = scores.to(logits.dtype)
    choice = choice if bias is None else scores + bias
    ids = choice.sort(dim=-1, descending=True, stable=True)[1]
    if options.n_group > 1:
        outside = outside_groups(scores if bias is None else choice, options)
        ids = ids.gather(-1, outside.gather(-1, ids).byte().sort(dim=-1, stable=True)[1])
    ids = ids[:, : options.top_k]
    weights = scores.gather(-1, ids)
    if options.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + options.eps)
    return (weights * options.scale).to(options.dtype), ids.contiguous()


def topk_bwd(
    dweights: Tensor,  # [T, K]
    logits: Tensor,  # [T, E]
    ids: Tensor,  # [T, K]
    options: TopkOptions,
) -> Tensor:  # [T, E]
    scores = _scores(logits, options.scoring)
    dchosen, chosen = dweights.to(scores.dtype) * options.scale, scores.gather(-1, ids)
    if options.renormalize:
        total = chosen.sum(-1, keepdim=True) + options.eps
        dchosen = (dchosen - (dchosen * chosen / total).sum(-1, keepdim=True)) / total
    dscores = torch.zeros_like(scores).scatter(-1, ids, dchosen)
    if options.scoring == "softmax":
        dlogits = scores * (dscores - (dscores * scores).sum(-1, keepdim=True))
    else:
        dlogits = dscores * scores * (1 - scores)
    return dlogits.to(logits.dtype)


def shared_fwd(
    routed: Tensor,  # [T, H]
    shared: Tensor,  # [T, H]
    x: Tensor,  # [T, H]
    w_gate: Tensor,  # [H]
) -> Tensor:  # [T, H]
    """routed + sigmoid(<x, w_gate>) shared, rounded once."""
    routed_, shared_, x_, w_ = map(at_least_fp32, (routed, shared, x, w_gate))
    return (routed_ + (x_ @ w_).sigmoid().unsqueeze(-1) * shared_).to(routed.dtype)


def shared_bwd(
    dout: Tensor,  # [T, H]
    shared: Tensor,  # [T, H]
    x: Tensor,  # [T, H]
    w_gate: Tensor,  # [H]
) -> Tuple[Tensor, Tensor, Tensor]:
    """(dshared [T, H], dx [T, H], the gradient of <x, w_gate> [T])."""
    dout_, shared_, x_, w_ = map(at_least_fp32, (dout, shared, x, w_gate))
    gate = (x_ @ w_).sigmoid()
    dgate = gate * (1 - gate) * (dout_ * shared_).sum(-1)
    dshared, dx = gate.unsqueeze(-1) * dout_, dgate.unsqueeze(-1) * w_
    return dshared.to(shared.dtype), dx.to(x.dtype), dgate.to(x.dtype)
