"""The routed experts of a mixture of experts, as one function."""

from typing import Optional

from torch import Tensor

from ..runtime.main_grad import autocast_weights
from .ops import EXPERTS


def fused_experts(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    *, b_gate_up: Optional[Tensor] = None, b_down: Optional[Tensor] = None,
    activation: str = "silu", limit: Optional[float] = None, interleaved: bool = False,
    recompute: bool = False, main_grad: bool = False,
) -> Tensor:  # fmt: skip
    """The routed experts of a mixture of experts (arXiv:1701.06538), forward and backward.

        out[t] = sum_k w[t, k] (act(x[t] Wg[e]^T) * (x[t] Wu[e]^T)) Wd[e]^T,
        e = top_k_index[t, k],  w = top_k_weights

    with biases, if given, added to the products: b_gate_up[e] to x[t] Wg[e]^T and x[t] Wu[e]^T, and
    b_down[e] to the last.

    The sum over k is computed in fp32, in the order of the slots, and rounded once; it is
    deterministic. The host reads no values, so a call can be captured in a CUDA graph and replayed
    with other indices. An index outside [0, E) means that the expert is held by another rank
    (expert parallelism): it costs nothing, adds nothing, and its weight has a gradient of 0.

    Kernels support bf16 and fp16 if H and I are multiples of 8 and both weights are contiguous, or
    both are `.mT` of contiguous ones, as in gpt-oss; `interleaved` only with the latter. Everything
    else is computed by plain torch, one expert after the other.

    Args:
        x: [T, H]; fp32, bf16 or fp16.
        w_gate_up: [E, 2 I, H], the rows of the gate above those of up; the dtype of x.
        w_down: [E, H, I]; the dtype of x.
        top_k_index: [T, K]; int32 or int64.
        top_k_weights: [T, K]; fp32, bf16 or fp16.
        b_gate_up: [E, 2 I], in the order of w_gate_up's rows; the dtype of x.
        b_down: [E, H]; the dtype of x.
        activation: "silu" (or "swish"), "gelu_tanh" (or "gelu_pytorch_tanh"), "relu", or
            "swigluoai", the gate of gpt-oss: gate * sigmoid(1.702 gate) * (up + 1) in place of
            act(gate) * up.
        limit: if given, gate is clamped to at most `limit` and up to [-limit, limit] first.
        interleaved: the rows of w_gate_up alternate between gate and up.
        recompute: for training: save only x for the backward pass, and recompute gate and up
            there. Otherwise they are saved, [T K, 2 I].
        main_grad: for training in eager mode: add the gradients of weights that have an attribute
            `main_grad` (fp32, as Megatron's) to it in fp32, and return none for them.

    Returns:
        [T, H], the dtype of x (of autocast, if that is on).

    Raises:
        ValueError: a shape, device, activation or limit does not fit.
        TypeError: an argument is no tensor, or a dtype does not fit.

    Example:
        >>> x = torch.randn(5, 64)
        >>> w_gate_up, w_down = torch.randn(8, 2 * 32, 64), torch.randn(8, 64, 32)
        >>> weights, index = torch.rand(5, 8).topk(2, dim=-1)  # a router's
        >>> fused_experts(x, w_gate_up, w_down, index, weights).shape
        torch.Size([5, 64])
    """
    if main_grad:
        w_gate_up, w_down = autocast_weights(w_gate_up, w_down)
    tensors = (x, w_gate_up, w_down, top_k_index, top_k_weights, b_gate_up, b_down)
    return EXPERTS(tensors, (activation, limit, recompute, main_grad, interleaved))[0]
