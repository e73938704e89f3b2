"""The convolution and the gated norm as operations, with their gradients."""

import torch
from torch import Tensor

from ..gdn.chunks import count_sequences
from ..runtime.call import tensors_in
from ..runtime.operation import Operation
from . import checks
from .call import Convolution, ConvolutionGradient, ConvolutionUpdate, GatedNorm, GatedNormGradient
from .reference import backward, layer

FAMILY = "gdn_layer.layer"


def _like(x: Tensor, y: Tensor) -> Tensor:
    """y in the layout in memory that empty_like(x) has, as kernels make it and fakes promise."""
    made = torch.empty_like(x)
    return y if y.stride() == made.stride() else made.copy_(y)


def _convolution(call: Convolution) -> tuple:
    y, final = layer.causal_conv1d_fwd(*tensors_in(call), *call.options)
    return _like(call.x, y), final if final is None else final.contiguous()


def _convolution_like(call: Convolution) -> tuple:
    x, final = call.x, None
    if call.options.return_final_states:
        N = count_sequences(x.shape[0], call.cu_seqlens)
        final = x.new_empty(N, x.shape[1], call.weight.shape[1] - 1)
    return torch.empty_like(x), final


def _convolution_gradient(call: ConvolutionGradient) -> tuple:
    dx, *rest = backward.causal_conv1d_bwd(*tensors_in(call), *call.options)
    return _like(call.x, dx), *[d if d is None else d.contiguous() for d in rest]


def _convolution_gradient_like(call: ConvolutionGradient) -> tuple:
    rest = (call.weight, call.bias, call.initial_states)
    return torch.empty_like(call.x), *[t if t is None else t.new_empty(t.shape) for t in rest]


def _update(call: ConvolutionUpdate) -> Tensor:
    *tensors, out, options = call
    y = layer.causal_conv1d_update(*tensors, *options)
    if out is None:
        return _like(call.x, y)
    out.copy_(y)
    return y.new_empty(0)


def _update_like(call: ConvolutionUpdate) -> Tensor:
    return torch.empty_like(call.x) if call.out is None else call.x.new_empty(0)


CONVOLUTION = Operation(
    FAMILY, "causal_conv1d_fwd", Convolution, _convolution, check=checks.causal_conv1d_fn,
    outputs=2, fake=_convolution_like,
)  # fmt: skip
CONVOLUTION_GRADIENT = Operation(
    FAMILY, "causal_conv1d_bwd", ConvolutionGradient, _convolution_gradient, outputs=4,
    fake=_convolution_gradient_like,
)  # fmt: skip
# where y is written to `out`, the result is an empty tensor: an operator may not return an input
CONVOLUTION_UPDATE = Operation(
    FAMILY, "causal_conv1d_update", ConvolutionUpdate, _update, check=checks.causal_conv1d_update,
    written=("conv_state", "out"), fake=_update_like,
)  # fmt: skip
GATED_NORM = Operation(
    FAMILY, "rms_norm_gated_fwd", GatedNorm, layer, check=checks.rms_norm_gated, like=("x",)
)
GATED_NORM_GRADIENT = Operation(
    FAMILY, "rms_norm_gated_bwd", GatedNormGradient, backward, outputs=3,
    like=("x", "gate", "weight"),
)  # fmt: skip


def _save_convolution(ctx, inputs, output) -> None:
    *tensors, ctx.activation, ctx.has_final = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _convolution_backward(ctx, dy, d_final):
    tensors = ctx.saved_tensors
    dy = torch.zeros_like(tensors[0]) if dy is None else dy
    d_final = d_final if ctx.has_final else None
    dx, dweight, dbias, d_initial = CONVOLUTION_GRADIENT.in_gradient(
        (*tensors, dy, d_final), (ctx.activation,)
    )
    found = (dx, dweight, dbias, None, None, d_initial, None, None)
    return tuple([d if needed else None for d, needed in zip(found, ctx.needs_input_grad)])


def _save_norm(ctx, inputs, output) -> None:
    *tensors, ctx.eps, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _norm_backward(ctx, dy):
    found = GATED_NORM_GRADIENT.in_gradient((*ctx.saved_tensors, dy), (ctx.eps, ctx.activation))
    needs = ctx.needs_input_grad
    return *[d if needed else None for d, needed in zip(found, needs)], None, None


CONVOLUTION.register_gradient(
    _save_convolution, _convolution_backward, CONVOLUTION_GRADIENT, "causal_conv1d_fn"
)
GATED_NORM.register_gradient(_save_norm, _norm_backward, GATED_NORM_GRADIENT, "rms_norm_gated")
