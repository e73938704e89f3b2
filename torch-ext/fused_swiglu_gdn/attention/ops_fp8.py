"""Attention outputs in FP8 as operations: of eager mode, without an operator."""

from ..runtime.eager_operation import EagerOperation
from . import checks, reference
from .call import KvCacheAttention, SigmoidGate
from .ops import FAMILY, VARYING

GATE_QUANTISE = EagerOperation(
    "attention.gate_fp8", "sigmoid_gate_quantise_fwd", SigmoidGate, reference
)
ATTENTION_QUANTISE = EagerOperation(
    FAMILY, "kvcache_attention_quantise", KvCacheAttention, reference,
    check=checks.attention_with_kvcache, varying=VARYING,
)  # fmt: skip
