"""Comparison of a forward's gradients with those of its formula.

They are asked of autograd's graph, a node after another. Its engine begins with a thread for each
GPU, and what is forked from a process with such threads can neither differentiate nor use a GPU.
"""

from typing import Callable, Dict, List, Optional

import torch

from .code import Refused
from .facts import Facts
from .trial import alike

HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "register_prehook"}


def same_gradients(facts: Facts, given: list, ours: Callable, theirs: Callable) -> bool:
    """Functions of the given tensors, a formula and a forward, have the same gradients."""
    if not HOOKS.isdisjoint(facts.names):  # which the engine alone would call
        raise Refused("its forward registers a hook of a tensor")
    found: list = []
    for function in (ours, theirs):
        with torch.enable_grad():
            leaves = [x.clone().requires_grad_() for x in given]
            numbers = [y.sin().sum() for y in function(*leaves)]
        try:
            found.append(gradients(numbers, leaves))
        except RuntimeError:  # of a function that has none
            return False
    return not any([g is None for g in found[1]]) and alike(*found)


@torch.no_grad()
def gradients(numbers: list, leaves: list) -> List[Optional[torch.Tensor]]:
    """The gradients of a sum of numbers, as torch.autograd.grad has them: None of a leaf that none
    depends on. Raises RuntimeError for a number that depends on nothing."""
    grads: Dict[object, list] = {}  # of what each node has put out
    for number in numbers:
        if number.grad_fn is None:
            raise RuntimeError("a number has no gradient")
        _add(grads, number.grad_fn, number.output_nr, torch.ones_like(number))
    found = {}
    for node in _in_order(list(grads)):
        given = grads.get(node)
        if given is None:
            continue
        if not node.next_functions:  # of a leaf
            found[id(node.variable)] = given[0]
            continue
        backward = node
        if not callable(node):  # of a torch.autograd.Function, whose author is given no None
            backward, meta = node.apply, node._input_metadata
            given = [_zeros(m) if g is None else g for g, m in zip(given, meta)]
        results = backward(*given)
        results = results if isinstance(results, tuple) else (results,)
        for (source, i), gradient in zip(node.next_functions, results):
            if source is not None and gradient is not None:
                _add(grads, source, i, gradient)
    return [found.get(id(leaf)) for leaf in leaves]


def _zeros(meta) -> torch.Tensor:
    return torch.zeros(*meta.shape, dtype=meta.dtype, device=meta.device)


def _add(grads: dict, node: object, i: int, gradient: torch.Tensor) -> None:
    """Adds a gradient of a node's i-th output, in its shape and dtype: a backward leaves it to its
    caller to sum over what was broadcast."""
    meta = node._input_metadata
    known = grads.setdefault(node, [None] * len(meta))
    gradient = gradient.sum_to_size(meta[i].shape).to(meta[i].dtype)
    known[i] = gradient if known[i] is None else known[i] + gradient


def _in_order(roots: list) -> list:
    """All nodes behind these, each before those that it hands gradients to."""
    order, seen, waiting = [], set(), [(root, False) for root in roots]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(source, False) for source, _ in node.next_functions if source is not None]
    return order[::-1]
