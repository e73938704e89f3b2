"""The input of an output projection in FP8, in plain torch."""

from ...fp8.call import Quantised
from ...fp8.reference import quantise_fwd
from ..call import DecodeOptions, LayerDecode
from .fused import gdn_layer_decode
from .layer import rms_norm_gated_fwd


def rms_norm_gated_quantise_fwd(x, gate, weight, eps: float, activation: str) -> Quantised:
    """The gated norm of x [B, T, ..., V]; a token is a row."""
    return quantise_fwd(
        rms_norm_gated_fwd(x, gate, weight, eps, activation).flatten(0, 1).flatten(1)
    )


def gdn_layer_decode_quantise(*fields) -> Quantised:
    """The result of a token, [B, HV V]; both states are updated in place."""
    *tensors, activation, eps, gate, allow_neg_eigval = fields
    options = DecodeOptions(activation, eps, gate, allow_neg_eigval)
    return quantise_fwd(gdn_layer_decode(LayerDecode(*tensors, options)).flatten(1))
