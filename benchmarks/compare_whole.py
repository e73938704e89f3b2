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

import collections
import copy
import importlib
import itertools
from functools import partial
from pathlib import Path
from typing import Callable

import torch
from kernel_time import in_turns, kernels_of, memory, wall
from model_cases import PROMPT, model_of, prompts, tokens
from peers import install_fla_convolution, lift_fla_guard, share_autotuning, working
from runner import kernelized, run, wait_for

ARGUMENTS = {
    "--model": {"nargs": "+", "default": ["llama", "qwen3_5"]},
    "--what": {"nargs": "+", "default": ["token", "prompt", "training"]},
    "--batch": {"nargs": "+", "type": int, "default": [1, 64], "help": "of tokens"},
    "--peers": {"nargs": "+", "choices": ["compile", "liger"], "default": []},
    "--wait-for": {"type": Path},
    "--every": {"type": int, "default": 1},
}
TRAINING = 4096  # tokens of a step
LIGER = {"liger": {}, "liger, own loss": {"fused_linear_cross_entropy": False}}
TURNS = 4
PRODUCTS = "nvjet gemm cutlass splitK swiglu_fwd swiglu_saving swiglu_dx swiglu_gradient project"
PARTS = {  # words in the names of their kernels
    "products": PRODUCTS.split(),
    "attention": ["sdpa", "flash", "fmha", "kvcache"],
}


def parts(kernels: list) -> dict:
    """Milliseconds of a call in matrix products, in the attention function and in all the rest."""
    found = dict.fromkeys((*PARTS, "rest"), 0.0)
    for name, us in kernels:
        part = (part for part, words in PARTS.items() if any(word in name for word in words))
        found[next(part, "rest")] += us / 1e3 / TURNS
    return found


def longest(kernels: list, most: int = 20) -> dict:
    """{name: [how often, milliseconds]} in a call, of the kernels that take most of the time."""
    found = collections.defaultdict(lambda: [0, 0.0])
    for name, us in kernels:
        found[name[:60]][0] += 1 / TURNS
        found[name[:60]][1] += us / 1e3 / TURNS
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:most])


def measured(what: str, calls: dict) -> dict:
    """A row: the median of three turns of each call, and TURNS calls as the profiler sees them,
    one after another as wall has them: a call after a rest finds a cooler GPU."""
    ms = {name: us / 1e3 for name, us in in_turns(calls, 3, wall).items()}
    found = {name: kernels_of(call, TURNS) for name, call in calls.items()}
    return {
        "what": what,
        "ms": ms,
        "launches": {n: round(len(kernels) / TURNS) for n, kernels in found.items()},
        "busy_ms": {n: sum(us for _, us in ks) / 1e3 / TURNS for n, ks in found.items()},
        "parts_ms": {name: parts(kernels) for name, kernels in found.items()},
        "kernels": {name: longest(kernels) for name, kernels in found.items()},
    }


def peak_memory(call, model, models: list) -> float:
    """GiB of a call of a model, its weights among them and other models' not."""
    for other in models:
        other.zero_grad(set_to_none=True)
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    return memory(call)[1] / 2**10 + sum(weights.values()) / 2**30


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
    if what == "prompt":
        yield f"{name}: prompt of {PROMPT}", prompts(models)
    for batch in batches if what == "token" else ():
        yield f"{name}: token, batch {batch}", tokens(models, "ours", batch)
    if what == "training":
        ids = torch.randint(5, models["ours"].config.vocab_size, (1, TRAINING), device="cuda")
        calls = {n: partial(training_step, m, ids) for n, m in models.items()}
        yield f"{name}: training step of {TRAINING}", calls


def rows_of(package, name: str, what: str, options):
    training = what == "training"
    model = model_of(name, cast=True).train(training)
    models, around = {"transformers": model, "ours": copy.deepcopy(model)}, {}
    kernelized(package, models["ours"])
    if training and "liger" in options.peers:  # whose loss this is
        models["ours, loss=True"] = copy.deepcopy(model)
        kernelized(package, models["ours, loss=True"], loss=True)
    for peer, more in LIGER.items() if "liger" in options.peers else ():
        if training or not more:
            models[peer] = copy.deepcopy(model)
            around[peer] = with_liger(name, models[peer], **more)
    if "compile" in options.peers:
        models["compile"] = torch.compile(model, dynamic=False)
    with torch.set_grad_enabled(training):
        found = []
        for row, calls in calls_of(name, models, what, options.batch):
            plain = lambda call: call  # noqa: E731
            makers = {n: partial(around.get(n, plain), call) for n, call in calls.items()}
            found.append((row, working(makers, needed=["ours"], runs=3)))
        for one in models.values():
            one.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        wait_for(options.wait_for)
        for row, calls in found:
            row, every = measured(row, calls), list(models.values())
            if training:
                row["peak_GiB"] = {n: peak_memory(c, models[n], every) for n, c in calls.items()}
            yield row


def rows(package, options):
    if {"qwen3_5", "kimi_linear"} & set(options.model):
        share_autotuning(0, options.every)
        lift_fla_guard()
        install_fla_convolution()
    for name, what in itertools.product(options.model, options.what):
        yield from rows_of(package, name, what, options)
        torch.compiler.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__doc__, "whole_models", rows, ARGUMENTS, merge=True)
