"""The roles of the parts of an attention module: of all plans the one is found that gives what the
attention function gets, and the output."""

import itertools
from typing import Callable, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch

from ..layers.attention import GATES, NORMS, ROTARY, Heads
from .code import Refused
from .stand_ins import same

# every form of queries and keys
HEADS = tuple(itertools.starmap(Heads, itertools.product(GATES, NORMS, (*ROTARY, None))))


class Plan(NamedTuple):
    """The parts of a forward's computation that are the same in every run."""

    projections: Tuple[str, ...]
    q_norm: Optional[str]
    k_norm: Optional[str]
    v_norm: Optional[str]
    out: str
    heads: Heads


def planned(trial, run) -> Tuple[Plan, tuple]:
    """The plan that agrees with a run, and the widths of queries, keys and values."""
    module, q, k, v, _, _, out = run.interface.calls[0]
    if module is not run.twin:
        raise Refused("it gives its attention function another module")
    k, v = _before_the_cache(run, trial.cache, trial.takes, k, v)
    for t in (q, k, v):
        if not isinstance(t, torch.Tensor) or t.ndim != 4:
            raise Refused("it gives its attention function other things than heads")
    if q.shape[-1] != k.shape[-1]:
        raise Refused("its heads are of another size")
    at, made, norms = run.log.index(None), {}, []
    ended, names = run.log[at + 1 :], [entry[0] for entry in run.log if entry is not None]
    if len({*names}) != len(names):
        raise Refused("it calls a part twice")
    for name, x, y in run.log[:at]:
        if not trial.parts[name].sizes[1:]:
            norms.append(name)
            continue
        made[name] = y
        if x is not run.x and not same(x, run.x):
            raise Refused("its projections are of something else than the hidden states")
    of_values = [name for name in norms if not trial.parts[name].sizes] or [None]
    norms = [name for name in norms if trial.parts[name].sizes]
    if trial.takes:  # its keys and values are another layer's
        norms = norms * 2 if len(norms) == 1 and len(made) == 1 else norms
    if {len(ended), len(of_values)} != {1} or len(norms) not in (0, 2) or len(made) > 3:
        raise Refused("its parts are called in another order, or other ones")
    plans = _plans(made, norms, of_values[0], ended[0][0])
    plan, gate = _compared(trial, run, made, (q, k, v), plans)
    y = out.reshape(*run.x.shape[:2], -1)
    y = trial.parts[plan.out](y if gate is None else y * torch.sigmoid(gate))
    result = run.result
    right = type(result) is tuple and len(result) == 2 and result[1] == "weights"
    if plan.out != ended[0][0] or not right or not same(result[0], y):
        raise Refused("it is another formula after attention")
    return plan, _widths(q, k, v)


def _before_the_cache(run, argument: Optional[str], takes: bool, k, v):
    """Keys and values as passed to the cache, if one was given and they are not another layer's."""
    cache = run.given.get(argument)
    if cache is None or takes and not cache.calls:
        return k, v
    if len(cache.calls) != 1:
        raise Refused("it updates the cache in another way")
    k_new, v_new, *_ = cache.calls[0]
    kept = torch.cat([k_new * 0.5, k_new], -2), torch.cat([v_new * 0.25, v_new], -2)
    if not (same(k, kept[0]) and same(v, kept[1])):
        raise Refused("it changes keys or values after the cache")
    return k_new, v_new


def _compared(trial, run, made: dict, heads: tuple, plans: Iterable[Plan]) -> tuple:
    """The plan that gives q, k and v of what projections have made, and its gate."""
    (q, k, v), D, parts = heads, heads[0].shape[-1], trial.parts
    sizes, tables = _widths(*heads), trial.tables and run.tables
    why = "its values are another formula"
    for plan in plans:
        form, raw = plan.heads, [made[name] for name in plan.projections]
        if len(raw) == 1 and raw[0].shape[-1] == sum(sizes) and not trial.takes:
            raw = raw[0].split(sizes, -1)
        raw = [*raw, *raw[1:]] if len(raw) == 2 else raw
        if trial.takes:
            if len(raw) != 1 or form.norm == "all" or plan.v_norm is not None:
                continue
        elif len(raw) != 3 or raw[2].shape[-1] != sizes[2]:
            continue
        else:
            values = raw[2].view(*raw[2].shape[:2], -1, v.shape[-1])
            values = values if plan.v_norm is None else parts[plan.v_norm](values)
            if not same(v, values.transpose(1, 2)):
                continue
        why, gate = "its queries and keys are another formula", None
        if form.rotary is not None and not tables:
            continue
        if raw[0].shape[-1] != sizes[0] * (1 + form.gated):
            continue
        if not trial.takes and raw[1].shape[-1] != sizes[1]:
            continue
        own_q = raw[0]
        if form.gated:
            own_q, gate = own_q.unflatten(-1, (-1, 2 * D)).chunk(2, -1)
            own_q, gate = own_q.flatten(2), gate.flatten(2)
        try:
            queries = _formed(own_q, D, parts.get(plan.q_norm), form, tables)
            if not trial.scales(run, queries, q):
                continue
            if trial.takes or same(k, _formed(raw[1], D, parts.get(plan.k_norm), form, tables)):
                return plan, gate
        except (Refused, RuntimeError, TypeError):
            continue
    raise Refused(why)


def _formed(x, D: int, norm: Optional[Callable], form: Heads, tables):
    """x [B, T, H * D] as heads [B, H, T, D], normalised and rotated."""
    x = norm(x) if form.norm == "all" else x
    x = x.reshape(*x.shape[:2], -1, D).transpose(1, 2)
    x = norm(x) if form.norm == "head" else x
    if form.rotary is None:
        return x
    cos, sin = tables[0].unsqueeze(-3), tables[1].unsqueeze(-3)
    if form.rotary == "angles":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    R = cos.shape[-1]
    y, rest = x[..., :R], x[..., R:]
    if form.rotary in ("halves", "angles"):
        a, b = y.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
    else:
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    if form.rotary == "pairs":
        cos, sin = (t[..., : R // 2].repeat_interleave(2, -1) for t in (cos, sin))
    return torch.cat([y * cos + turned * sin, rest], -1)


def _plans(
    projections: Iterable[str], norms: List[str], of_values: Optional[str], out: str
) -> Iterator[Plan]:
    """Every plan of these parts."""
    normed = [*itertools.permutations(norms)] if norms else [(None, None)]
    for order in itertools.permutations(projections):
        for heads, pair in itertools.product(HEADS, normed):
            if (heads.norm == "none") != bool(norms):
                yield Plan(order, *pair, of_values, out, heads)


def _widths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tuple[int, int, int]:
    return q.shape[1] * q.shape[3], k.shape[1] * k.shape[3], v.shape[1] * v.shape[3]
