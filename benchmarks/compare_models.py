"""A Gated DeltaNet layer and a whole model, before and after kernelize, on a GPU.

    python benchmarks/compare_models.py [--layer] [--model] [--json FILE]
    python benchmarks/compare_models.py --render benchmarks/results/models.json    table and picture

Before means transformers with FLA's kernels: its gated delta rule, which transformers calls where
`fla` is installed, and its Triton convolution, put where transformers looks for the CUDA package
causal_conv1d. Both run in one process, in turns.
"""

import argparse
import copy
import json
import statistics
import sys
import time
import types
from functools import partial
from pathlib import Path

import torch
from kernel_time import RESULTS, load_package, microseconds, save

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


def wall(call, seconds=0.3):
    """Microseconds of a call as a program sees it: host and GPU, calls one after another."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < seconds:
        call()
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


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
def compare_layer(package):
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    config = transformers.Qwen3_5TextConfig(**LAYER)
    with torch.device("cuda"):
        layer = randomize(modeling.Qwen3_5GatedDeltaNet(config, 0)).bfloat16().eval()
    layers = both(package, layer)
    rows = []

    def prompt(layer, x):
        cache = transformers.DynamicCache(config=config)
        return layer(x, cache_params=cache), cache

    for batch in (1, 64, 256):
        tokens = torch.randn(batch, 64, LAYER["hidden_size"], device="cuda", dtype=torch.bfloat16)
        steps, outs = {}, {}
        for name, layer in layers.items():
            _, cache = prompt(layer, tokens)
            outs[name] = layer(tokens[:, :1], cache_params=cache)
            steps[name] = partial(layer, tokens[:, :1], cache_params=cache)
        eager = {name: statistics.median(wall(s) for _ in range(3)) for name, s in steps.items()}
        row = {"what": f"decode, batch {batch}", "eager_us": eager}
        row["graph_us"] = microseconds(steps)
        row["launches"] = {name: launches(step) for name, step in steps.items()}
        row["difference"] = relative_error(outs["after"], outs["before"])
        rows.append(shown(row))
    x = torch.randn(1, PROMPT, LAYER["hidden_size"], device="cuda", dtype=torch.bfloat16)
    prompts = {name: partial(prompt, layer, x) for name, layer in layers.items()}
    row = {"what": f"prompt of {PROMPT}", "launches": {n: launches(p) for n, p in prompts.items()}}
    row["eager_us"] = {n: statistics.median(wall(p) for _ in range(3)) for n, p in prompts.items()}
    row["difference"] = relative_error(prompts["after"]()[0], prompts["before"]()[0])
    rows.append(shown(row))
    return rows


@torch.no_grad()
def compare_model(package):
    import transformers

    config = transformers.Qwen3_5TextConfig(**MODEL)
    with torch.device("cuda"):
        model = randomize(transformers.Qwen3_5ForCausalLM(config)).bfloat16().eval()
    models = both(package, model)
    ids = torch.randint(0, config.vocab_size, (1, PROMPT), device="cuda")
    calls = {n: partial(m, ids, use_cache=True, logits_to_keep=1) for n, m in models.items()}
    taken = {name: statistics.median(wall(c, 0.5) for _ in range(3)) for name, c in calls.items()}
    difference = relative_error(calls["after"]().logits, calls["before"]().logits)
    rows = [
        shown({"what": f"model: prompt of {PROMPT}", "eager_us": taken, "difference": difference})
    ]
    for batch in (1, 64):
        ids = torch.randint(0, config.vocab_size, (batch, 128), device="cuda")
        row = {"what": f"model: token, batch {batch}", "eager_us": {}, "graph_us": {}}
        for name, model in models.items():
            step, replay = decoding(model, config, ids)
            row["eager_us"][name] = statistics.median(wall(step) for _ in range(3))
            row["graph_us"][name] = statistics.median(wall(replay) for _ in range(3))
        rows.append(shown(row))
    return rows


def decoding(model, config, ids):
    """One greedy step, called and as a CUDA graph, on static states.

    Both write their token on the same place of the cache: a time does not depend on it.
    """
    import transformers

    cache = transformers.StaticCache(config=config, max_cache_len=512)
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)  # [B, 1]
    lengths = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "keys")]
    place = torch.full_like(token, ids.shape[1])

    def step():
        for length in lengths:
            length.fill_(ids.shape[1])
        logits = model(token, past_key_values=cache, position_ids=place).logits
        token.copy_(logits.argmax(-1))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return step, graph.replay


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


def render(path: Path) -> None:
    """A table on the screen, and a picture of the speed-ups beside the record."""
    import matplotlib.pyplot as plt

    record = json.loads(path.read_text())
    rows = [shown(row) for row in record["rows"]]
    names, ratios = [], []
    for row in rows:
        for key, how in (("eager_us", "eager"), ("graph_us", "CUDA graph")):
            if row.get(key):
                names.append(f"{row['what']}, {how}")
                ratios.append(row[key]["before"] / row[key]["after"])
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(names) + 1.2))
    bars = axes.barh(names[::-1], ratios[::-1], color="#4878a8")
    axes.bar_label(bars, fmt="%.2fx", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as transformers with FLA's kernels")
    axes.set_title(f"{record['gpu']}, bf16, {record['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", action="store_true", help="the layer alone")
    parser.add_argument("--model", action="store_true", help="the model alone")
    parser.add_argument("--json", type=Path, default=RESULTS / "models.json")
    parser.add_argument("--render", type=Path)
    arguments = parser.parse_args()
    if arguments.render:
        render(arguments.render)
        return
    install_fla_convolution()
    package = load_package()
    rows = []
    for name, compare in (("layer", compare_layer), ("model", compare_model)):
        if getattr(arguments, name) or not (arguments.layer or arguments.model):
            rows += compare(package)
            save(arguments.json, rows)


if __name__ == "__main__":
    main()
