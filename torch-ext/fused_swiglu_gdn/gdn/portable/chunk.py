"""The chunked gated delta rule on every GPU: prepare, then scan (docs/gdn.md). Contains no
kernel."""

from typing import Callable, Optional

import torch

from ...runtime import device
from ...runtime.copies import on_dense
from ...runtime.launch import by_alignment, steps
from ...runtime.tuning import lookup
from ..call import GdnCall
from ..chunks import CHUNK
from .backward import prepare_gdn_chunk_bwd  # noqa: F401
from .context import Carry
from .cuts import FEWEST, WHOLE, tokens_at_cut
from .prepare import Prepare
from .primitives import are_served, on_near
from .scan import Scan


def kind_of(call: GdnCall) -> str:
    """Suffix of the configurations in configs/ for a call.

    "": a loop that loads ahead, for rows that can be copied in units of 16 bytes and a state of at
    most 128 rows. "_plain": any rows and sizes. "_fp32": three products for each.
    """
    if call.q.dtype == torch.float32:
        return "_fp32"
    for x in (call.q, call.k, call.v):
        if x.shape[-1] > 128 or x.data_ptr() % 16 or any(n % 16 for n in (x.shape[-1], *steps(x))):
            return "_plain"  # Triton takes no step for a multiple of 8 that is none of 16
    return ""


class NewStates:
    """The states that all calls like this one return: `like` the final ones, or None."""

    __slots__ = ("final", "checkpoints", "like")

    def __init__(self, call):
        options = call.options
        dtype = torch.float32 if options.state_dtype is None else options.state_dtype
        self.final = self.checkpoints = self.like = None
        if call.state_indices is not None:
            self.like = call.initial_state
        elif options.output_final_state:
            self.final = {"size": (call.N, *call.state_shape), "dtype": dtype}
            self.like = torch.empty(self.final["size"], device="meta")
        if options.checkpoint_every:
            rows = call.B * (call.T // options.checkpoint_every)
            self.checkpoints = {"size": (rows, *call.state_shape), "dtype": dtype}

    def __call__(self, v: torch.Tensor, initial_state, state_indices) -> tuple:
        """The final states, the pool or None; checkpoints or None: uninitialised."""
        final = None if state_indices is None else initial_state
        if self.final is not None:
            final = v.new_empty(**self.final)
        checkpoints = None if self.checkpoints is None else v.new_empty(**self.checkpoints)
        return final, checkpoints


def prepare_gdn_chunk_fwd(call: GdnCall) -> Optional[Callable]:
    """The call's tensors -> o [B, T, HV, V]; the final state, the pool or None; checkpoints or
    None; Tb, P and F or three None.

    For the calls that are_served.
    """
    return on_dense(_prepare, call, "g", "beta", "initial_state") if are_served(call) else None


def _prepare(call: GdnCall) -> Callable:
    return on_near(lambda call: by_alignment(_Chunked, call, 0, 1, 2), call)


class _Chunked:
    """The launches for all calls with the same shapes, strides, dtypes and options, and with q, k
    and v at multiples of 16 bytes as here."""

    __slots__ = ("states", "saves", "prepare", "carry", "scan")

    def __init__(self, call: GdnCall):
        K, V, v = call.K, call.V, call.v
        self.states, self.saves, self.carry = NewStates(call), call.options.save_blocks, None
        kind = kind_of(call)
        context, segment = lookup("portable_gdn_context", v.device), (WHOLE, WHOLE)
        behind = tokens_at_cut(K, V, v.element_size())
        # more heads fill the GPU with longer segments, of which fewer must be found first
        shortest = max(context["shortest"], call.HV, -(-behind // CHUNK))
        cut = call.HV <= context["heads"] and call.T >= FEWEST * shortest * CHUNK
        if cut and behind > 0 and kind != "_plain" and max(K, V) <= 128:
            segment = shortest, context["longest"]
            transition = context[f"transition{kind}"]
            self.carry = Carry(call, segment, kind, transition, context["carry"])
        self.prepare = Prepare(call)
        behind = 0 if self.carry is None else behind
        self.scan = Scan(call, self.states.like, segment, behind, kind)

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens
    ) -> tuple:
        with device.on(v.device):
            *blocks, decay = self.prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
            tb, _, f = blocks
            o = v.new_empty(v.shape)
            if self.carry is not None:
                self.carry(k, v, tb, f, decay, o, initial_state, state_indices, cu_seqlens)
            final, checkpoints = self.states(v, initial_state, state_indices)
            states = (initial_state, state_indices, final, checkpoints)
            self.scan((q, k, v, o), blocks, cu_seqlens, states)
        return o, final, checkpoints, *(blocks if self.saves else (None, None, None))
