"""The input of an output projection in FP8 as operations: of eager mode, without operators."""

from ..runtime.eager_operation import EagerOperation
from .call import GatedNorm, LayerDecode
from .reference import fp8

FAMILY = "gdn_layer.fp8"
NORM_QUANTISE = EagerOperation(FAMILY, "rms_norm_gated_quantise_fwd", GatedNorm, fp8)
DECODE_QUANTISE = EagerOperation(
    FAMILY, "gdn_layer_decode_quantise", LayerDecode, fp8, written=("conv_state", "state")
)
