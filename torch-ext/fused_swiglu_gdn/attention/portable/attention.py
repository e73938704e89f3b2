"""Exports the kernels of the family attention.attention under the names that dispatch looks up."""

from .decode import (  # noqa: F401
    kvcache_attention,
    plan_kvcache_attention,
    supports_kvcache_attention,
)
from .gate import (  # noqa: F401
    plan_sigmoid_gate_fwd,
    sigmoid_gate_bwd,
    sigmoid_gate_fwd,
    supports_sigmoid_gate_bwd,
    supports_sigmoid_gate_fwd,
)
from .rotary import plan_qk_norm_rope_fwd, qk_norm_rope_fwd, supports_qk_norm_rope_fwd  # noqa: F401
from .rotary_backward import qk_norm_rope_bwd, supports_qk_norm_rope_bwd  # noqa: F401
