"""One token of a Gated DeltaNet layer between its projections: the call of its kernels.

Sizes: B rows, H and HV heads, R = HV / H, K and V head dims, D = 2 H K + HV V channels, W taps,
S columns.
"""

from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime.call import call


class DecodeOptions(NamedTuple):
    """The options of a call: all that is not a tensor."""

    activation: Optional[str]  # of the convolution: None, "silu" or "swish"
    eps: float  # of the norm
    gate_activation: str  # "silu" or "sigmoid"
    allow_neg_eigval: bool  # beta is 2 sigmoid(b)


@call
class LayerDecode(NamedTuple):
    """A token of a layer, from the outputs of its input projections to the input of the output
    projection."""

    q: Tensor  # [B, 1, H, K]
    k: Tensor  # [B, 1, H, K]
    v: Tensor  # [B, 1, HV, V] or [B, 1, H, R, V], as z
    z: Tensor  # [B, 1, HV, V]
    a: Tensor  # [B, 1, HV] or [B, 1, H, R], as b
    b: Tensor  # [B, 1, HV]
    conv_state: Tensor  # [B, D, S], updated in place
    state: Tensor  # [B, HV, K, V], updated in place
    weight: Tensor  # [D, W]
    bias: Optional[Tensor]  # [D]
    A_log: Tensor  # [HV]
    dt_bias: Optional[Tensor]  # [HV]
    norm_weight: Tensor  # [V]
    options: DecodeOptions
