"""Whole models at the sizes of published checkpoints, all of their layers, on one GPU.

    python benchmarks/compare_published.py [--model Qwen3-30B-A3B Qwen3.5-9B] [--batch 1 16]
                                           [--what first token] [--peers liger compile]
                                           [--without transformers] [--layers N] [--every N]
                                           [--json FILE]

Random weights in bf16, made on the GPU. Every side has the same weights, in the same memory, and
generates greedily: transformers on its dynamic cache, with FLA's kernels in Gated DeltaNet layers;
the same with Liger's kernels patched by hand; ours without CUDA graphs and with them; and
transformers on its static cache with its own torch.compile, last, as it takes longest to start.

The first token is generate(max_new_tokens=1) after a prompt of 8192 tokens: the first call, which
compiles, and the median of three more in turns. A token is what a call for 128 new tokens takes
longer than one for 16, divided by 112, after a prompt of 512, on caches of one length: the median
of three such pairs; without graphs 24 tokens are timed. Ours by graphs and torch.compile keep one
static cache for all calls, so that none captures or compiles again. Peak memory is that of the
first call, with the weights. --every has FLA try every Nth of its configurations.
"""

import copy
import gc
import itertools
import statistics
import time
from functools import partial
from typing import Callable, Dict

import torch
from compare_whole import with_liger
from kernel_time import seconds
from model_cases import PROMPT, model_of
from peers import install_fla_convolution, lift_fla_guard, share_autotuning
from runner import DEVICE, kernelized, run

MODELS = {  # the model's name in model_cases.FAMILIES, and in Liger
    "Qwen3-30B-A3B": ("whole Qwen3-30B-A3B", "qwen3_moe"),
    "Qwen3.5-9B": ("whole Qwen3.5-9B", "qwen3_5"),
}
ARGUMENTS = {
    "--model": {"nargs": "+", "choices": list(MODELS), "default": list(MODELS)},
    "--what": {"nargs": "+", "choices": ["first", "token"], "default": ["first", "token"]},
    "--batch": {"nargs": "+", "type": int, "default": [1, 16], "help": "of tokens"},
    "--peers": {"nargs": "+", "choices": ["compile", "liger"], "default": ["liger"]},
    "--without": {"nargs": "+", "default": [], "help": "sides that are left out"},
    "--layers": {"type": int, "help": "so many in place of all"},
    "--every": {"type": int, "default": 1},
}
LENGTH, TURNS = 512, 3
STATIC = ("ours", "compile")  # sides with a static cache
LONG = {True: (128, 16), False: (32, 8)}  # tokens of the two calls, with one and without


def sharing(model: torch.nn.Module) -> torch.nn.Module:
    """A model of its own modules, whose parameters and buffers are the model's."""
    kept = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})


def generate(model, ids: torch.Tensor, **words):
    """Keeps the model, which its generate does not."""
    return model.generate(ids, **words)


def sides(package, model, liger: str, options) -> Dict[str, Callable]:
    """generate of each side."""
    peers = options.peers
    model.generation_config.eos_token_id = None
    graphs, eager = sharing(model), sharing(model)
    kernelized(package, graphs, cuda_graphs=True)
    kernelized(package, eager)
    ways = {"ours": graphs, "ours, without graphs": eager, "transformers": model}
    found = {name: partial(generate, model) for name, model in ways.items()}
    if "liger" in peers:
        patched = sharing(model)
        try:
            around = with_liger(liger, patched)
            found["liger"] = lambda ids, **words: around(partial(generate, patched, ids, **words))()
        except Exception as why:  # it has no kernels for the family
            print("liger:", repr(why)[:300], flush=True)
    if "compile" in peers:
        found["compile"] = partial(generate, sharing(model))
    return {name: way for name, way in found.items() if name not in options.without}


def called(way: Callable, ids: torch.Tensor, new: int, **words) -> float:
    """Microseconds of a call."""
    words.update(do_sample=False, pad_token_id=0, eos_token_id=2**31, max_new_tokens=new)
    return seconds(partial(way, ids, **words)) * 1e6


def first_of(ids: torch.Tensor, name: str, way: Callable) -> float:
    return called(way, ids, 1)


def token_of(ids: torch.Tensor, caches: dict, name: str, way: Callable) -> float:
    """Microseconds of a token; `caches`: those of the sides with a static one."""
    long, short = LONG[name in STATIC]

    def call(new: int) -> float:
        if name not in caches:
            return called(way, ids, new)
        caches[name].reset()
        return called(way, ids, new, past_key_values=caches[name])

    return (call(long) - call(short)) / (long - short)


def caches_of(config, names) -> dict:
    from transformers import StaticCache

    most = LENGTH + LONG[True][0]
    return {n: StaticCache(config=config, max_cache_len=most) for n in names if n in STATIC}


def row_of(what: str, ways: Dict[str, Callable], clock: Callable):
    """The row of clock(name, way): the first call of each way, and the median of turns. A way that
    raises is left out. Each row is given before the slowest peer has begun, too."""
    first, turns, peak = {}, {}, {}

    def row() -> dict:
        us = {name: statistics.median(found) for name, found in turns.items()}
        return {"what": what, "us": us, "turns": turns, "peak_GiB": peak, "first_s": first}

    def attempt(names: list) -> None:
        for turn, name in itertools.product(range(TURNS + 1), names):
            if turn and name not in first:
                continue
            try:
                if not turn:
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                us = clock(name, ways[name])
                if not turn:
                    first[name] = time.perf_counter() - began
                    peak[name] = torch.cuda.max_memory_allocated() / 2**30
                else:
                    turns.setdefault(name, []).append(us)
            except Exception as why:
                print(f"{what}, {name}:", repr(why)[:300], flush=True)

    attempt([name for name in ways if name != "compile"])
    yield row()
    if "compile" in ways:
        attempt(["compile"])
        yield row()


@torch.no_grad()
def rows_of(package, name: str, options):
    family, liger = MODELS[name]
    fewer = {"num_hidden_layers": options.layers} if options.layers else {}
    model = model_of(family, device=DEVICE, **fewer)
    layers = model.config.num_hidden_layers
    title = f"{name}, {layers} layers"
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{title}: {parameters / 1e9:.2f} billion parameters", flush=True)
    ways = sides(package, model, liger, options)
    words = model.config.vocab_size
    ids = torch.randint(5, words, (1, PROMPT), device=DEVICE)
    prompts = {n: way for n, way in ways.items() if n not in ("ours, without graphs", "compile")}
    what = f"{title}, first token after a prompt of {PROMPT}"
    if "first" in options.what:
        yield from row_of(what, prompts, partial(first_of, ids))
    later = []
    for batch in options.batch if "token" in options.what else ():
        ids = torch.randint(5, words, (batch, LENGTH), device=DEVICE)
        clock = partial(token_of, ids, caches_of(model.config, ways))
        alone = "" if "transformers" in ways else ", on static caches alone"
        row = row_of(f"{title}, a token, batch {batch}{alone}", ways, clock)
        yield next(row)
        later.append(row)
    for row in later:
        yield from row


def rows(package, options):
    if "Qwen3.5-9B" in options.model:
        share_autotuning(0, options.every)
        lift_fla_guard()
        install_fla_convolution()
    for name in options.model:
        yield from rows_of(package, name, options)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__doc__, "published_models", rows, ARGUMENTS, merge=True)
