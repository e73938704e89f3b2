"""SwiGLU: both projections and the gate, and the whole MLP."""

import operator
from typing import Optional

from torch import Tensor

from ..runtime.activations import SAME
from ..runtime.cache import CallCache, fast_path_ok
from ..runtime.main_grad import into_main_grad
from ..runtime.ops import autocast, dense, shares_memory
from . import checks, ops, ops_gate

_calls, _gates = CallCache(), CallCache()


def fused_swiglu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Optional[Tensor] = None,
    b_up: Optional[Tensor] = None,
    *,
    activation: str = "silu",
) -> Tensor:
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
    tensors, options = (x, w_gate, w_up, b_gate, b_up), (activation,)
    plan = _calls.find(tensors, options) if fast_path_ok() else None
    if plan is not None:
        z = plan(*tensors)
        if z is not None:
            return z
    given = tensors
    x, w_gate, w_up, b_gate, b_up = tensors = autocast(*given)
    checks.fused_swiglu(*tensors, activation)
    activation = SAME.get(activation, activation)
    b_gate, b_up = dense(b_gate), dense(b_up)
    rows, tensors = _rows(x), (x, w_gate, w_up, b_gate, b_up)
    shape = (*x.shape[:-1], w_gate.shape[0])
    if plan is None and fast_path_ok() and shares_memory(rows, x):
        if all(map(operator.is_, tensors, given)):
            _calls.keep(tensors, options, ops.plan_swiglu(rows, *tensors[1:], activation, shape))
    z = ops.swiglu(rows, w_gate, w_up, b_gate, b_up, activation)
    return z if x.ndim == 2 else z.view(shape)


def _rows(x: Tensor) -> Tensor:
    """x as [M, K] with a contiguous last dimension."""
    return dense(x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 2 else x[None])


def fused_swiglu_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Optional[Tensor] = None,
    b_up: Optional[Tensor] = None,
    b_down: Optional[Tensor] = None,
    *,
    activation: str = "silu",
    recompute: bool = False,
    keep_z: bool = False,
    main_grad: bool = False,
) -> Tensor:
    """The Llama MLP: fused_swiglu(x, w_gate, w_up, b_gate, b_up) @ w_down.T + b_down.

    Args:
        x: [..., K]; fp32, bf16 or fp16.
        w_gate, w_up: [N, K]; w_down: [O, N]; the dtype of x.
        b_gate, b_up: [N] or None; b_down: [O] or None; the dtype of x.
        activation: "silu" (or "swish"), "gelu_tanh" (or "gelu_pytorch_tanh"), "relu"; "gelu", by
            erf, for which there is no kernel: plain torch computes it.
        recompute: for training: save only x for the backward pass and recompute the gate and up
            projections there (about 1/8 of the activation memory at Llama's sizes).
        keep_z: for training: also save fused_swiglu's result instead of recomputing it.
        main_grad: for training in eager mode: add the gradients of weights that have an attribute
            `main_grad` (fp32, as Megatron's) to it in fp32, and return none for them.

    Returns:
        [..., O], the dtype of x (of autocast, where that is on).

    Raises:
        ValueError, TypeError: as fused_swiglu; recompute with keep_z.

    Example:
        >>> x, w_down = torch.randn(2, 5, 64), torch.randn(64, 96, requires_grad=True)
        >>> y = fused_swiglu_mlp(x, torch.randn(96, 64), torch.randn(96, 64), w_down)
        >>> y.sum().backward()
        >>> y.shape, w_down.grad.shape
        (torch.Size([2, 5, 64]), torch.Size([64, 96]))
    """
    modes = checks.training_modes(recompute, keep_z, main_grad)
    given = (w_gate, w_up, w_down)
    x, *weights, b_gate, b_up, b_down = autocast(x, *given, b_gate, b_up, b_down)
    if main_grad:  # what autocast made of a weight has none
        weights = [
            w if w is own else autocast(into_main_grad(own))[0] for w, own in zip(weights, given)
        ]
    w_gate, w_up, w_down = weights
    checks.fused_swiglu_mlp(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation)
    activation = SAME.get(activation, activation)
    biases = map(dense, (b_gate, b_up, b_down))
    args = (_rows(x), w_gate, w_up, w_down, *biases, activation, *modes)
    y = ops.swiglu_mlp(*args)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], w_down.shape[0])


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
    tensors, options = (gate, up), (activation,)
    serve = _gates.find(tensors, options) if fast_path_ok() else None
    if serve is not None:
        return serve(gate, up)
    checks.silu_mul(gate, up, activation)
    activation = SAME.get(activation, activation)
    rows = _rows(gate), _rows(up)
    if fast_path_ok() and all(map(shares_memory, rows, tensors)):
        _gates.keep(tensors, options, ops_gate.plan_silu_mul(*rows, activation, gate.shape))
    return ops_gate.silu_mul(*rows, activation).view(gate.shape)
