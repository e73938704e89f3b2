"""Decoding with deferred state write-back in a layer: kernelize(model, replay=16).

A cache layer of transformers has its states in `recurrent_states`, a dict that it reads itself to
reset, reorder, offload and update them, and that other code may read. `HeldStates` replaces that
dict: its latest tokens are in a ring (gdn/api_replay.py), and they are added to the state before
the state is read. So readers need no change.

Sizes: B batch, H and HV heads, K and V head dims.
"""

import contextlib
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..gdn import api_replay as gdn
from ..gdn.call import Ring
from ..gdn.ops_replay import REPLAY
from ..runtime import dispatch

# bytes of a layer's fp32 states from which a ring is faster. A token takes 1.29 of the time without
# one at 16 MiB, .91 at 32, .71 at 128 (gdn_replay.json: batch 8 of 16/32 and 16/64 heads, 64)
PAYS_FROM = 32 * 2**20

_begins: ContextVar = ContextVar("rings begin", default=False)


@contextlib.contextmanager
def rings_begin():
    """Allows layers that are called inside to begin with rings, because a CUDA graph follows.

    The host takes longer to start five kernels than two, which a graph hides.
    """
    token = _begins.set(True)
    try:
        yield
    finally:
        _begins.reset(token)


class _Held(NamedTuple):
    state: Tensor  # [B, HV, V, K], without the tokens of the ring
    ring: Ring
    cursor: Tensor  # [B, 2]; a layer's own, so that layers need not run together


class HeldStates(MutableMapping):
    """`recurrent_states` of a cache layer, the state 0 of which is [B, HV, K, V].

    A state that is read includes all tokens. Copies and pickles are dicts of such states. If
    another tensor is assigned in its place (beam search and offloading do that after every token),
    the ring is dropped and the layer decodes as without it.
    """

    def __init__(self, states: dict, k: Tensor, rows: int):
        self.states = states
        B, HV, K, V = states[0].shape
        before = states[0]
        mine = before.new_empty_strided((B, HV, K, V), (HV * K * V, K * V, 1, K))
        states[0] = mine.copy_(before)
        if before.is_cuda:  # which came from another stream, whose memory it is
            before.record_stream(torch.cuda.current_stream(before.device))
        state = mine.transpose(-1, -2)  # [B, HV, V, K]
        ring = gdn.make_ring(state, k.shape[2], k.dtype, rows=rows)
        cursor = torch.zeros(state.shape[0], 2, dtype=torch.int32, device=state.device)
        self.held: Optional[_Held] = _Held(state, ring, cursor)

    def __getitem__(self, index):
        if self.held is not None and index == 0:
            with torch.no_grad():
                gdn.materialise_ring(*self.held, inplace=True)
                self.held.cursor.zero_()
        return self.states[index]

    def __setitem__(self, index, state):
        same = state is self.states.get(index)  # with all tokens in it, since it was read
        self.states[index] = state
        if index == 0 and not same:
            self.held = None

    def __delitem__(self, index):
        self[index] = None
        del self.states[index]

    def __iter__(self):
        return iter(self.states)

    def __len__(self):
        return len(self.states)

    def __reduce__(self):
        return dict, (dict(self.items()),)

    def step(self, q, k, v, a, b, **options) -> Tensor:
        """Runs replay_gated_delta_rule for one token, and advances the cursor."""
        state, ring, cursor = self.held
        o = gdn.replay_gated_delta_rule(q, k, v, a, b, state, ring, cursor, **options)
        gdn.advance_ring(cursor, ring)
        return o


def pays(state: Tensor) -> bool:
    """True if a token is faster with a ring than without."""
    where, size = state.device, state.numel() * state.element_size()
    if not _begins.get() or state.dtype != torch.float32 or size < PAYS_FROM:
        return False
    return dispatch.has_kernels(REPLAY.family, REPLAY.name, where.type, where.index)


def held_states(layer, cached, k: Tensor) -> Optional[HeldStates]:
    """The HeldStates of a layer for a token with key k [B, 1, H, K]; None to decode without a
    ring."""
    rows = getattr(type(layer), "replay_rows", 0)
    if not rows or torch.compiler.is_compiling() or torch.is_autocast_enabled(k.device.type):
        return None
    states = cached.recurrent_states
    if isinstance(states, HeldStates):
        held = states.held
        if held is None:  # offloading keeps the order of a state's memory
            states.states[0] = states.states[0].contiguous()
        return states if held is not None and held.ring.k.dtype == k.dtype else None
    if type(states) is not dict or list(states) != [0] or not pays(states[0]):
        return None
    with torch.inference_mode(False), torch.no_grad():  # what is made here outlives the mode
        cached.recurrent_states = HeldStates(states, k, rows)
    return cached.recurrent_states
