"""The calls of SwiGLU, of the whole MLP, of the gate alone, and of their gradients.

Sizes: M tokens, K model width, N hidden width, D output width of w_down.
"""

from typing import List, NamedTuple, Optional

from torch import Tensor

from ..runtime.call import call


class SwigluOptions(NamedTuple):
    activation: str  # a key of reference.ACTIVATIONS


class GradientOptions(NamedTuple):
    activation: str
    needs: List[bool]  # of x, w_gate, w_up, b_gate, b_up and, for the MLP, w_down


@call
class Swiglu(NamedTuple):
    x: Tensor  # [..., K]
    w_gate: Tensor  # [N, K]
    w_up: Tensor  # [N, K]
    b_gate: Optional[Tensor]  # [N]
    b_up: Optional[Tensor]  # [N]
    options: SwigluOptions


@call
class SwigluGradient(NamedTuple):
    dz: Tensor  # [..., N]
    x: Tensor  # [..., K]
    w_gate: Tensor  # [N, K]
    w_up: Tensor  # [N, K]
    gate_up: Tensor  # [M, 2 N], overwritten
    options: GradientOptions


@call
class SiluMul(NamedTuple):
    gate: Tensor  # [..., N]
    up: Tensor  # [..., N]
    options: SwigluOptions


@call
class SiluMulGradient(NamedTuple):
    gate: Tensor  # [..., N]
    up: Tensor  # [..., N]
    dz: Tensor  # [..., N]
    options: SwigluOptions


class MlpOptions(NamedTuple):
    activation: str
    recompute: bool  # x alone is saved for the gradient
    main_grad: bool  # weights' gradients are added to their main_grad


@call
class SwigluMlp(NamedTuple):
    x: Tensor  # [..., K]
    w_gate: Tensor  # [N, K]
    w_up: Tensor  # [N, K]
    w_down: Tensor  # [D, N]
    b_gate: Optional[Tensor]  # [N]
    b_up: Optional[Tensor]  # [N]
    b_down: Optional[Tensor]  # [D]
    options: MlpOptions


@call
class MlpGradient(NamedTuple):
    dy: Tensor  # [..., D]
    x: Tensor  # [..., K]
    w_gate: Tensor  # [N, K]
    w_up: Tensor  # [N, K]
    w_down: Tensor  # [D, N]
    b_gate: Optional[Tensor]  # [N]
    b_up: Optional[Tensor]  # [N]
    gate_up: Optional[Tensor]  # [M, 2 N], overwritten; None where it is recomputed
    options: GradientOptions
