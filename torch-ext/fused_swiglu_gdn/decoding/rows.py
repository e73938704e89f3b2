"""A static cache from which tokens can be taken back: a state after each token of a round.

A round verifies several drafts in one call. Keys and values of drafts that are wrong are left where
they are, and overwritten; a recurrent state is kept after each token, in a row of its own, and the
next round begins with the row of the last token that was right. What is taken back is a number on
the device, so a round is a CUDA graph. Calls of one token work on row 0 alone, as on any cache.

Sizes: T tokens of a round, W taps of a convolution with D channels, HV heads of K by V channels.
"""

import functools
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn

from ..layers.norm import serves
from ..layers.plain import named_modules, served_as
from .caches import lengths_of, linear_layers, named_like

# layers of ours that keep the state after each token -> also where there are no kernels
KEEPING = {"GatedDeltaNet": True, "KimiDeltaAttention": False}


class Rows(NamedTuple):
    """Tensors that a layer's round reads and writes."""

    pool: torch.Tensor  # [T, HV, K, V], the states after each token
    columns: torch.Tensor  # [1, D, W - 1 + T - 1], the latest inputs of the convolution
    indices: torch.Tensor  # [1, T] int32, the rows of the pool
    accepted: torch.Tensor  # [1] int32, the tokens of the round before that were right


def keeping(model: nn.Module, now: bool = True) -> int:
    """Counts the layers of the model that keep the state after each token of a call.

    A layer whose class's own forward runs keeps the last one alone, as KDA's do where there are no
    kernels. now: of the model's dtype, where it is; otherwise where there are kernels.
    """

    def here() -> bool:
        return serves(torch.empty(0, dtype=model.dtype, device=model.device))

    kinds = tuple([kind for kind, always in KEEPING.items() if always or not now or here()])
    return sum((served_as(m) or "").endswith(kinds) for _, m in named_modules(model))


class TakesBack:
    """The tokens of a static cache for one sequence that count, in all its layers at once.

    The cache has its prompt. T: tokens of a round.
    """

    def __init__(self, cache: Any, T: int):
        self.T = T
        self.linear = [layer for layer in cache.layers if hasattr(layer, "round_tokens")]
        self.lengths = lengths_of(cache.layers)
        device = self.lengths[0].device
        self.accepted = torch.ones(1, dtype=torch.int32, device=device)
        indices = torch.arange(T, dtype=torch.int32, device=device)[None]
        for layer in self.linear:
            conv, state = layer.conv_states[0], layer.recurrent_states[0]
            columns = conv.new_zeros(*conv.shape[:2], conv.shape[2] - 1 + T - 1)
            pool = state.new_zeros(T, *state.shape[1:])
            pool[0] = state[0]
            layer.recurrent_states[0] = pool[:1]
            layer.rows = Rows(pool, columns, indices, self.accepted)
        self.of_rows = 0  # the row of the last token that counts, from 1; 0 outside of rounds

    @property
    def length(self) -> torch.Tensor:
        """Number of tokens in the cache, a tensor []."""
        return self.lengths[0]

    def begin(self) -> None:
        """Makes ready for a round after calls of one token."""
        if self.linear and not self.of_rows:
            first = [layer.rows.columns[..., : _taps(layer) - 1] for layer in self.linear]
            torch._foreach_copy_(first, [layer.conv_states[0][..., 1:] for layer in self.linear])
            self.accepted.fill_(1)
        self.of_rows = 1

    def check(self) -> None:
        """Raises if a layer has not kept the states of the round that it has computed."""
        kept = [layer.__dict__.pop("kept", False) for layer in self.linear]
        if not all(kept):
            raise RuntimeError(
                "a layer with a recurrent state did not keep the state after each token: its "
                "forward is no longer that of kernelize"
            )

    def keep(self, tokens: torch.Tensor, given: int) -> None:
        """In a round of `given` tokens: keeps the first tokens [] of them, on the device."""
        change = [tokens - given] * len(self.lengths)  # a tensor alone would be read by the host
        torch._foreach_add_(self.lengths, change)
        self.accepted.copy_(tokens.reshape(1))

    def take_back(self, tokens: int) -> None:
        """Takes back more tokens of the latest round; the host knows how many."""
        if tokens:
            torch._foreach_sub_(self.lengths, tokens)
            self.of_rows -= tokens
            self.accepted.fill_(self.of_rows)

    def end(self) -> None:
        """Makes ready for calls of one token after a round, of which the host knows the row."""
        if self.linear and self.of_rows:
            last = self.of_rows - 1
            now = [layer.rows.columns[..., last : last + _taps(layer) - 1] for layer in self.linear]
            torch._foreach_copy_([layer.conv_states[0][..., 1:] for layer in self.linear], now)
            if last:
                pools = [layer.rows.pool for layer in self.linear]
                torch._foreach_copy_([pool[0] for pool in pools], [pool[last] for pool in pools])
        self.of_rows = 0

    def leave(self) -> None:
        """Gives the layers back as they are in any cache."""
        self.end()
        for layer in self.linear:
            layer.recurrent_states[0] = layer.recurrent_states[0].clone()
            layer.rows = None
            layer.__class__ = type(layer).__bases__[0]
            del layer.__dict__["rows"]


def _taps(layer: Any) -> int:
    return layer.conv_states[0].shape[2]


def with_rows(cache: Any, T: int) -> None:
    """Lets the layers with a recurrent state take rounds of up to T tokens."""
    for layer in linear_layers(cache):
        layer.__class__ = _layer_class(type(layer), T)
        layer.rows = None


@functools.cache
def _layer_class(own: type, T: int) -> type:
    """A class of cache layers with Rows."""

    @named_like(own)
    class Layer(own):
        round_tokens = T
        rows: Optional[Rows] = None

        def takes_back(self, tokens: int) -> bool:
            return self.rows is not None and 1 < tokens <= T

        def recur(self, rule: Callable, tensors: tuple, state: Any, options: dict):
            """The rule's outputs for the tokens of a round; the states go to the rows."""
            pool, _, indices, accepted = self.rows
            self.kept = True
            return rule(
                *tensors, initial_state=pool, state_indices=indices, num_accepted_tokens=accepted,
                inplace_final_state=True, **options,
            )[0]  # fmt: skip

    return Layer
