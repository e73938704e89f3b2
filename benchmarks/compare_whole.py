"""Whole models before and after kernelize on a GPU: prompts, tokens and training steps.

    python benchmarks/compare_whole.py [--model llama qwen3_5 qwen3_moe kimi_linear]
                                       [--what token prompt training] [--batch 1 64]
                                       [--peers compile liger] [--json FILE]
                                       [--wait-for FILE] [--every N]

Llama with 8 layers of the 8B model's sizes, Qwen3.5 with 16 layers of the 4B model's, Qwen3-MoE
with 8 of the 30B-A3B model's, Kimi Linear with 8 of the 48B-A3B model's, random weights, bf16.
Before means transformers with FLA's kernels (compare_models.py), whose backward pass takes no
notice of its own guard (compare_gdn_backward.py).
Peers beside it are torch.compile of it, by its defaults and for fixed shapes, and Liger's kernels.
With these, training has kernelize(loss=True) and Liger's patch with the model's own loss as well.
All run in one process, in turns: wall time, launches, busy time of the GPU, the kernels that take
most of it and, for training, peak memory. Peers that raise are left out. Rows take the places of
the record's of the same name.
--wait-for compiles everything first and measures once FILE exists. --every has FLA try every Nth of
its configurations: compiling all of its backward pass takes minutes.
"""

import argparse
import collections
import copy
import importlib
import itertools
import statistics
from functools import partial
from pathlib import Path
from typing import Callable, Optional

import torch
from compare_models import MIXTURES, greedy_step, install_fla_convolution, randomize, wall
from kernel_time import (
    RESULTS,
    load_package,
    merged,
    parse_on_gpu,
    save,
    share_autotuning,
    wait_for,
)

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
KIMI = {  # the defaults are the 48B-A3B model's
    "num_hidden_layers": 8,
    "vocab_size": 32768,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(8)],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT, TRAINING = 8192, 4096
LIGER = {"liger": {}, "liger, own loss": {"fused_linear_cross_entropy": False}}
TURNS = 4
PRODUCTS = "nvjet gemm cutlass splitK swiglu_fwd swiglu_saving swiglu_dx swiglu_gradient project"
PARTS = {  # words in the names of their kernels
    "products": PRODUCTS.split(),
    "attention": ["sdpa", "flash", "fmha", "kvcache"],
}


def model_of(name: str):
    import transformers

    if name == "llama":
        kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)
    elif name == "qwen3_moe":
        sizes = MIXTURES["Qwen3-30B-A3B"][-1]
        kind, config = transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**sizes)
        config._experts_implementation = "grouped_mm"
    elif name == "kimi_linear":
        kind, config = transformers.KimiLinearForCausalLM, transformers.KimiLinearConfig(**KIMI)
        config._experts_implementation = "grouped_mm"
    else:
        kind, config = transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig(**QWEN)
    with torch.device("cuda"):
        return randomize(kind(config)).bfloat16().eval()


def kernels_of(call) -> list:
    """(name, milliseconds) of each kernel of TURNS calls, one after another as wall has them: a
    call after a rest finds a cooler GPU."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(TURNS):
            call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [e for e in record.events() if e.device_type == on_gpu]
    return [(e.name[:100], e.device_time / 1e3) for e in events]


def parts(kernels: list) -> dict:
    """Milliseconds of a call in matrix products, in the attention function and in all the rest."""
    found = dict.fromkeys((*PARTS, "rest"), 0.0)
    for name, ms in kernels:
        part = (part for part, words in PARTS.items() if any(word in name for word in words))
        found[next(part, "rest")] += ms / TURNS
    return found


def longest(kernels: list, most: int = 20) -> dict:
    """{name: [how often, milliseconds]} in a call, of the kernels that take most of the time."""
    found = collections.defaultdict(lambda: [0, 0.0])
    for name, ms in kernels:
        found[name[:60]][0] += 1 / TURNS
        found[name[:60]][1] += ms / TURNS
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:most])


def measured(what: str, calls: dict) -> dict:
    """A row: the median of three turns of each call."""
    turns = [{name: wall(call, 0.2) / 1e3 for name, call in calls.items()} for _ in range(3)]
    row = {"what": what}
    row["ms"] = {name: statistics.median(turn[name] for turn in turns) for name in calls}
    profiles = {name: kernels_of(call) for name, call in calls.items()}
    row["launches"] = {name: round(len(found) / TURNS) for name, found in profiles.items()}
    row["busy_ms"] = {n: sum(ms for _, ms in found) / TURNS for n, found in profiles.items()}
    row["parts_ms"] = {name: parts(kernels) for name, kernels in profiles.items()}
    row["kernels"] = {name: longest(kernels) for name, kernels in profiles.items()}
    return row


def peak_memory(call, model, models: list) -> float:
    """GiB of a call of a model, its weights among them and other models' not."""
    for other in models:
        other.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    others = torch.cuda.memory_allocated() - sum(weights.values())
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - others) / 2**30


