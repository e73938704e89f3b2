"""Call objects of the gated delta rule, which all modules behind the public functions take.

A call has its tensors and its options by name, and properties for the sizes that follow from them.
Options are hashable, and `*options` are the last arguments of the registered operators, in this
order.

Sizes: B batch, T tokens, H query/key heads, HV value heads, K and V head dims, N sequences, P rows
of a state pool; C = 64 tokens a chunk, rows of chunks as in chunks.py.
"""

from typing import NamedTuple, Optional, Tuple, get_type_hints

import torch
from torch import Tensor

from ..runtime.call import NoOptions, call
from .chunks import chunk_rows, count_sequences


def of_beta(options) -> float:
    """The factor of sigmoid(beta); 0 if beta is used unchanged."""
    return (2.0 if options.allow_neg_eigval else 1.0) if options.use_beta_sigmoid else 0.0


class GdnOptions(NamedTuple):
    """Options of the chunked form, of Kimi Delta Attention, too."""

    scale: float
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    state_dtype: Optional[torch.dtype] = None  # of the states that are returned; None: fp32
    checkpoint_every: int = 0  # tokens; 0: no checkpoints
    lower_bound: Optional[float] = None  # of the raw gates of Kimi Delta Attention
    save_blocks: bool = False  # Tb, P and F of the chunks are returned, for the gradient

    beta_max = property(of_beta)


class RecurrentOptions(NamedTuple):
    """Options of the recurrent (token by token) form, of Kimi Delta Attention, too."""

    scale: float
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    inplace: bool = False  # the final states overwrite initial_state, or rows of it
    all_states: bool = False  # the states after every token are returned
    null_index: int = -1  # rows of the pool up to this one are null slots
    lower_bound: Optional[float] = None  # of the raw gates of Kimi Delta Attention

    beta_max = property(of_beta)


class ReplayOptions(NamedTuple):
    """Options of the form with a ring of the latest tokens."""

    scale: float
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    max_tokens: int = 1  # of the ring
    null_index: int = -1  # rows of the pool up to this one are null slots

    beta_max = property(of_beta)
    state_v_first, output_final_state = True, False


def with_sizes(kind):
    """Adds properties to a call type: its sizes, which follow from the tensors, and `channels`.

    channels is True if each channel of the keys has a gate of its own, so that g is [B, T, HV, K].
    """
    kind.B = property(lambda call: call.q.shape[0])
    kind.T = property(lambda call: call.q.shape[1])
    kind.H = property(lambda call: call.q.shape[2])
    kind.K = property(lambda call: call.q.shape[3])
    kind.HV = property(lambda call: call.v.shape[2])
    kind.V = property(lambda call: call.v.shape[3])
    kind.N = property(lambda call: count_sequences(call.B, call.cu_seqlens))
    kind.rows = property(lambda call: chunk_rows(call.T, call.B, call.cu_seqlens))
    kind.state_shape = property(_state_shape)
    kind.channels = vars(kind).get("channels", False)
    return call(kind)


def _state_shape(call) -> Tuple[int, int, int]:
    """(HV, K, V) or, with state_v_first, (HV, V, K)."""
    dims = (call.V, call.K) if call.options.state_v_first else (call.K, call.V)
    return (call.HV, *dims)


