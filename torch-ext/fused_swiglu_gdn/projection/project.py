"""Projections of a few tokens by all weights of a layer, for layers; not part of the API."""

from typing import List, Optional

from torch import Tensor

from .call import MAX_WEIGHTS
from .ops import NORMED_PROJECT, PROJECT, TOKEN_MLP


def project(
    x: Tensor, weights: List[Tensor], apart: bool = True, fp32: bool = False
) -> Optional[List[Tensor]]:
    """x @ w.T for each weight, in one launch; None if that is no gain or not possible.

    Args:
        x: [..., K]. weights: [N_i, K] each, the dtype of x.
        apart: False for the one tensor itself, [..., N].
        fp32: the products are not rounded to the dtype of x.

    Returns:
        Views [..., N_i] of one tensor; None for more than a few tokens, if a gradient is needed,
        under autocast, and if no kernel supports the call.
    """
    if len(weights) > MAX_WEIGHTS:
        return None
    tensors = (x, *weights, *(None,) * (MAX_WEIGHTS - len(weights)))
    run = PROJECT.serving(tensors, (None, fp32))
    if run is None:
        return None
    y = run(*tensors)
    if len(weights) == 1 or not apart:
        return [y]
    return list(y.split_with_sizes([w.shape[0] for w in weights], -1))


def mlp_of_a_token(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str
) -> Optional[Tensor]:
    """(act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T of one token, in two launches; None as from
    project.

    Args:
        x: [..., K], K numbers in all. w_gate, w_up: [N, K]. w_down: [K, N].
    """
    tensors = (x, w_gate, w_up, w_down)
    run = TOKEN_MLP.serving(tensors, (activation,))
    return None if run is None else run(*tensors)


def normed_project(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Optional[Tensor]:
    """(x / rms(x) * norm) weight^T of one token, in one launch; None if no kernel supports the
    call. For calls without gradients and autocast.

    Args:
        x: [..., K], K numbers in all. norm: [K]. weight: [N, K], the dtype of x.
    """
    tensors = (x, norm, weight)
    run = NORMED_PROJECT.serving(tensors, (eps,))
    return None if run is None else run(*tensors)
