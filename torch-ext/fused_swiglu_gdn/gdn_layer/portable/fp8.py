"""Exports the kernels of the family gdn_layer.fp8 under the names that dispatch looks up."""

from .decode import prepare_gdn_layer_decode_quantise  # noqa: F401
from .rms_norm_gated import prepare_rms_norm_gated_quantise_fwd  # noqa: F401
