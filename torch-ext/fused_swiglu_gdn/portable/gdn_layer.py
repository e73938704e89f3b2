"""What stands round the gated delta rule in a layer: the kernels that ops.gdn_layer asks for."""

from .causal_conv1d import (  # noqa: F401
    causal_conv1d_fwd,
    causal_conv1d_update,
    supports_causal_conv1d_fwd,
    supports_causal_conv1d_update,
)
from .causal_conv1d_backward import causal_conv1d_bwd, supports_causal_conv1d_bwd  # noqa: F401
from .rms_norm_gated import rms_norm_gated_fwd, supports_rms_norm_gated_fwd  # noqa: F401
from .rms_norm_gated_backward import rms_norm_gated_bwd, supports_rms_norm_gated_bwd  # noqa: F401
