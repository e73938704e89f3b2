"""Drafts by the multi-token-prediction (MTP) layer of Qwen3.5 and Qwen3-Next checkpoints.

    x = fc([norm(embedding of token p + 1), norm(hidden state of token p)])      h = layer(x)
    draft of token p + 2 = argmax(head(norm(h)))

transformers leaves these weights, `mtp.*`, in the file. The next draft reads the layer's own output
in the place of the hidden state. Embedding and head are the model's.

In a loop of graphs (MtpRounds) a round ends with the drafts of the next one: the layer reads the
tokens that the model has chosen and its hidden states, and drafts behind the last one that counts.
All of it is on the device, so the next round can be launched before the host knows the tokens of
this one.
"""

import contextlib
import copy
import sys
from typing import Optional

import torch
from torch import nn

from ..layers.plain import parameters_of
from ..layers.projections import linear, projections
from .caches import CACHES, cache_name
from .choosing import Choice
from .drafters import Drafter, Weights
from .reading import inner_of
from .rounds import RowChoice

CHUNK = 1024  # tokens of a prompt that the layer reads at once: its mask is 32 MiB for 32,768 slots


class Mtp(nn.Module):
    """The layer that load_mtp returns; generate takes it as `assistant_model`.

    count: drafts of a round.
    """

    def __init__(self, model: nn.Module, count: int):
        super().__init__()
        config = copy.deepcopy(model.config.get_text_config(decoder=True))
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        inner = inner_of(model)
        layer, norm = type(inner.layers[-1]), type(inner.norm)
        H, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(H, eps=eps), norm(H, eps=eps)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.cache_name = cache_name(self.layers[0])
        self.norm = norm(H, eps=eps)
        self.config, self.count = config, count
        self.generation_config = copy.deepcopy(model.generation_config)

    @contextlib.contextmanager
    def _optimize_model_for_decode(self):
        """Has experts of few tokens computed as a graph can have them, as transformers does."""
        config, slow = self.config, getattr(self.config, "_experts_implementation", None)
        change = slow == "grouped_mm" and self.fc.weight.is_cuda
        if change:
            config._experts_implementation_internal = "batched_mm"
        try:
            yield
        finally:
            if change:
                config._experts_implementation_internal = slow

    def forward(self, model, ids, hidden, positions, cache, mask=None, tables=None) -> torch.Tensor:
        """Hidden states [B, n, H] behind `hidden` [B, n, H] of tokens p and `ids` [B, n] of p + 1.

        positions [B, n]: p + 1. cache: a static one of this layer, with a mask [1, 1, n, slots];
        None: the tokens are a whole text. tables: of the positions, where they are known.
        """
        inner = inner_of(model)
        embedded = self.pre_fc_norm_embedding(inner.embed_tokens(ids))
        pair = torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], -1)
        (x,) = projections(pair, self.fc)
        if tables is None:
            tables = tables_of(inner, x, positions)
        if mask is None:
            n = ids.shape[1]
            mask = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()[None, None]
        x = self.layers[0](
            x, position_embeddings=tables, attention_mask=mask, position_ids=positions,
            **{self.cache_name: cache},
        )  # fmt: skip
        return self.norm(x[0] if isinstance(x, tuple) else x)


def tables_of(inner: nn.Module, x: torch.Tensor, positions: torch.Tensor) -> tuple:
    """cos and sin of positions [B, n], in the dtype of x."""
    rotary = inner.rotary_emb
    if hasattr(rotary, "mrope_section"):  # one position for each of three axes
        positions = positions.expand(3, -1, -1)
    return rotary(x, positions)


class MtpRounds(Drafter):
    """Drafts in the graph of a round. slots: of the layer's cache, which are the tokens of the text
    and a round's more.

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
        # of all positions at once: a call of their module is 15 launches
        self.tables = tables_of(inner_of(model), head[:1, None], self.slots[None])
        self.choice: Optional[RowChoice] = None
        self.latest: tuple = ()  # after's arguments for the latest token that was read alone
        self.reads = self.count * (Weights(mtp).read() + head.numel())

    @torch.no_grad()
    def read(self, ids: torch.Tensor, token: torch.Tensor, hidden: torch.Tensor) -> None:
        T = ids.shape[1]
        self.choice = RowChoice(Choice([], False), ids)
        for start in range(0, T - 1, CHUNK):
            end = min(start + CHUNK, T - 1)
            place = torch.tensor(start, device=ids.device)
            self._layer(ids[0, start + 1 : end + 1], hidden[:, start:end], place)
        self.alone(token, hidden[:, -1:], torch.tensor(T - 1, device=ids.device))

    def alone(self, token: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor) -> None:
        self.latest = token, hidden, torch.ones((), dtype=torch.int64, device=token.device), before

    def drafts(self) -> torch.Tensor:
        """The drafts [count] behind the latest token, if that was no token of a round."""
        return self.after(None, *self.latest)[1:]

    @torch.no_grad()
    def after(self, read, tokens, hidden, right, before) -> torch.Tensor:
        length, T = self.layer.cumulative_length, len(tokens)
        h = self._layer(tokens, hidden, before)
        length.add_(right - T)
        last = right.reshape(1) - 1
        h, found = h.index_select(1, last), [tokens.index_select(0, last)]
        for n in range(self.count):
            logits = self._head(h)[0]
            found.append(self.choice.choose(logits, found[-1], 0)[0])
            if n + 1 < self.count:
                h = self._layer(found[-1], h, before + right + n)
        if self.count > 1:  # their entries are made again, of the model's hidden states
            length.sub_(self.count - 1)
        return torch.cat(found)

    def _head(self, h: torch.Tensor) -> torch.Tensor:
        """Logits [1, 1, V] of one token, by our kernel where the head is a product alone."""
        head = self.model.lm_head
        return linear(head, h) if parameters_of(head) is not None else head(h)

    def _layer(self, ids, hidden, before) -> torch.Tensor:
        """The layer's output [1, n, H] for ids [n], the first behind `before` [] and one more."""
        n = len(ids)
        mask = self.slots <= (self.layer.cumulative_length + self.slots[:n])[:, None]
        positions = before + self.slots[1 : n + 1]
        tables = [x.index_select(1, positions) for x in self.tables]
        return self.mtp(
            self.model, ids[None], hidden, positions[None], self.cache, mask[None, None], tables
        )


class MtpDrafts:
    """A candidate generator for transformers' assisted decoding. slots: as MtpRounds has them."""

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": True}

    def __init__(self, model: nn.Module, mtp: Mtp, slots: int):
        self.rounds = MtpRounds(model, mtp, slots)
        self.read = 0  # tokens that the model has read

    def update_candidate_strategy(self, *given) -> None:
        pass

    def get_candidates(self, input_ids, model_outputs=None, is_first_iteration=False, **given):
        """Returns ids [1, T + count] of ids [1, T], and None in the place of scores."""
        if is_first_iteration:  # there are no hidden states yet
            return input_ids, None
        (text,), read, before = input_ids, input_ids.shape[1] - 1, self.read
        hidden = model_outputs.hidden_states[-1][:, : read - before]  # after the final norm
        if before:
            tokens = text[before + 1 :]
            right, before = torch.tensor([read - before, before], device=text.device)
            drafts = self.rounds.after(None, tokens, hidden, right, before)[1:]
        else:
            self.rounds.read(input_ids[:, :-1], text[-1:], hidden)
            drafts = self.rounds.drafts()
        self.read = read
        return torch.cat([input_ids, drafts[None]], 1), None
