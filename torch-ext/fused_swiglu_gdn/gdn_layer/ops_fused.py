"""Operators of a layer's fused kernels, for layers."""

from typing import Optional, Tuple

from torch import Tensor

from ..gdn.chunks import count_sequences
from ..runtime.call import tensors_in
from ..runtime.ops import operator, plan, present, run, serve
from .call import LayerDecode
from .ops_train import prologue_gradients, save_prologue
from .reference import fused as reference

FAMILY = "gdn_layer.layer"


@operator("gdn_layer_prologue")
def _gdn_layer_prologue(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    weight: Tensor,  # [D, W]
    bias: Optional[Tensor],  # [D]
    activation: Optional[str],
    cu_seqlens: Optional[Tensor],  # [N + 1]
    initial_states: Optional[Tensor],  # [N, D, W - 1]
    final_width: int,
) -> Tuple[Tensor, Tensor]:
    args = (q, k, v, weight, bias, activation, cu_seqlens, initial_states, final_width)
    y, final = serve(FAMILY, "gdn_layer_prologue", reference.gdn_layer_prologue, args)
    return y, present(final, q)


@_gdn_layer_prologue.register_fake
def _(q, k, v, weight, bias, activation, cu_seqlens, initial_states, final_width):
    (B, T), D = q.shape[:2], weight.shape[0]
    N = count_sequences(B, cu_seqlens)
    return q.new_empty(B, T, D), q.new_empty((N, D, final_width) if final_width else (0,))


_gdn_layer_prologue.register_autograd(prologue_gradients, setup_context=save_prologue)


def gdn_layer_prologue(*args) -> Tuple[Tensor, Optional[Tensor]]:
    """The convolution of q, k and v; args are those of the operator."""
    *_, final_width = args

    def op(*args):
        y, final = _gdn_layer_prologue(*args)
        return y, final if final_width else None

    return run(
        FAMILY, "gdn_layer_prologue", op, reference.gdn_layer_prologue, args,
        differentiable=not final_width,  # the kernel has no gradient of the last inputs
    )  # fmt: skip


@operator("gdn_layer_decode", mutates_args=("conv_state", "state"))
def _gdn_layer_decode(*fields: LayerDecode) -> Tensor:
    args = (LayerDecode.of(fields),)
    return serve(FAMILY, "gdn_layer_decode", reference.gdn_layer_decode, args)


@_gdn_layer_decode.register_fake
def _(q, k, v, *_):
    return q.new_empty(v.flatten(2, -2).shape)


def gdn_layer_decode(call: LayerDecode) -> Tensor:
    """y [B, 1, HV, V]."""

    def op(call):
        return _gdn_layer_decode(*tensors_in(call), *call.options)

    written = (call.conv_state, call.state)
    return run(FAMILY, "gdn_layer_decode", op, reference.gdn_layer_decode, (call,), written=written)


def plan_gdn_layer_decode(call: LayerDecode):
    """Returns a function of the tensors for eager calls that match this one, or None."""
    return plan(FAMILY, "gdn_layer_decode", (call,), written=(call.conv_state, call.state))
