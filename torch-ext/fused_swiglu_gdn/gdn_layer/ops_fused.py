"""A layer's fused kernels as operations, for layers."""

from ..gdn.chunks import count_sequences
from ..runtime.activations import SAME
from ..runtime.operation import Operation
from .call import DecodeOptions, LayerDecode, Prologue, PrologueGradient, PrologueOptions
from .ops import FAMILY
from .reference import backward, fused


def _prologue_like(call: Prologue) -> tuple:
    q, (B, T), D, width = call.q, call.q.shape[:2], call.weight.shape[0], call.options.final_width
    N = count_sequences(B, call.cu_seqlens)
    return q.new_empty(B, T, D), q.new_empty(N, D, width) if width else None


def _decode(call: LayerDecode) -> LayerDecode:
    activation, eps, gate, allow_neg_eigval = call.options
    options = DecodeOptions(activation, float(eps), SAME.get(gate, gate), allow_neg_eigval)
    return call._replace(options=options)


PROLOGUE = Operation(
    FAMILY, "gdn_layer_prologue", Prologue, fused, outputs=2, fake=_prologue_like,
    check=lambda call: call._replace(options=PrologueOptions(*call.options)),
    differentiable=lambda call: not call.options.final_width,  # no kernel has the last inputs'
)  # fmt: skip
PROLOGUE_GRADIENT = Operation(
    FAMILY, "gdn_layer_prologue_bwd", PrologueGradient, backward, outputs=4,
    like=("dy", "weight", "bias", "initial_states"),
)  # fmt: skip
DECODE = Operation(
    FAMILY, "gdn_layer_decode", LayerDecode, fused.gdn_layer_decode, check=_decode,
    written=("conv_state", "state"),
    fake=lambda call: call.q.new_empty(call.v.flatten(2, -2).shape),
)  # fmt: skip


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy, _):
    tensors = ctx.saved_tensors
    dx, dweight, dbias, d_initial = PROLOGUE_GRADIENT.in_gradient((*tensors, dy), (ctx.activation,))
    sizes = [x.shape[2] * x.shape[3] for x in tensors[:3]]
    parts = [d.unflatten(2, x.shape[2:]) for d, x in zip(dx.split(sizes, 2), tensors)]
    found = (*parts, dweight, dbias, None, d_initial, None, None)
    return tuple([d if needed else None for d, needed in zip(found, ctx.needs_input_grad)])


PROLOGUE.register_gradient(_save, _backward, PROLOGUE_GRADIENT, "the layer's convolution")
