"""The gate on an attention output in FP8 as an operation: of eager mode, without an operator."""

from ..fp8.ops import EagerOperation
from . import reference
from .call import SigmoidGate

GATE_QUANTISE = EagerOperation(
    "attention.gate_fp8", "sigmoid_gate_quantise_fwd", SigmoidGate, reference
)
