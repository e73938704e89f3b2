"""The calls of projections of a few tokens."""

from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime.call import call

MAX_TOKENS = 64  # that the kernels take
MAX_WEIGHTS = 6  # of a launch: those of a Gated DeltaNet layer


class ProjectOptions(NamedTuple):
    activation: Optional[str]  # of the first of two products, which then multiply
    fp32: bool  # the products are not rounded to the dtype of x


@call
class Project(NamedTuple):
    x: Tensor  # [..., K]
    w0: Tensor  # [N_i, K], as all of them
    w1: Optional[Tensor]
    w2: Optional[Tensor]
    w3: Optional[Tensor]
    w4: Optional[Tensor]
    w5: Optional[Tensor]
    options: ProjectOptions


class TokenMlpOptions(NamedTuple):
    activation: str


@call
class TokenMlp(NamedTuple):
    x: Tensor  # [..., K], one token
    w_gate: Tensor  # [N, K]
    w_up: Tensor  # [N, K]
    w_down: Tensor  # [K, N]
    options: TokenMlpOptions


class NormedOptions(NamedTuple):
    eps: float


@call
class NormedProject(NamedTuple):
    x: Tensor  # [..., K], one token
    norm: Tensor  # [K], the weight of an RMS norm
    w: Tensor  # [N, K]
    options: NormedOptions


def products(x: Tensor, weights, activation: Optional[str] = None) -> Project:
    """The call for a list of weights."""
    absent = (None,) * (MAX_WEIGHTS - len(weights))
    return Project(x, *weights, *absent, ProjectOptions(activation, False))
