"""graphed_step: a decoding step as a CUDA graph, for loops written by hand."""

from typing import Any, Optional

import torch
from torch import nn

from ..runtime.checks import is_int, is_model
from .caches import cache_name
from .graph_rules import why_not_model
from .graphs import Step


class GraphedStep:
    """The result of graphed_step."""

    def __init__(self, model: nn.Module, cache: Any, batch_size: int):
        self._model, self._cache, self._batch_size = model, cache, batch_size
        self._step = Step(cache, cache_name(model))
        self._step.reason = why_not_model(model) or self._step.reason

    @property
    def reason(self) -> Optional[str]:
        """The reason why no step is a graph; None if steps may be."""
        return self._step.reason

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, **inputs):
        expected = (self._batch_size, 1)
        if not isinstance(input_ids, torch.Tensor) or input_ids.shape != expected:
            found = list(getattr(input_ids, "shape", ())) or type(input_ids).__name__
            raise ValueError(f"input_ids must be a tensor of shape {list(expected)}, got {found}")
        inputs = {"input_ids": input_ids, "use_cache": True, "return_dict": True, **inputs}
        return self._step(self._model, self._cache, inputs)


def graphed_step(model: nn.Module, cache: Any, batch_size: int) -> GraphedStep:
    """A decoding step of a transformers model as a CUDA graph, for hand-written loops.

    step(input_ids, **inputs) calls the model on input_ids, the cache and the inputs, without
    gradients. The first call runs eagerly, the second is captured, and later ones are replays, as
    long as nothing changes that the graph contains: shapes, addresses of weights and of the cache,
    adapters, hooks, modes. If a graph would compute something else, steps run eagerly.

    Args:
        model: a model prepared for decoding, kernelized or not; in evaluation mode.
        cache: a transformers.StaticCache that has been filled with the prompt.
        batch_size: B of the tokens [B, 1] that a step takes.

    Returns:
        The step. It takes input_ids [B, 1] int64 and other arguments of the model, tensors always
        of the same shapes: position_ids [B, 1], and attention_mask [B, 1, 1, S] for the S slots of
        the cache. A model with sliding windows needs both. It returns the model's output, whose
        tensors the next step overwrites. `step.reason` says why steps are not replayed, or is None.

    Raises:
        TypeError: model is not an nn.Module, cache no cache, or batch_size not an int.
        ValueError: batch_size is below 1; in a step, input_ids are not [B, 1].

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = StaticCache(config, max_cache_len=16)
        >>> prompt = torch.tensor([[3, 1, 4, 1, 5]])
        >>> token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
        >>> step = graphed_step(model, cache, batch_size=1)
        >>> for _ in range(4):
        ...     token = step(token).logits.argmax(-1)
        >>> token.shape
        torch.Size([1, 1])
        >>> step.reason
        'the model is on cpu'
    """
    is_model("graphed_step", model)
    if isinstance(cache, type) or not callable(getattr(cache, "get_seq_length", None)):
        kind = f"the class {cache.__name__}" if isinstance(cache, type) else type(cache).__name__
        raise TypeError(f"cache must be a cache of transformers, a StaticCache, got {kind}")
    is_int("batch_size", batch_size, 1)
    return GraphedStep(model, cache, batch_size)
