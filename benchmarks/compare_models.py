"""A Gated DeltaNet layer and whole models, before and after kernelize, on a GPU.

    python benchmarks/compare_models.py [--layer] [--model] [--json FILE]
    python benchmarks/compare_models.py --mixtures [--json FILE]        mixtures of experts
    python benchmarks/compare_models.py --device cpu [--repeats 20] [--json FILE]
                                         (what models_on_cpu.py has)

Before means transformers with FLA's kernels: its gated delta rule, which transformers calls where
`fla` is installed, and its Triton convolution, put where transformers looks for the CUDA package
causal_conv1d. Both run in one process, in turns.
"""

import argparse
import copy
import statistics
import sys
import time
import types
from functools import partial
from pathlib import Path

import models_on_cpu
import torch
from kernel_time import RESULTS, load_package, parse_on_gpu, save, share_autotuning, warm_up

LAYER = {  # Qwen3.5-4B
    "hidden_size": 2560,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
}
MODEL = {  # 24 layers, every fourth with attention
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(24)],
}
MIXTURES = {  # of 8 layers; without the vision tower and the prediction of further tokens
    "Qwen3.5-35B-A3B": (
        "Qwen3_5Moe",
        "TextConfig",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention"
                            for i in range(8)],
        },
    ),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        "Config",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}  # fmt: skip
PROMPT = 8192


def install_fla_convolution():
    """Before transformers' models are imported: they ask for this package by name, once."""
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update

    def fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        x = hidden_states.transpose(1, 2)
        return causal_conv1d(x, weight, bias, activation=activation)[0].transpose(1, 2)

    def update(hidden_states, conv_state, weight, bias=None, activation=None):
        x = hidden_states.transpose(1, 2)
        y, _ = causal_conv1d_update(x, conv_state, weight=weight, bias=bias, activation=activation)
        return y.transpose(1, 2)

    module = types.ModuleType("causal_conv1d")
    module.causal_conv1d_fn, module.causal_conv1d_update = fn, update
    sys.modules["causal_conv1d"] = module


def randomize(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
            elif name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0.01, 16).log())
    return module


def relative_error(out, ref):
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def wall(call, seconds=0.2):
    """Microseconds of a call as a program sees it: host and GPU, calls one after another."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < seconds:
        call()
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def medians(calls):
    """wall of each call by name, the median of three turns."""
    turns = [{name: wall(call) for name, call in calls.items()} for _ in range(3)]
    return {name: statistics.median(turn[name] for turn in turns) for name in calls}


def launches(call):
    """Kernels that a call starts."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        call()
        torch.cuda.synchronize()
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith("Memcpy HtoD")
        for event in record.events()
    )


def both(package, module):
    served = copy.deepcopy(module)
    report = package.kernelize(served)
    print(report, flush=True)
    assert report.served
    return {"before": module, "after": served}


@torch.no_grad()
def layer_calls(package):
    """[(what, {"before": call, "after": call})] of a layer, made as they are asked for."""
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    config = transformers.Qwen3_5TextConfig(**LAYER)
    with torch.device("cuda"):
        layer = randomize(modeling.Qwen3_5GatedDeltaNet(config, 0)).bfloat16().eval()
    layers = both(package, layer)

    def prompt(layer, x):
        cache = transformers.DynamicCache(config=config)
        return layer(x, cache_params=cache), cache

    for batch in (1, 64, 256):
        x = torch.randn(batch, 64, LAYER["hidden_size"], device="cuda", dtype=torch.bfloat16)
        # both go on from the states that ours leaves: FLA would tune itself for each batch
        caches = {name: prompt(layers["after"], x)[1] for name in layers}
        calls = {n: partial(m, x[:, :1], cache_params=caches[n]) for n, m in layers.items()}
        yield f"layer: token, batch {batch}", calls
    x = torch.randn(1, PROMPT, LAYER["hidden_size"], device="cuda", dtype=torch.bfloat16)
    calls = {n: lambda m=m: prompt(m, x)[0] for n, m in layers.items()}
    yield f"layer: prompt of {PROMPT}", calls


@torch.no_grad()
def model_calls(package):
    """The same of a whole model; a token is a greedy step on static states."""
    import transformers

    config = transformers.Qwen3_5TextConfig(**MODEL)
    yield from calls_of(package, "model", transformers.Qwen3_5ForCausalLM, config)


