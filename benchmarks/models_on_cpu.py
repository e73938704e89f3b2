"""The rule, a Gated DeltaNet layer and small models on a CPU, before and after kernelize, in fp32.

    python benchmarks/compare_models.py --device cpu [--repeats 20] [--json FILE]

Before means transformers alone: no other package has these layers for a CPU. Both have the same
weights and are timed in turns; a row shows medians, and the middle half of the pairs' ratios.
"""

import copy
import datetime
import json
import logging
import statistics
import time
from functools import partial

import torch
from kernel_time import installed, load_package

GDN = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 16384,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "eos_token_id": None,
}
LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
TOKENS = 8  # decoded in one timing


def rule_calls(package, modeling):
    """One token of the rule at 16 and 32 heads of 128; ours writes the state in place."""
    B, H, HV, K = 64, 16, 32, 128
    q, k = torch.randn(2, B, 1, H, K).unbind()
    v, g, beta = torch.randn(B, 1, HV, K), -torch.rand(B, 1, HV), torch.rand(B, 1, HV)
    states = torch.randn(2, B, HV, K, K).unbind()
    repeated = [x.repeat_interleave(HV // H, 2) for x in (q, k)]
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    before = partial(
        modeling.torch_recurrent_gated_delta_rule,
        *(*repeated, v, g, beta),
        initial_state=states[0],
        **options,
    )
    after = partial(
        package.fused_recurrent_gated_delta_rule,
        *(q, k, v, g, beta),
        initial_state=states[1],
        inplace_final_state=True,
        **options,
    )
    yield f"rule: token, batch {B}", (before, after), 1


def layer_calls(package, modeling, transformers):
    """A layer of hidden size 1024 with 16 and 32 heads of 128."""
    sizes = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    config = transformers.Qwen3_5TextConfig(
        hidden_size=1024, num_hidden_layers=1, layer_types=LAYERS[:1], **sizes
    )
    layer = modeling.Qwen3_5GatedDeltaNet(config, 0).eval()
    served = copy.deepcopy(layer)
    print(package.kernelize(served))
    layers = layer, served

    def prompt(layer, x):
        cache = transformers.DynamicCache(config=config)
        layer(x, cache_params=cache)
        return cache

    for batch in (1, 64):
        x = torch.randn(batch, 4, config.hidden_size)
        caches = [prompt(m, x) for m in layers]
        calls = [partial(m, x[:, :1], cache_params=c) for m, c in zip(layers, caches)]
        yield f"layer: token, batch {batch}", calls, 1
    x = torch.randn(1, 512, config.hidden_size)
    yield "layer: prompt of 512", [partial(prompt, m, x) for m in layers], 1


def model_calls(package, transformers, family):
    if family == "Qwen3.5":
        config = transformers.Qwen3_5TextConfig(**MODEL, **GDN, layer_types=LAYERS)
    else:
        config = transformers.LlamaConfig(**MODEL)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    served = copy.deepcopy(model)
    print(package.kernelize(served))

    def prompt(model, ids):
        return model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def decode(model, token, cache):
        for _ in range(TOKENS):
            model(token, past_key_values=cache)

    ids = torch.randint(1, 4096, (1, 2048))
    for batch in (1, 8):
        part = ids[:, :256].expand(batch, -1)
        calls = [partial(decode, m, part[:, -1:], prompt(m, part)) for m in (model, served)]
        yield f"{family}: token, batch {batch}", calls, TOKENS
    for length in (512, 2048):
        calls = [partial(prompt, m, ids[:, :length]) for m in (model, served)]
        yield f"{family}: prompt of {length}", calls, 1


def timed(calls, count: int, repeats: int):
    """Pairs of seconds. The two take turns, and turns to be first."""
    for call in calls:
        call()
    pairs = []
    for turn in range(repeats):
        taken = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            calls[which]()
            taken[which] = (time.perf_counter() - start) / count
        pairs.append(taken)
    return pairs


@torch.no_grad()
def compare(repeats: int, path) -> None:
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    transformers.logging.set_verbosity_error()
    logging.getLogger("kernels").setLevel(logging.ERROR)
    torch.manual_seed(0)
    package, rows = load_package(), []
    sources = (
        rule_calls(package, modeling),
        layer_calls(package, modeling, transformers),
        model_calls(package, transformers, "Qwen3.5"),
        model_calls(package, transformers, "Llama"),
    )
    for source in sources:
        for what, calls, count in source:
            pairs = timed(calls, count, repeats)
            before, after = (statistics.median(column) * 1e3 for column in zip(*pairs))
            low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
            print(
                f"{what:26} {before:9.2f} -> {after:9.2f} ms  {middle:5.2f}x"
                f"  (middle half of {repeats} pairs: {low:.2f} to {high:.2f})",
                flush=True,
            )
            row = {"before_ms": before, "after_ms": after, "speed_up": [low, middle, high]}
            rows.append({"what": what, **row})
    if path is not None:
        path.write_text(json.dumps({**_machine(repeats), "rows": rows}, indent=1) + "\n")


def _machine(repeats: int) -> dict:
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "versions": installed(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "repeats": repeats,
    }
