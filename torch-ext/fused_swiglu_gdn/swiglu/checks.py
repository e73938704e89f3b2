"""Checks of the SwiGLU functions."""

import torch

from ..runtime import checks
from ..runtime.activations import OF_SWIGLU, SAME
from ..runtime.call import tensors_in
from .call import MlpOptions, SiluMul, Swiglu, SwigluMlp, SwigluOptions


def _projections(x, w_gate, w_up, b_gate, b_up, activation) -> None:
    checks.has_last("x", x, "K")
    checks.is_floating("x", x)
    sizes = {"K": x.shape[-1]}
    _linear("w_gate", w_gate, "N K", "b_gate", b_gate, sizes, x)
    _linear("w_up", w_up, "N K", "b_up", b_up, sizes, x)
    checks.is_one_of("activation", activation, OF_SWIGLU)


def _linear(name, weight, dims, bias_name, bias, sizes, x) -> None:
    """Checks weight and bias of one product; dims of the weight: those of its rows first."""
    checks.has_shape(name, weight, dims, sizes)
    checks.agrees(name, weight, "x", x)
    if bias is not None:
        checks.has_shape(bias_name, bias, dims.split()[0], sizes)
        checks.agrees(bias_name, bias, "x", x)


def _named(activation: str) -> str:
    return SAME.get(activation, activation)


def fused_swiglu(call: Swiglu) -> Swiglu:
    _projections(*tensors_in(call), *call.options)
    return Swiglu(*tensors_in(call), SwigluOptions(*map(_named, call.options)))


def fused_swiglu_mlp(call: SwigluMlp) -> SwigluMlp:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, (activation, *modes) = call
    _projections(x, w_gate, w_up, b_gate, b_up, activation)
    modes = _training_modes(*modes)
    _linear("w_down", w_down, "O N", "b_down", b_down, {"N": w_gate.shape[0]}, x)
    return SwigluMlp(*tensors_in(call), MlpOptions(_named(activation), *modes))


def silu_mul(call: SiluMul) -> SiluMul:
    gate, up, (activation,) = call
    checks.has_last("gate", gate, "N")
    checks.is_floating("gate", gate)
    checks.has_shape_of("up", up, "gate", gate)
    checks.agrees("up", up, "gate", gate)
    checks.is_one_of("activation", activation, OF_SWIGLU)
    return SiluMul(gate, up, SwigluOptions(_named(activation)))


def _training_modes(recompute: bool, main_grad: bool) -> tuple:
    checks.are_flags(recompute=recompute, main_grad=main_grad)
    checks.is_eager(main_grad)
    return bool(recompute), bool(main_grad)


def packed_weight(name: str, weight: object, rows: int, columns: int) -> None:
    """Checks the shape of FusedSwiGLU's `weight`, or of its transpose."""
    checks.is_tensor(name, weight)
    if weight.shape != (rows, columns):
        raise ValueError(f"{name} must have shape [{rows}, {columns}], got {list(weight.shape)}")


def module_input(x: object, in_features: int) -> None:
    checks.is_tensor("x", x)
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(f"x must have shape [..., {in_features}], got {list(x.shape)}")


def linears(gate: object, up: object) -> None:
    for name, linear in (("gate", gate), ("up", up)):
        if type(linear) is not torch.nn.Linear:
            raise TypeError(f"{name} must be an nn.Linear, got {type(linear).__name__}")
        if linear.bias is not None:
            raise ValueError(f"{name} must have no bias: Wf holds weights only, got one")
    if gate.weight.shape != up.weight.shape:
        raise ValueError(
            f"up must have the weight shape of gate, {list(gate.weight.shape)}, "
            f"got {list(up.weight.shape)}"
        )
    checks.agrees("up", up.weight, "gate", gate.weight)
    if gate.weight.is_meta:
        raise ValueError("gate must have a weight to copy, got one on meta")


def module_sizes(in_features: object, hidden_dim: object, block: object) -> None:
    for name, value in (("in_features", in_features), ("hidden_dim", hidden_dim), ("block", block)):
        checks.is_int(name, value, 1)


def module_options(weight_grad: object, gate_first: object, device: object, dtype: object) -> None:
    checks.are_flags(weight_grad=weight_grad, gate_first=gate_first)
    if dtype is not None:
        checks.is_floating_dtype("dtype", dtype, ", or None")
    try:
        torch.empty(0, device=device)
    except (TypeError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        raise ValueError(
            f"device must be one that torch has here, or None, got {device!r}: {said}"
        ) from None
