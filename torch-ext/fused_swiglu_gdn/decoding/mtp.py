"""Drafts by the multi-token-prediction (MTP) layer of Qwen3.5 and Qwen3-Next checkpoints.

    x = fc([norm(embedding of token p + 1), norm(hidden state of token p)])      h = layer(x)
    draft of token p + 2 = argmax(head(norm(h)))

transformers leaves these weights, `mtp.*`, in the file. The next draft reads the layer's own output
in the place of the hidden state. Embedding and head are the model's.
"""

import contextlib
import copy
import sys
from typing import List

import torch
from torch import nn

from .graph_rules import CACHE_NAMES, CACHES
from .reading import inner_of

MOST = 7  # drafts of a round


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

    def forward(self, model, ids, hidden, positions, cache, mask=None) -> torch.Tensor:
        """Hidden states [B, n, H] behind `hidden` [B, n, H] of tokens p and `ids` [B, n] of p + 1.

        positions [B, n]: p + 1. cache: of this layer, or None. mask [1, 1, n, slots] of a static
        cache; one that grows needs none.
        """
        inner = inner_of(model)
        embedded = self.pre_fc_norm_embedding(inner.embed_tokens(ids))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], -1))
        tables = inner.rotary_emb(x, positions)
        if mask is None:
            n, seen = ids.shape[1], 0 if cache is None else int(cache.get_seq_length())
            mask = torch.ones(n, seen + n, dtype=torch.bool, device=x.device).tril(seen)[None, None]
        name = CACHE_NAMES[0] if CACHE_NAMES[0] in _arguments(self.layers[0]) else CACHE_NAMES[1]
        x = self.layers[0](
            x, position_embeddings=tables, attention_mask=mask, position_ids=positions,
            **{name: cache},
        )  # fmt: skip
        return self.norm(x[0] if isinstance(x, tuple) else x)


def _arguments(layer: nn.Module) -> tuple:
    return layer.forward.__code__.co_varnames if hasattr(layer.forward, "__code__") else ()


class MtpDrafts:
    """A candidate generator of transformers' form."""

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": True}

    def __init__(self, model: nn.Module, mtp: Mtp):
        self.model, self.mtp = model, mtp
        self.cache = sys.modules[CACHES].DynamicCache(config=mtp.config)
        self.cache.activate_past_recording()
        self.fed = 0  # tokens that the layer has read, from the second on

    def update_candidate_strategy(self, *given) -> None:
        pass

    @torch.no_grad()
    def get_candidates(self, input_ids, model_outputs=None, is_first_iteration=False, **given):
        """Returns ids [1, T + count] of ids [1, T], and None in the place of scores."""
        if is_first_iteration:  # there are no hidden states yet
            return input_ids, None
        T = input_ids.shape[1]
        new = T - 1 - self.fed
        hidden = model_outputs.hidden_states[-1][:, :new]  # after the final norm
        ids, positions = input_ids[:, -new:], torch.arange(T - new, T, device=input_ids.device)
        self.fed = T - 1
        drafts: List[torch.Tensor] = []
        for _ in range(self.mtp.count):
            hidden = self.mtp(self.model, ids, hidden, positions[None], self.cache)[:, -1:]
            ids, positions = self.model.lm_head(hidden).argmax(-1), positions[-1:] + 1
            drafts.append(ids)
        if self.mtp.count > 1:  # entries of drafts are made again, of the model's hidden states
            self.cache.crop(1 - self.mtp.count)
        return torch.cat([input_ids, *drafts], 1), None
