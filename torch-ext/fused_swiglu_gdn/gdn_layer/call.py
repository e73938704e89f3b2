"""The calls of the parts of a Gated DeltaNet layer around its rule, and of its decoding step.

Sizes: B rows, T tokens, N sequences, H and HV heads, R = HV / H, K and V head dims, D channels,
which are 2 H K + HV V in a layer, W taps, S columns.
"""

from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime.call import call


class ConvolutionOptions(NamedTuple):
    activation: Optional[str]  # None, "silu" or "swish"
    return_final_states: bool


@call
class Convolution(NamedTuple):
    x: Tensor  # [B, D, T]
    weight: Tensor  # [D, W]
    bias: Optional[Tensor]  # [D]
    seq_idx: Optional[Tensor]  # [B, T]
    cu_seqlens: Optional[Tensor]  # [N + 1]
    initial_states: Optional[Tensor]  # [N, D, W - 1]
    options: ConvolutionOptions


class ConvolutionGradientOptions(NamedTuple):
    activation: Optional[str]


@call
class ConvolutionGradient(NamedTuple):
    x: Tensor  # [B, D, T]
    weight: Tensor  # [D, W]
    bias: Optional[Tensor]  # [D]
    seq_idx: Optional[Tensor]  # [B, T]
    cu_seqlens: Optional[Tensor]  # [N + 1]
    initial_states: Optional[Tensor]  # [N, D, W - 1]
    dy: Tensor  # [B, D, T]
    d_final: Optional[Tensor]  # [N, D, W - 1]
    options: ConvolutionGradientOptions


class UpdateOptions(NamedTuple):
    activation: Optional[str]
    null_index: int  # rows of conv_state up to this one are null slots


@call
class ConvolutionUpdate(NamedTuple):
    x: Tensor  # [B, D, T]
    conv_state: Tensor  # [N, D, S] or, of a pool, [P, D, S]; updated in place
    weight: Tensor  # [D, W]
    bias: Optional[Tensor]  # [D]
    indices: Optional[Tensor]  # [N] rows of conv_state
    accepted: Optional[Tensor]  # [N] tokens of the call before that count, from 1
    cu_seqlens: Optional[Tensor]  # [N + 1]
    out: Optional[Tensor]  # [B, D, T]: y is written there
    options: UpdateOptions


class GatedNormOptions(NamedTuple):
    eps: float  # added to the mean square
    activation: str  # "silu" or "sigmoid"


@call
class GatedNorm(NamedTuple):
    x: Tensor  # [..., D]
    gate: Tensor  # [..., D]
    weight: Tensor  # [D]
    options: GatedNormOptions


@call
class GatedNormGradient(NamedTuple):
    x: Tensor  # [..., D]
    gate: Tensor  # [..., D]
    weight: Tensor  # [D]
    dy: Tensor  # [..., D]
    options: GatedNormOptions


class PrologueOptions(NamedTuple):
    activation: Optional[str]  # None, "silu" or "swish"
    final_width: int  # how many of the last inputs of each sequence are returned


@call
class Prologue(NamedTuple):
    """The convolution of q, k and v side by side, without concatenating them: views of one
    projection, or of several. -> y [B, T, D], contiguous, and the last inputs [N, D, final_width],
    zeros before the first, or None."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    weight: Tensor  # [D, W], channels in the order q, k, v
    bias: Optional[Tensor]  # [D]
    cu_seqlens: Optional[Tensor]  # [N + 1]
    initial_states: Optional[Tensor]  # [N, D, W - 1]
    options: PrologueOptions


class DecodeOptions(NamedTuple):
    """The options of a call: all that is not a tensor."""

    activation: Optional[str]  # of the convolution: None, "silu" or "swish"
    eps: float  # of the norm
    gate_activation: str  # "silu" or "sigmoid"
    allow_neg_eigval: bool  # beta is 2 sigmoid(b)


@call
class LayerDecode(NamedTuple):
    """A token of a layer, from the outputs of its input projections to the input of the output
    projection, [B, 1, HV, V]: convolution, rule, norm and gate."""

    q: Tensor  # [B, 1, H, K]
    k: Tensor  # [B, 1, H, K]
    v: Tensor  # [B, 1, HV, V] or [B, 1, H, R, V], as z
    z: Tensor  # [B, 1, HV, V]
    a: Tensor  # [B, 1, HV] or [B, 1, H, R], as b
    b: Tensor  # [B, 1, HV]
    conv_state: Tensor  # [B, D, S], S >= W - 1, updated in place
    state: Tensor  # [B, HV, K, V], updated in place
    weight: Tensor  # [D, W]
    bias: Optional[Tensor]  # [D]
    A_log: Tensor  # [HV]
    dt_bias: Optional[Tensor]  # [HV]
    norm_weight: Tensor  # [V]
    options: DecodeOptions
