"""Decoding that seldom writes a layer's state: kernelize(model, replay=16).

A cache layer of transformers has its states in `recurrent_states`, a dict that it reads itself to
reset, reorder, offload and update them, and that anybody else may read. `HeldStates` stands in its
place: its latest tokens are in a ring (gdn/api_replay.py), and they are written into the state
before anybody gets it. So there is nothing that a reader has to know.

Sizes: B batch, H and HV heads, K and V head dims.
"""

from collections.abc import MutableMapping
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..gdn import api_replay as gdn
from ..gdn.call import Ring
from ..gdn.ops_replay import REPLAY
from ..runtime import dispatch

# Bytes of a layer's states from which on a ring pays: in CUDA graphs, and where the host, which
# starts five kernels instead of two, must not take longer than the GPU
GRAPHED, EAGER = 32 * 2**20, 256 * 2**20


class Replaying(NamedTuple):
    """What kernelize was asked for."""

    rows: int  # of a ring
    pays_from: int  # bytes of a layer's states


class _Held(NamedTuple):
    state: Tensor  # [B, HV, V, K], without the tokens of the ring
    ring: Ring
    cursor: Tensor  # [B, 2]; a layer's own, so that layers need not run together


class HeldStates(MutableMapping):
    """`recurrent_states` of a cache layer, the state 0 of which is [B, HV, K, V].

    A state that is read has all tokens in it. Copies and pickles are dicts of such states. Whoever
    puts another tensor in its place (beam search and offloading do, after every token) ends what is
    done here: the layer then decodes as it does without.
    """

    def __init__(self, states: dict, k: Tensor, rows: int):
        self.states = states
        B, HV, K, V = states[0].shape
        mine = states[0].new_empty_strided((B, HV, K, V), (HV * K * V, K * V, 1, K))
        states[0] = mine.copy_(states[0])
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
        self.states[index] = state
        if index == 0:
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
        """replay_gated_delta_rule for one token; the cursor moves on."""
        state, ring, cursor = self.held
        o = gdn.replay_gated_delta_rule(q, k, v, a, b, state, ring, cursor, **options)
        gdn.advance_ring(cursor, ring)
        return o


def pays(state: Tensor, pays_from: int) -> bool:
    """Whether a token is faster with a ring than without, and now is the time to begin: what a
    CUDA graph captures would begin anew in every replay."""
    where = state.device
    many = state.numel() * state.element_size() >= pays_from
    if not many or not dispatch.has_kernels(*REPLAY, where.type, where.index):
        return False
    return not (state.is_cuda and torch.cuda.is_current_stream_capturing())


def held_states(layer, cached, k: Tensor) -> Optional[HeldStates]:
    """What a layer decodes a token with, whose key is k [B, 1, H, K]; None: as without a ring."""
    wanted: Optional[Replaying] = getattr(type(layer), "replaying", None)
    if wanted is None or torch.compiler.is_compiling() or torch.is_autocast_enabled(k.device.type):
        return None
    states = cached.recurrent_states
    if isinstance(states, HeldStates):
        held = states.held
        if held is None:  # offloading keeps the order of a state's memory
            states.states[0] = states.states[0].contiguous()
        return states if held is not None and held.ring.k.dtype == k.dtype else None
    if type(states) is not dict or list(states) != [0] or not pays(states[0], wanted.pays_from):
        return None
    with torch.inference_mode(False), torch.no_grad():  # what is made here outlives the mode
        cached.recurrent_states = HeldStates(states, k, wanted.rows)
    return cached.recurrent_states
