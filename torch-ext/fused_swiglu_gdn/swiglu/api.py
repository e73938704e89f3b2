"""SwiGLU: both projections and the gate, and the whole MLP."""

from typing import Optional

from torch import Tensor

from ..runtime.main_grad import autocast_weights
from .ops import SILU_MUL, SWIGLU
from .ops_mlp import MLP


def fused_swiglu(
    x: Tensor, w_gate: Tensor, w_up: Tensor, b_gate: Optional[Tensor] = None,
    b_up: Optional[Tensor] = None,
    *, activation: str = "silu",
) -> Tensor:  # fmt: skip
    """act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up) in one launch.

    SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202) for `activation="silu"`, GeGLU for
    "gelu_tanh", ReGLU for "relu". A kernel keeps gate and up in fp32 until the gate is applied and
    rounds the result once. If a gradient is needed, gate and up are saved in the dtype of x and
    rounded before the gate is applied, as in eager torch.

    Args:
        x: [..., K]; fp32, bf16 or fp16. Any leading dimensions, any strides.
        w_gate: [N, K], as in nn.Linear; the dtype of x. Any strides: the halves of a packed
            [gate; up] weight, of an interleaved [N, 2, K] or of a transposed [K, 2N] one are
            views that need no copy.
        w_up: [N, K], likewise.
        b_gate, b_up: [N] or None; the dtype of x.
        activation: "silu" (or "swish"), "gelu_tanh" (or "gelu_pytorch_tanh"), "relu"; "gelu", by
            erf, for which there is no kernel: plain torch computes it.

    Returns:
        [..., N], the dtype of x (of autocast, where that is on).

    Raises:
        ValueError: a shape, device or activation does not fit.
        TypeError: an argument is no tensor, or dtypes differ.

    Example:
        >>> x, w_gate, w_up = torch.randn(5, 64), torch.randn(96, 64), torch.randn(96, 64)
        >>> fused_swiglu(x, w_gate, w_up).shape
        torch.Size([5, 96])
    """
    return SWIGLU((x, w_gate, w_up, b_gate, b_up), (activation,))


def fused_swiglu_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, b_gate: Optional[Tensor] = None,
    b_up: Optional[Tensor] = None, b_down: Optional[Tensor] = None,
    *, activation: str = "silu", recompute: bool = False, main_grad: bool = False,
) -> Tensor:  # fmt: skip
    """The Llama MLP: fused_swiglu(x, w_gate, w_up, b_gate, b_up) @ w_down.T + b_down.

    Args:
        x: [..., K]; fp32, bf16 or fp16.
        w_gate, w_up: [N, K]; w_down: [O, N]; the dtype of x.
        b_gate, b_up: [N] or None; b_down: [O] or None; the dtype of x.
        activation: "silu" (or "swish"), "gelu_tanh" (or "gelu_pytorch_tanh"), "relu"; "gelu", by
            erf, for which there is no kernel: plain torch computes it.
        recompute: for training: save only x for the backward pass and recompute the gate and up
            projections there (about 1/8 of the activation memory at Llama's sizes).
        main_grad: for training in eager mode: add the gradients of weights that have an attribute
            `main_grad` (fp32, as Megatron's) to it in fp32, and return none for them.

    Returns:
        [..., O], the dtype of x (of autocast, where that is on).

    Raises:
        ValueError, TypeError: as fused_swiglu.

    Example:
        >>> x, w_down = torch.randn(2, 5, 64), torch.randn(64, 96, requires_grad=True)
        >>> y = fused_swiglu_mlp(x, torch.randn(96, 64), torch.randn(96, 64), w_down)
        >>> y.sum().backward()
        >>> y.shape, w_down.grad.shape
        (torch.Size([2, 5, 64]), torch.Size([64, 96]))
    """
    if main_grad:
        w_gate, w_up, w_down = autocast_weights(w_gate, w_up, w_down)
    options = (activation, recompute, main_grad)
    return MLP((x, w_gate, w_up, w_down, b_gate, b_up, b_down), options)


def silu_mul(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """act(gate) * up: the gate of SwiGLU (arXiv:2002.05202) for projections computed elsewhere.

    For an MLP whose projections are modules of their own (LoRA, quantised weights). Computed in
    fp32 and rounded once. The gradient saves gate and up only.

    Args:
        gate, up: [..., N], of one dtype: fp32, bf16 or fp16; any strides (halves of one tensor
            need no copy).
        activation: as fused_swiglu has it.

    Returns:
        [..., N] in their dtype.

    Raises:
        ValueError: a shape, device or activation does not fit.
        TypeError: an argument is no tensor, or dtypes differ.

    Example:
        >>> gate, up = torch.randn(2, 5, 192).chunk(2, dim=-1)
        >>> silu_mul(gate, up).shape
        torch.Size([2, 5, 96])
    """
    return SILU_MUL((gate, up), (activation,))
