"""The possible roles of the parts of an attention module, by their calls in a run. Which are right
is said by the comparison with ours (attention_trial.py)."""

import itertools
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch

from ..layers.attention import GATES, NORMS, ROTARY, Heads
from .code import Refused

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


def sizes_in(run) -> Tuple[int, int, int]:
    """The widths of queries, keys and values that the attention function got."""
    heads = run.interface.calls[0][1:4]
    if not all(isinstance(t, torch.Tensor) and t.ndim == 4 for t in heads):
        raise Refused("it gives its attention function other things than heads")
    q, k, v = (t.shape for t in heads)
    if q[3] != k[3]:
        raise Refused("its heads are of another size")
    return q[1] * q[3], k[1] * k[3], v[1] * v[3]


def plans_of(trial, run) -> Iterator[Plan]:
    """Every plan of the parts that a run has called, whose widths fit."""
    at, names = run.log.index(None), [entry[0] for entry in run.log if entry is not None]
    if len({*names}) != len(names):
        raise Refused("it calls a part twice")
    sizes = {name: trial.parts[name].sizes for name in names}
    ended, before = names[at:], names[:at]
    products = [name for name in before if len(sizes[name]) == 2]
    norms = [name for name in before if len(sizes[name]) == 1]
    of_values = [name for name in before if not sizes[name]] or [None]
    if trial.takes:  # its keys and values are another layer's
        norms = norms * 2 if len(norms) == 1 and len(products) == 1 else norms
    if {len(ended), len(of_values)} != {1} or len(norms) not in (0, 2) or len(products) > 3:
        raise Refused("its parts are called in another order, or other ones")
    normed = [*itertools.permutations(norms)] if norms else [(None, None)]
    for order in itertools.permutations(products):
        widths = [sizes[name][1] for name in order]
        for heads, pair in itertools.product(HEADS, normed):
            plan = Plan(order, *pair, of_values[0], ended[0], heads)
            if (heads.norm == "none") != bool(norms) and _fits(trial, run, plan, widths):
                yield plan


def _fits(trial, run, plan: Plan, widths: List[int]) -> bool:
    """The projections are as wide as the plan has them."""
    q, k, v = trial.sizes
    heads, q = plan.heads, q * (1 + plan.heads.gated)
    if heads.rotary is not None and not run.tables:
        return False
    if trial.takes:
        return widths == [q] and heads.norm != "all" and plan.v_norm is None
    if len(widths) == 1:
        return widths == [q + k + v] and not heads.gated
    return widths == [q, k, v] or widths == [q, k] and k == v
