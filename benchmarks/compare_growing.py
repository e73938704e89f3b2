"""One token over a cache that grows, transformers' default: attention alone, and eager decoding.

    python benchmarks/compare_growing.py [--json FILE]      on a GPU
    python benchmarks/compare_growing.py --models [--cases llama:1 llama:16 qwen:1] [--json FILE]

The peer is scaled_dot_product_attention as transformers calls it, with a mask for padded batches,
for which keys and values are repeated for each query head; and the same without cuDNN, which makes
plans. "kernels" are times by CUDA graph, "a new length" is a call by the clock, from an idle GPU to
an idle GPU, over a length that no call has had before: each token of a growing cache has one.
Of models, a token is a call after a prompt, by the clock, at lengths that are new, too:
transformers, kernelized with attention left to SDPA, and kernelized, in turns.
"""

import itertools
import statistics
from functools import partial
from types import SimpleNamespace
from typing import Callable, Iterator, Optional

import torch
from compare_generate import MODELS, decode_with_fla, in_turns, model_of, prompt_of
from kernel_time import microseconds, seconds
from runner import kernelized, relative_error, run, submodule

HEADS = ((32, 8, 128), (32, 32, 128), (16, 4, 256), (32, 8, 64))  # of q, of k; dim
SIZES = ((1, 600, ""), (1, 8000, ""), (16, 2000, ""), (16, 2000, ", padded"), (64, 600, ""))
LENGTHS, TOKENS, TURNS = 12, 16, 3
ARGUMENTS = {
    "--models": {"action": "store_true", "help": "tokens of models, not attention alone"},
    "--cases": {"nargs": "+", "default": ["llama:1", "llama:16", "qwen:1"], "help": "model:batch"},
}


def normal(*shape) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


class Attention:
    """One token of some heads over slots of a cache; padding in a quarter of the rows."""

    def __init__(self, package, heads: tuple, batch: int, padded: bool):
        from transformers.integrations import sdpa_attention

        (HQ, self.HK, self.D), self.B, self.padded = heads, batch, padded
        self.heads, self.package = heads, package
        self.q = normal(batch, 1, HQ, self.D)
        self.function = sdpa_attention.sdpa_attention_forward
        self.module = SimpleNamespace(num_key_value_groups=HQ // self.HK, is_causal=True)

    def over(self, slots: int) -> tuple:
        """Keys, values and mask."""
        k, v = (normal(self.B, self.HK, slots, self.D) for _ in "kv")
        if not self.padded:
            return k, v, None
        mask = torch.ones(self.B, 1, 1, slots, dtype=torch.bool, device="cuda")
        mask[: self.B // 4, ..., : slots // 3] = False
        return k, v, mask

    def sdpa(self, k, v, mask) -> torch.Tensor:
        return self.function(self.module, self.q.transpose(1, 2), k, v, mask)[0]

    def without_cudnn(self, k, v, mask) -> torch.Tensor:
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            return self.sdpa(k, v, mask)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)

    def ours(self, k, v, mask, length=None) -> torch.Tensor:
        return self.package.attention_with_kvcache(self.q, k, v, length, attention_mask=mask)

    def error(self, way: Callable, k, v, mask) -> float:
        """Of the first row, relative to fp64."""
        q, k1, v1 = (x[:1].double() for x in (self.q, k, v))
        row = None if mask is None else mask[:1]
        right = self.package.attention_with_kvcache(q, k1, v1, attention_mask=row)
        return relative_error(way(k, v, mask)[:1], right)

    def new_length_us(self, way: Callable, slots: int) -> float:
        times, first = [], slots + 1
        first += LENGTHS * HEADS.index(self.heads)  # some have the same plans as others
        for length in range(first, first + LENGTHS):
            times.append(seconds(partial(way, *self.over(length))))
        return statistics.median(times) * 1e6


@torch.no_grad()
def attention_rows(package):
    for heads, (B, slots, padded) in itertools.product(HEADS, SIZES):
        one = Attention(package, heads, B, bool(padded))
        ways = {"ours": one.ours, "sdpa": one.sdpa, "sdpa, without cuDNN": one.without_cudnn}
        tensors = one.over(slots)
        what = "{}/{} heads of {}".format(*heads) + f", batch {B}, {slots} slots{padded}"
        error = {name: one.error(way, *tensors) for name, way in ways.items()}
        new = {name: one.new_length_us(way, slots) for name, way in ways.items()}
        yield {"what": f"{what}, a new length", "us": new}
        calls = {name: partial(way, *tensors) for name, way in ways.items()}
        us = microseconds(calls, rep_ms=4)
        yield {"what": f"{what}, kernels", "us": us, "error": error}


def token_us(model, batch: int, lengths) -> float:
    """Microseconds of a token at lengths that are new."""
    ids = prompt_of(batch, next(lengths))
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    call = partial(model, ids[:, -1:], past_key_values=cache)
    return statistics.median(seconds(call) for _ in range(TOKENS)) * 1e6


@torch.no_grad()
def model_rows(package, cases):
    attention = submodule("layers.attention")
    own = attention.decodes

    def left_to_sdpa(function, q, k, v, mask, past, slots, *rest) -> Optional[Callable]:
        return None if slots is None else own(function, q, k, v, mask, past, slots, *rest)

    def way(model, batch: int, lengths, decodes: Optional[Callable]) -> float:
        if decodes is None:
            return token_us(model, batch, lengths)
        kernelized(package, model)
        attention.decodes = decodes
        try:
            return token_us(model, batch, lengths)
        finally:
            attention.decodes = own
            package.restore(model)

    decode_with_fla(package)
    for name, _, batch in (case.partition(":") for case in cases):
        call = partial(way, model_of(name), int(batch), itertools.count(300, TOKENS))
        forms = {"ours": own, "left to SDPA": left_to_sdpa, "transformers": None}
        ways = {name: partial(call, form) for name, form in forms.items()}
        turns = in_turns(ways, turns=TURNS)
        us = {name: statistics.median(times) for name, times in turns.items()}
        what = f"{MODELS[name][0]}, batch {batch}, an eager token"
        yield {"what": what, "us": us, "turns": turns}


def rows(package, options) -> Iterator[dict]:
    return model_rows(package, options.cases) if options.models else attention_rows(package)


main = partial(
    run, __doc__, lambda options: "eager_tokens" if options.models else "attention_growing",
    rows, ARGUMENTS, merge=True,
)  # fmt: skip

if __name__ == "__main__":
    main()
