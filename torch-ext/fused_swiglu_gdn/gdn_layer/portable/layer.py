"""Exports the kernels of the family gdn_layer.layer under the names that dispatch looks up."""

from .causal_conv1d import prepare_causal_conv1d_fwd  # noqa: F401
from .causal_conv1d_backward import prepare_causal_conv1d_bwd  # noqa: F401
from .causal_conv1d_update import prepare_causal_conv1d_update  # noqa: F401
from .decode import prepare_gdn_layer_decode  # noqa: F401
from .prologue import prepare_gdn_layer_prologue  # noqa: F401
from .rms_norm_gated import prepare_rms_norm_gated_fwd  # noqa: F401
from .rms_norm_gated_backward import prepare_rms_norm_gated_bwd  # noqa: F401