@torch.no_grad()
def mixture_calls(package):
    """Mixtures of experts of real sizes, of 8 layers."""
    import transformers

    for name, (family, suffix, sizes) in MIXTURES.items():
        config = getattr(transformers, family + suffix)(**sizes)
        config._experts_implementation = "grouped_mm"
        kind = getattr(transformers, f"{family}ForCausalLM")
        yield from calls_of(package, name, kind, config, batches=(1,))


def calls_of(package, name, kind, config, batches=(1, 64)):
    with torch.device("cuda"):
        model = randomize(kind._from_config(config, dtype=torch.bfloat16)).eval()
    models = both(package, model)
    ids = torch.randint(0, config.vocab_size, (1, PROMPT), device="cuda")
    calls = {
        n: lambda m=m: m(ids, use_cache=True, logits_to_keep=1).logits for n, m in models.items()
    }
    yield f"{name}: prompt of {PROMPT}", calls
    for batch in batches:
        ids = torch.randint(0, config.vocab_size, (batch, 128), device="cuda")
        calls = {n: greedy_step(m, models["after"], config, ids) for n, m in models.items()}
        yield f"{name}: token, batch {batch}", calls
    if name in MIXTURES:
        x = torch.randn(1, 1, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        calls = {n: partial(m.model.layers[0].mlp, x) for n, m in models.items()}
        yield f"{name}: block of experts, 1 token", calls


def greedy_step(model, first, config, ids):
    """A step that writes its token always on the same place of the cache, at the same cost.

    `first` is the model that reads the prompt.
    """
    import transformers

    cache = transformers.StaticCache(config=config, max_cache_len=512)
    token = first(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)  # [B, 1]
    lengths = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "keys")]
    place = torch.full_like(token, ids.shape[1])

    def step():
        for length in lengths:
            length.fill_(ids.shape[1])
        logits = model(token, past_key_values=cache, position_ids=place).logits
        token.copy_(logits.argmax(-1))
        return logits

    return step


def graphed(call):
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.no_grad()
def compare(pairs, rows):
    for what, calls in pairs:
        row = {"what": what}
        outs = {name: call() for name, call in calls.items()}
        row["difference"] = relative_error(outs["after"], outs["before"])
        row["eager_us"] = medians(calls)
        if "token" in what:
            row["graph_us"] = medians({name: graphed(call) for name, call in calls.items()})
        row["launches"] = {name: launches(call) for name, call in calls.items()}
        rows.append(shown(row))
        yield rows


def shown(row):
    """The row, printed."""
    parts = [f"{row['what']:24}"]
    for key in ("eager_us", "graph_us", "launches"):
        if row.get(key):
            a, b = row[key]["before"], row[key]["after"]
            parts.append(
                f"{key[:-3] if key != 'launches' else key} {a:.1f} -> {b:.1f} ({a / b:.2f}x)"
            )
    if "difference" in row:
        parts.append(f"differs by {row['difference']:.1e}")
    print("  ".join(parts), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", action="store_true", help="the layer alone")
    parser.add_argument("--model", action="store_true", help="the model alone")
    parser.add_argument("--mixtures", action="store_true", help="mixtures of experts alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=20, help="pairs of timings, on a CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    arguments = parse_on_gpu(parser)
    if arguments.device == "cpu":
        models_on_cpu.compare(arguments.repeats, arguments.json)
        return
    kinds = {"layer": layer_calls, "model": model_calls, "mixtures": mixture_calls}
    names = [name for name in kinds if getattr(arguments, name)] or ["layer", "model"]
    record = "mixtures.json" if names == ["mixtures"] else "models.json"
    if arguments.warm:
        share_autotuning(*map(int, arguments.warm.split("/")))
    elif "mixtures" not in names:  # of which one process fills a good part of the memory
        warm_up(__file__, *(f"--{name}" for name in names))
    install_fla_convolution()
    package = load_package()
    rows = []
    for name in names:
        pairs = kinds[name](package)
        if arguments.warm:
            for _, calls in pairs:
                for call in calls.values():
                    with torch.no_grad():
                        call()
            continue
        for _ in compare(pairs, rows):
            save(arguments.json or RESULTS / record, rows)


if __name__ == "__main__":
    main()
