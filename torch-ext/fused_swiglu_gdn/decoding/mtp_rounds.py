"""Drafts by an MTP layer in the CUDA graph of a round.

A round ends with the drafts of the next one: the layer reads the tokens that the model has chosen
and its hidden states, and drafts behind the last one that counts. All of it is on the device, so
the next round can be launched before the host knows the tokens of this one.
"""

import sys
from typing import Optional

import torch
from torch import nn

from .choosing import Choice
from .graph_rules import CACHES
from .lookup import Drafter, Weights
from .mtp import Mtp
from .row_choice import RowChoice

CHUNK = 1024  # tokens of a prompt that the layer reads at once


class MtpRounds(Drafter):
    """slots: of the layer's cache, which are the tokens of the text and a round's more.

    Tokens that the model chose one by one, while drafts rest, are left out of the layer's cache.
    """

    in_graph = reads_hidden = True

    def __init__(self, model: nn.Module, mtp: Mtp, slots: int):
        self.model, self.mtp, self.count = model, mtp, mtp.count
        head, config = model.lm_head.weight, mtp.config
        self.cache = sys.modules[CACHES].StaticCache(config=config, max_cache_len=slots)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(1, config.num_key_value_heads, dim, head.dtype, head.device)
        (self.layer,) = self.cache.layers
        self.slots = torch.arange(slots, device=head.device)
        self.choice: Optional[RowChoice] = None
        self.latest: tuple = ()  # after's arguments for the latest token that was read alone
        self.reads = self.count * (Weights(mtp).read() + head.numel())

    @torch.no_grad()
    def read(self, ids: torch.Tensor, token: torch.Tensor, hidden: torch.Tensor) -> None:
        """Reads a prompt [1, T], of which the model made hidden [1, T, H] and chose token [1]."""
        T = ids.shape[1]
        self.choice = RowChoice(Choice([], False), ids)
        for start in range(0, T - 1, CHUNK):
            end = min(start + CHUNK, T - 1)
            place = torch.tensor(start, device=ids.device)
            self._layer(ids[0, start + 1 : end + 1], hidden[:, start:end], place)
        self.alone(token, hidden[:, -1:], torch.tensor(T - 1, device=ids.device))

    def alone(self, token: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor) -> None:
        """token [1] was chosen behind the one that follows `before` others, without a round."""
        self.latest = token, hidden, torch.ones((), dtype=torch.int64, device=token.device), before

    def drafts(self) -> torch.Tensor:
        """The drafts [count] behind the latest token, if that was no token of a round."""
        return self.after(None, *self.latest)[1:]

    @torch.no_grad()
    def after(self, read, tokens, hidden, right, before) -> torch.Tensor:
        """The last token that counts, and the drafts behind it [1 + count].

        tokens [T] were chosen behind each of read [T], with hidden states [1, T, H]; the first
        `right` [] of them count; `before` []: the tokens in the model's cache before those T.
        """
        length, T = self.layer.cumulative_length, len(tokens)
        h = self._layer(tokens, hidden, before)
        length.add_(right - T)
        last = right.reshape(1) - 1
        h, found = h.index_select(1, last), [tokens.index_select(0, last)]
        for n in range(self.count):
            logits = self.model.lm_head(h)[0]
            found.append(self.choice.choose(logits, found[-1], 0)[0])
            if n + 1 < self.count:
                h = self._layer(found[-1], h, before + right + n)
        if self.count > 1:  # their entries are made again, of the model's hidden states
            length.sub_(self.count - 1)
        return torch.cat(found)

    def _layer(self, ids, hidden, before) -> torch.Tensor:
        """The layer's output [1, n, H] for ids [n], the first behind `before` [] and one more."""
        row = torch.arange(len(ids), device=ids.device)
        mask = self.slots <= (self.layer.cumulative_length + row)[:, None]
        positions = (before + 1 + row)[None]
        return self.mtp(self.model, ids[None], hidden, positions, self.cache, mask[None, None])
