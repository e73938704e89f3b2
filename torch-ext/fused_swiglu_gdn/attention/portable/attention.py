"""Exports the kernels of the family attention.attention under the names that dispatch looks up."""

from .decode import (  # noqa: F401
    prepare_kvcache_attention,
    prepare_kvcache_attention_quantise,
)
from .gate import prepare_sigmoid_gate_bwd, prepare_sigmoid_gate_fwd  # noqa: F401
from .rotary import prepare_qk_norm_rope_fwd  # noqa: F401
from .rotary_backward import prepare_qk_norm_rope_bwd  # noqa: F401
