"""Whole models before and after kernelize on a GPU: prompts, tokens and training steps.

    python benchmarks/compare_whole.py [--model llama qwen3_5] [--what token prompt training]
                                       [--batch 1 64] [--compile] [--json FILE]

Llama with 8 layers of the 8B model's sizes, and Qwen3.5 with 16 layers of the 4B model's, random
weights, bf16. Before means transformers with FLA's kernels (compare_models.py); --compile adds
torch.compile of it. All run in one process, in turns: eager wall time, launches, busy time of the
GPU and, for training, peak memory.
"""

import argparse
import copy
import statistics
from functools import partial
from pathlib import Path

import torch
from compare_models import greedy_step, install_fla_convolution, randomize, wall
from kernel_time import RESULTS, load_package, save

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
}
QWEN = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 16384,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(16)],
}
PROMPT, TRAINING = 8192, 4096


def model_of(name: str):
    import transformers

    if name == "llama":
        kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)
    else:
        kind, config = transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig(**QWEN)
    with torch.device("cuda"):
        return randomize(kind(config)).bfloat16().eval()


def profiled(call) -> tuple:
    """(kernels that a call starts, the milliseconds that they take)."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    times = [e.device_time for e in record.events() if e.device_type == on_gpu]
    return len(times), sum(times) / 1e3


def measured(what: str, calls: dict) -> dict:
    """A row: the median of three turns of each call."""
    for call in calls.values():
        call()
    turns = [{name: wall(call, 0.3) / 1e3 for name, call in calls.items()} for _ in range(3)]
    row = {"what": what}
    row["ms"] = {name: statistics.median(turn[name] for turn in turns) for name in calls}
    profiles = {name: profiled(call) for name, call in calls.items()}
    row["launches"] = {name: count for name, (count, _) in profiles.items()}
    row["busy_ms"] = {name: busy for name, (_, busy) in profiles.items()}
    return row


def peak_memory(call) -> float:
    """GiB, the model's own among them."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def training_step(model, ids):
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def inference_rows(name: str, models: dict, what: list, batches: list):
    config = models["ours"].config
    if "prompt" in what:
        ids = torch.randint(5, config.vocab_size, (1, PROMPT), device="cuda")
        calls = {n: partial(m, ids, use_cache=True, logits_to_keep=1) for n, m in models.items()}
        yield measured(f"{name}: prompt of {PROMPT}", calls)
    for batch in batches if "token" in what else ():
        ids = torch.randint(5, config.vocab_size, (batch, 128), device="cuda")
        calls = {n: greedy_step(m, models["ours"], config, ids) for n, m in models.items()}
        yield measured(f"{name}: token, batch {batch}", calls)


def rows_of(package, name: str, what: list, batches: list, compiled: bool):
    model = model_of(name)
    models = {"transformers": model, "ours": copy.deepcopy(model)}
    print(package.kernelize(models["ours"]), flush=True)
    if compiled:
        models["compiled"] = torch.compile(model)
    with torch.no_grad():
        yield from inference_rows(name, models, what, batches)
    if "training" not in what:
        return
    ids = torch.randint(5, model.config.vocab_size, (1, TRAINING), device="cuda")
    del models
    models = {"transformers": lambda: model, "ours": lambda: package.kernelize(model, "training")}
    row, steps = {"what": f"{name}: training step of {TRAINING}", "peak_GiB": {}}, {}
    for side, prepare in models.items():  # one model, one after the other: the memory is its own
        prepare()
        model.train()
        step = partial(training_step, model, ids)
        steps[side] = measured(side, {side: step})
        row["peak_GiB"][side] = peak_memory(step)
    for key in ("ms", "launches", "busy_ms"):
        row[key] = {side: steps[side][key][side] for side in steps}
    yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["llama", "qwen3_5"])
    parser.add_argument("--what", nargs="+", default=["token", "prompt", "training"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64], help="of tokens")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the plain model")
    parser.add_argument("--json", type=Path, default=RESULTS / "whole_models.json")
    options = parser.parse_args()
    if "qwen3_5" in options.model:
        install_fla_convolution()
    package, rows = load_package(), []
    for name in options.model:
        for row in rows_of(package, name, options.what, options.batch, options.compile):
            rows.append(row)
            ratio = row["ms"]["ours"] / row["ms"]["transformers"]
            print(f"{row}  ours takes {ratio:.3f} of the time", flush=True)
            save(options.json, rows)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
