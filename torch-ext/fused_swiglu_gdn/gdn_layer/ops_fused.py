"""A layer's fused kernels as operations, for layers."""

from ..gdn.chunks import count_sequences
from ..runtime.operation import Operation
from .call import DecodeOptions, LayerDecode, Prologue, PrologueOptions
from .ops import FAMILY
from .reference import fused


def _prologue_like(call: Prologue) -> tuple:
    q, (B, T), D, width = call.q, call.q.shape[:2], call.weight.shape[0], call.options.final_width
    N = count_sequences(B, call.cu_seqlens)
    return q.new_empty(B, T, D), q.new_empty(N, D, width) if width else None


PROLOGUE = Operation(
    FAMILY, "gdn_layer_prologue", Prologue, fused, outputs=2, fake=_prologue_like,
    check=lambda call: call._replace(options=PrologueOptions(*call.options)),
)  # fmt: skip
DECODE = Operation(
    FAMILY, "gdn_layer_decode", LayerDecode, fused.gdn_layer_decode,
    written=("conv_state", "state"),
    check=lambda call: call._replace(options=DecodeOptions(*call.options)),
    fake=lambda call: call.q.new_empty(call.v.flatten(2, -2).shape),
)  # fmt: skip