@with_sizes
class GdnCall(NamedTuple):
    """A call of the chunked form."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV], natural-log decay, or the raw a when A_log is given
    beta: Tensor  # [B, T, HV]
    A_log: Optional[Tensor]  # [HV]
    dt_bias: Optional[Tensor]  # [HV]
    initial_state: Optional[Tensor]  # [N, HV, K, V]; with state_indices the pool [P, HV, K, V]
    state_indices: Optional[Tensor]  # [N]
    cu_seqlens: Optional[Tensor]  # [N + 1]
    options: GdnOptions


# Options of its gradient: whether only those of v and of initial_state are wanted, and the call's.
GradientOptions = NamedTuple(
    "GradientOptions", [("values_only", bool), *get_type_hints(GdnOptions).items()]
)
GradientOptions.beta_max = property(of_beta)


@with_sizes
class GdnBackward(NamedTuple):
    """A call of the gradient of the chunked form."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV]
    beta: Tensor  # [B, T, HV]
    A_log: Optional[Tensor]  # [HV]
    dt_bias: Optional[Tensor]  # [HV]
    initial_state: Optional[Tensor]  # [N, HV, K, V]
    cu_seqlens: Optional[Tensor]  # [N + 1]
    do: Tensor  # [B, T, HV, V]
    d_final_state: Optional[Tensor]  # [N, HV, K, V]
    tb: Optional[Tensor]  # [rows, HV, C, C]: these three where the forward saved them
    p: Optional[Tensor]  # [rows, HV, C, C]
    f: Optional[Tensor]  # [rows, HV, 4, C] fp32
    options: GradientOptions

    state_indices = None  # through a pool there is no gradient
    prepared = property(lambda call: None if call.tb is None else call[11:14])


# A call of the gradient of the states before segments that other ranks began: the tensors of the
# gradient's call up to d_final_state, and
#     sent [N or more, HV, V or V + K, K] fp32, contiguous: receives E, as [K, V]
GdnEntry = NamedTuple(
    "GdnEntry",
    [
        *list(get_type_hints(GdnBackward).items())[:11],
        ("sent", Tensor),
        ("options", GradientOptions),
    ],
)
GdnEntry.state_indices = GdnEntry.prepared = None
with_sizes(GdnEntry)


class Ring(NamedTuple):
    """The latest tokens of sequences that their states do not include yet.

    Row p belongs to row p of the states; elements outside the range of every cursor are undefined.
    A call may bring up to max_tokens. With 1, a token is always kept: it is added to the ring, or
    to the state together with the whole ring. With more, they are drafts, some of which may be
    rejected: they are added to the ring, and the state takes only tokens from before the call.
    """

    k: Tensor  # [P, H, R, K], not normalised
    u: Tensor  # [P, HV, R, V]: beta (v - exp(g) S k^) / |k|, where k^ = k / |k|
    g: Tensor  # [P, HV, R]: natural-log decay, fp32
    max_tokens: int = 1


@with_sizes
class ReplayCall(NamedTuple):
    """A call of the form with a ring of the latest tokens. States are [P, HV, V, K]."""

    q: Tensor  # [N, T, H, K]
    k: Tensor  # [N, T, H, K]
    v: Tensor  # [N, T, HV, V]
    g: Tensor  # [N, T, HV], natural-log decay, or the raw a when A_log is given
    beta: Tensor  # [N, T, HV]
    A_log: Optional[Tensor]  # [HV]
    dt_bias: Optional[Tensor]  # [HV]
    initial_state: Tensor  # [P, HV, V, K]: without the tokens of the ring
    ring_k: Tensor  # [P, H, R, K]
    ring_u: Tensor  # [P, HV, R, V]
    ring_g: Tensor  # [P, HV, R]
    cursor: Tensor  # [N, 2] int32: the ring's first row, and the number of rows in use from it on
    force_flush: Optional[Tensor]  # [N] bool
    state_indices: Optional[Tensor]  # [N], rows of the states and of the ring
    out: Optional[Tensor]  # [N, T, HV, V], o is written to it
    options: ReplayOptions

    cu_seqlens = None  # a row of the batch is a sequence
    ring = property(lambda call: Ring(*call[8:11], call.options.max_tokens))
    R = property(lambda call: call.ring_k.shape[2])


class AdvanceOptions(NamedTuple):
    """Options of moving the cursor."""

    max_tokens: int  # of the ring
    null_index: int = -1  # rows of the pool up to this one are null slots


class MaterialiseOptions(NamedTuple):
    """Options of adding the tokens of a ring to states."""

    max_tokens: int  # of the ring
    null_index: int = -1  # rows of the pool up to this one are null slots
    inplace: bool = False  # the states are written


