"""Whether a forward has the gradients of its formula.

They are asked of autograd's graph, a node after another. Its engine begins with a thread for each
GPU, and what is forked from a process with such threads can neither differentiate nor use a GPU.
"""

from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from .code import Refused
from .stand_ins import quiet
from .trial import alike

HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def same_gradients(run: Callable[[bool], Tuple[list, list]]) -> bool:
    """run(ours) -> (leaves, numbers made of them); ours and the class's have the same gradients."""
    found: list = []
    with quiet():
        for ours in (True, False):
            with torch.enable_grad(), _WithoutHooks():
                leaves, numbers = run(ours)
            if not all([number.requires_grad for number in numbers]):
                return False
            try:
                found.append(gradients(numbers, leaves))
            except RuntimeError:  # of a function that has none
                return False
    return all([g is not None for g in found[1]]) and alike(*found)


class _WithoutHooks(TorchFunctionMode):
    """Refuses hooks, which the engine alone would run."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in HOOKS:
            raise Refused("its forward registers a hook of a tensor")
        return function(*args, **(kwargs or {}))


def gradients(numbers: list, leaves: list) -> List[Optional[torch.Tensor]]:
    """The gradients of a sum of numbers, as torch.autograd.grad has them: None of a leaf that none
    depends on."""
    grads: Dict[object, list] = {}  # of what each node has put out
    for number in numbers:
        edge = get_gradient_edge(number)
        _add(grads, edge.node, edge.output_nr, torch.ones_like(number))
    for node in _in_order(list(grads)):
        given = grads.get(node)
        if given is None or not node.next_functions:
            continue
        backward = node
        if not callable(node):  # of a torch.autograd.Function, whose author is asked for no None
            backward, meta = node.apply, node._input_metadata
            given = [_zeros(m) if g is None else g for g, m in zip(given, meta)]
        with torch.no_grad():
            results = backward(*given)
        results = results if isinstance(results, tuple) else (results,)
        for (source, i), gradient in zip(node.next_functions, results):
            if source is not None and gradient is not None:
                _add(grads, source, i, gradient)
    nodes = [get_gradient_edge(leaf).node for leaf in leaves]
    return [grads[node][0] if node in grads else None for node in nodes]


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
    order, seen = [], set()

    def visit(node) -> None:
        if node is not None and node not in seen:
            seen.add(node)
            for source, _ in node.next_functions:
                visit(source)
            order.append(node)

    for root in roots:
        visit(root)
    return order[::-1]