def training_step(model, ids):
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def with_liger(name: str, model, **options) -> Callable:
    """Patches the model with Liger's kernels; around(call) is the call while the functions that
    Liger patches for all models of the family are patched."""
    from liger_kernel.transformers import monkey_patch

    modeling = vars(importlib.import_module(f"transformers.models.{name}.modeling_{name}"))
    before = dict(modeling)
    getattr(monkey_patch, f"apply_liger_kernel_to_{name}")(model=model, **options)
    patched = {key: value for key, value in modeling.items() if before.get(key) is not value}
    originals = {key: before[key] for key in patched}
    modeling.update(originals)

    def around(call):
        def within():
            modeling.update(patched)
            try:
                return call()
            finally:
                modeling.update(originals)

        return within

    return around


def calls_of(name: str, models: dict, what: str, batches: list):
    """(what, {side: call}) of a model's rows."""
    config = models["ours"].config
    if what == "prompt":
        ids = torch.randint(5, config.vocab_size, (1, PROMPT), device="cuda")
        calls = {n: partial(m, ids, use_cache=True, logits_to_keep=1) for n, m in models.items()}
        yield f"{name}: prompt of {PROMPT}", calls
    for batch in batches if what == "token" else ():
        ids = torch.randint(5, config.vocab_size, (batch, 128), device="cuda")
        calls = {n: greedy_step(m, models["ours"], config, ids) for n, m in models.items()}
        yield f"{name}: token, batch {batch}", calls
    if what == "training":
        ids = torch.randint(5, config.vocab_size, (1, TRAINING), device="cuda")
        calls = {n: partial(training_step, m, ids) for n, m in models.items()}
        yield f"{name}: training step of {TRAINING}", calls


def runnable(what: str, calls: dict) -> dict:
    """Those that do not raise; ours has to run."""
    found = {}
    for side, call in calls.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            found[side] = call
        except Exception as error:
            if side == "ours":
                raise
            print(f"{what}: {side} is left out: {type(error).__name__}: {error}", flush=True)
    return found


def rows_of(package, name: str, what: str, batches: list, peers: list, begin: Optional[Path]):
    training = what == "training"
    model = model_of(name).train(training)
    models, around = {"transformers": model, "ours": copy.deepcopy(model)}, {}
    print(package.kernelize(models["ours"]), flush=True)
    if training and "liger" in peers:  # whose loss this is
        models["ours, loss=True"] = copy.deepcopy(model)
        package.kernelize(models["ours, loss=True"], loss=True)
    for peer, options in LIGER.items() if "liger" in peers else ():
        if training or not options:
            models[peer] = copy.deepcopy(model)
            around[peer] = with_liger(name, models[peer], **options)
    if "compile" in peers:
        models["compile"] = torch.compile(model, dynamic=False)
    with torch.set_grad_enabled(training):
        found = []
        for row, calls in calls_of(name, models, what, batches):
            calls = {n: around.get(n, lambda call: call)(call) for n, call in calls.items()}
            found.append((row, runnable(row, calls)))
        for one in models.values():
            one.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if begin is not None:
            wait_for(begin)
        for row, calls in found:
            row = measured(row, calls)
            if training:
                every = list(models.values())
                row["peak_GiB"] = {n: peak_memory(c, models[n], every) for n, c in calls.items()}
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["llama", "qwen3_5"])
    parser.add_argument("--what", nargs="+", default=["token", "prompt", "training"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64], help="of tokens")
    parser.add_argument("--peers", nargs="+", choices=["compile", "liger"], default=[])
    parser.add_argument("--wait-for", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "whole_models.json")
    options = parse_on_gpu(parser)
    if {"qwen3_5", "kimi_linear"} & set(options.model):
        share_autotuning(0, options.every)
        import fla.ops.common.chunk_o as guarded

        guarded.TRITON_ABOVE_3_7_1 = True
        install_fla_convolution()
    package = load_package()
    for name, what in itertools.product(options.model, options.what):
        for row in rows_of(package, name, what, options.batch, options.peers, options.wait_for):
            ratios = {n: round(row["ms"]["ours"] / ms, 3) for n, ms in row["ms"].items()}
            print(f"{row}  ours takes of the time of {ratios}", flush=True)
            save(options.json, merged(options.json, [row]))
        torch.compiler.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
