"""Exports the kernels of the family gdn_layer.layer under the names that dispatch looks up."""

from .causal_conv1d import causal_conv1d_fwd, supports_causal_conv1d_fwd  # noqa: F401
from .causal_conv1d_backward import (  # noqa: F401
    causal_conv1d_bwd,
    gdn_layer_prologue_bwd,
    supports_causal_conv1d_bwd,
    supports_gdn_layer_prologue_bwd,
)
from .causal_conv1d_update import causal_conv1d_update, supports_causal_conv1d_update  # noqa: F401
from .decode import gdn_layer_decode, plan_gdn_layer_decode, supports_gdn_layer_decode  # noqa: F401
from .prologue import gdn_layer_prologue, supports_gdn_layer_prologue  # noqa: F401
from .rms_norm_gated import rms_norm_gated_fwd, supports_rms_norm_gated_fwd  # noqa: F401
from .rms_norm_gated_backward import rms_norm_gated_bwd, supports_rms_norm_gated_bwd  # noqa: F401
