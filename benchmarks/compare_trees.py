"""Two trees of this package in one process: is anything slower than it was?

    python benchmarks/compare_trees.py --against REV_OR_FOLDER [--rounds 200] [--out FILE]
                                       [--calls decoding swiglus experts prefills layers training]

Times some calls of tools/launched.py, and whole layers, with this tree and with another one, a
revision of this repository or a folder that holds one, in turn. For each call: the host's time
until it returns, and the time of its kernels by CUDA graph (of a training step, the time by the
clock until the GPU is done). Exits with 1 if any is above LIMIT times that of the other tree. Needs
a GPU; the rows of whole layers need transformers.
"""

import argparse
import importlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

import torch
from kernel_time import in_turns, microseconds, seconds
from runner import ROOT, load_package, machine, parse_on_gpu, save

# isort: split
import launched  # of tools/, where runner has imports look

LIMIT = 1.03
DEVICE, DTYPE = "cuda", torch.bfloat16
launched.DEVICE = DEVICE


def copy_of(where: str, scratch: Path) -> Path:
    """A copy of the other tree's package, whose operators have a namespace of their own."""
    folder = Path(where)
    if not folder.is_dir():
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", where], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", scratch], input=archive.stdout, check=True)
        folder = scratch
    package = scratch / "other" / "fused_swiglu_gdn"
    shutil.copytree(folder / "torch-ext" / "fused_swiglu_gdn", package)
    names = (ROOT / "torch-ext" / "fused_swiglu_gdn" / "_ops.py").read_text()
    (package / "_ops.py").write_text(names.replace('"in_tree"', '"other_tree"'))
    return package


def listed(*names) -> Callable:
    """A function of a tree's package that gives the calls of these names."""
    return lambda kernel: {name: launched.CALLS[name](kernel) for name in names}


def prefills(kernel) -> dict:
    names = "gdn prefill, from states", "gdn prefill, packed", "gdn prefill, long, packed"
    found = listed(*names)(kernel)
    one, other, _ = found.values()
    return {**found, "gdn prefill, the first two in turn": lambda: (one(), other())}


def decoder_token(kernel) -> dict:
    """A token of a decoder layer with Llama 8B's sizes, on a static cache."""
    from transformers import LlamaConfig, LlamaModel, StaticCache

    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=8, vocab_size=128)
    model = LlamaModel(config).to(DEVICE, DTYPE).eval()
    assert not kernel.kernelize(model).left
    (layer,), cache = model.layers, StaticCache(config, max_cache_len=1024)
    token, tables = launched.values(1, 1, 4096), launched.values(2, 1, 1, 128).unbind()
    mask = torch.ones(1, 1, 1, 1024, dtype=torch.bool, device=DEVICE)
    given = {"attention_mask": mask, "position_embeddings": tables, "past_key_values": cache}
    layer(token, **given)
    length = cache.layers[0].cumulative_length
    return {"decoder layer, next token": lambda: length.zero_() is layer(token, **given)}


def linear_attention(kernel, what: str, model: str, config: str, layer: str, **sizes) -> dict:
    """The prompt of 2048 tokens of a layer with a state, and its next token."""
    from transformers import DynamicCache

    configs = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    given = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], **sizes}
    config = getattr(configs, config)(**given)
    module = getattr(modeling, layer)(config, 0).to(DEVICE, DTYPE).eval()
    assert kernel.kernelize(module).served
    prompt, token = (launched.values(1, T, config.hidden_size) for T in (2048, 1))
    cache = DynamicCache(config=config)
    module(prompt, cache_params=cache)
    return {
        f"{what}, prompt 2048": lambda: module(prompt, cache_params=None),
        f"{what}, next token": lambda: module(token, cache_params=cache),
    }


def layers(kernel) -> dict:
    """A Qwen3.5 and a Kimi Linear layer's prompt, and their next token; a Llama layer's token."""
    qwen = "qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"
    kimi = "kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention"
    try:
        return {
            **linear_attention(kernel, "layer", *qwen, hidden_size=2048),
            **linear_attention(kernel, "KDA layer", *kimi),
            **decoder_token(kernel),
        }
    except ImportError:
        return {}


def host_us(call) -> float:
    """Microseconds until a call on an idle GPU returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def compared(make, kernels: dict, rounds: int, is_training: bool) -> list:
    """A row for each call that make(kernel) has."""
    calls = {}
    for side, kernel in kernels.items():
        torch.manual_seed(0)
        calls[side] = make(kernel)
    rows = []
    for name in calls["this"]:
        pair = {side: calls[side][name] for side in kernels}
        for call in pair.values():
            for _ in range(3):
                call()
        row = {"call": name}
        if is_training:
            row["clock_us"] = in_turns(pair, rounds // 8, lambda call: seconds(call) * 1e6)
        else:
            with torch.no_grad():
                row["host_us"] = in_turns(pair, rounds, host_us)
                row["kernels_us"] = microseconds(pair)
        for times in [times for times in row.values() if isinstance(times, dict)]:
            times["ratio"] = round(times["this"] / times["other"], 3)
        rows.append(row)
        print(row, flush=True)
    return rows


CALLS = {
    "decoding": listed("gdn decode, batch 1, float32 [K, V]"),
    "swiglus": listed(*(f"swiglu forward, M {M}" for M in (1, 64, 512))),
    "experts": listed(*(f"experts forward, T {T}" for T in (1, 64, 8192))),
    "prefills": prefills,
    "layers": layers,
    "training": listed("swiglu training", "gdn training, raw gates", "experts training, T 4096"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, help="a revision, or a folder with a tree")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--out", type=Path)
    options = parse_on_gpu(parser)
    with tempfile.TemporaryDirectory() as scratch:
        this = load_package()
        other = load_package("other_tree", copy_of(options.against, Path(scratch)))
        kernels = {"this": this, "other": other}
        rows = []
        for name in options.calls:
            with torch.set_grad_enabled(name == "training"):
                rows += compared(CALLS[name], kernels, options.rounds, name == "training")
    if options.out:
        save(options.out, rows, against=options.against)
    print(machine())
    slower = [
        f"{row['call']}: {what} {times['ratio']}"
        for row in rows
        for what, times in row.items()
        if isinstance(times, dict) and times["ratio"] > LIMIT
    ]
    print("\n".join(["slower than it was:", *slower]) if slower else "nothing is slower")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