@with_sizes
class GdnPieces(NamedTuple):
    """A call of the chunked form whose sequences are segments that other ranks continue."""

    q: Tensor  # [1, T, H, K]
    k: Tensor  # [1, T, H, K]
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV]
    beta: Tensor  # [1, T, HV]
    A_log: Optional[Tensor]  # [HV]
    dt_bias: Optional[Tensor]  # [HV]
    initial_state: Tensor  # [N, HV, K, V]: has the layout of the states to start from
    cu_seqlens: Tensor  # [N + 1]
    rows: Optional[Tensor]  # [N] int32: rows of `sent` for segments that continue elsewhere, or < 0
    sent: Tensor  # [slots, HV, V or V + K, K] fp32, contiguous: receives N^T, and M^T below it
    start: Optional[Tensor]  # [N, HV, V, K] fp32, contiguous: states before the segments, or zeros
    options: GdnOptions

    state_indices = None


class ChainOptions(NamedTuple):
    """Options of chaining the maps of segments."""

    V: int  # head dim of the values
    backward: bool  # gradients of the states after segments, instead of the states before them


@call
class GdnChain(NamedTuple):
    """A call that chains what ranks have sent of their segments of sequences.

    It computes S = N_n + M_n (N_(n-1) + M_(n-1) (.. N_1)) of the segments before each, or, for
    gradients, E_n + M_n^T (.. E_1) of those behind it plus `given`.
    """

    gathered: Tensor  # [P, slots, HV, V or V + K, K] fp32: N^T or, of gradients, E [K, V]; M^T
    links: Tensor  # [pieces, 1 + most] int32: how many slots a segment takes, and which, in order
    places: Tensor  # [chained] int64: the segments that take some
    given: Optional[Tensor]  # [pieces, HV, K, V]: the states, or gradients, of the others; or zeros
    options: ChainOptions

    HV = property(lambda call: call.gathered.shape[2])
    K = property(lambda call: call.gathered.shape[4])


@call
class ClearRows(NamedTuple):
    """A call that zeroes rows indices[n] of a pool where kept[n] is false."""

    pool: Tensor  # [P, HV, K, V], written
    indices: Tensor  # [N]
    kept: Tensor  # [N] bool
    options: NoOptions


@call
class RingAdvance(NamedTuple):
    """A call that moves the cursor."""

    cursor: Tensor  # [N, 2], written
    accepted: Optional[Tensor]  # [N]
    force_flush: Optional[Tensor]  # [N] bool
    state_indices: Optional[Tensor]  # [N]
    ring_k: Tensor  # [P, H, R, K]; of the ring only shapes are read
    ring_u: Tensor  # [P, HV, R, V]
    ring_g: Tensor  # [P, HV, R]
    options: AdvanceOptions

    ring = property(lambda call: Ring(*call[4:7], call.options.max_tokens))


@call
class RingMaterialise(NamedTuple):
    """A call that adds the tokens of a ring to states, in place or in new ones."""

    state: Tensor  # [P, HV, V, K]
    ring_k: Tensor  # [P, H, R, K]
    ring_u: Tensor  # [P, HV, R, V]
    ring_g: Tensor  # [P, HV, R]
    cursor: Tensor  # [N, 2]
    state_indices: Optional[Tensor]  # [N]
    options: MaterialiseOptions

    ring = property(lambda call: Ring(*call[1:4], call.options.max_tokens))


@with_sizes
class RecurrentCall(NamedTuple):
    """A call of the recurrent (token by token) form."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV], natural-log decay, or the raw a when A_log is given
    beta: Tensor  # [B, T, HV]
    A_log: Optional[Tensor]  # [HV]
    dt_bias: Optional[Tensor]  # [HV]
    initial_state: Optional[Tensor]  # [N, HV, K, V]; with state_indices the pool [P, HV, K, V]
    state_indices: Optional[Tensor]  # [N], rows of the pool to start from; [N, 1 + S] with counts
    output_state_indices: Optional[Tensor]  # [N], rows of the pool to write, if not the same
    num_accepted_tokens: Optional[Tensor]  # [N], which of its rows a sequence starts from, from 1
    cu_seqlens: Optional[Tensor]  # [N + 1]
    out: Optional[Tensor]  # [B, T, HV, V], o is written to it
    options: RecurrentOptions
