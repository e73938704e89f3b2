"""Whole models at the sizes of published checkpoints, all of their layers, on one GPU.

    python benchmarks/compare_published.py [--model Qwen3-30B-A3B Qwen3.5-9B] [--batch 1 16]
                                           [--what first token] [--peers liger compile]
                                           [--every N] [--json FILE]

Random weights in bf16, made on the GPU. Every side has the same weights, in the same memory, and
generates greedily: transformers on its dynamic cache, with FLA's kernels in Gated DeltaNet layers;
the same with Liger's kernels patched by hand; ours without CUDA graphs and with them; and
transformers on its static cache with its own torch.compile, last, as it takes longest to start.

The first token is generate(max_new_tokens=1) after a prompt of 8192 tokens: the first call, which
compiles, and the median of three more in turns. A token is what a call for 32 new tokens takes
longer than one for 8, divided by 24, after a prompt of 512: the median of three such pairs. Peak
memory is that of the longer call, with the weights. --every has FLA try every Nth of its
configurations.
"""

import copy
import gc
import itertools
import statistics
from functools import partial
from typing import Callable, Dict

import torch
from compare_whole import with_liger
from kernel_time import seconds
from model_cases import PROMPT, model_of
from peers import install_fla_convolution, lift_fla_guard, share_autotuning
from runner import DEVICE, run

MODELS = {  # the model's name in model_cases.FAMILIES, and in Liger
    "Qwen3-30B-A3B": ("whole Qwen3-30B-A3B", "qwen3_moe"),
    "Qwen3.5-9B": ("whole Qwen3.5-9B", "qwen3_5"),
}
ARGUMENTS = {
    "--model": {"nargs": "+", "choices": list(MODELS), "default": list(MODELS)},
    "--what": {"nargs": "+", "choices": ["first", "token"], "default": ["first", "token"]},
    "--batch": {"nargs": "+", "type": int, "default": [1, 16], "help": "of tokens"},
    "--peers": {"nargs": "+", "choices": ["compile", "liger"], "default": ["liger"]},
    "--every": {"type": int, "default": 1},
}
LENGTH, NEW, SHORT, TURNS = 512, 32, 8, 3


def sharing(model: torch.nn.Module) -> torch.nn.Module:
    """A model of its own modules, whose parameters and buffers are the model's."""
    kept = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})


def generate(model, ids: torch.Tensor, **words):
    """Keeps the model, which its generate does not."""
    return model.generate(ids, **words)


def sides(package, model, liger: str, peers: list) -> Dict[str, Callable]:
    """generate of each side."""
    model.generation_config.eos_token_id = None
    graphs, eager = sharing(model), sharing(model)
    print(package.kernelize(graphs, cuda_graphs=True), flush=True)
    package.kernelize(eager)
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
        found["compile"] = partial(generate, sharing(model), cache_implementation="static")
    return found


def called(way: Callable, ids: torch.Tensor, new: int) -> float:
    """Microseconds of a call."""
    words = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 2**31, "max_new_tokens": new}
    return seconds(partial(way, ids, **words)) * 1e6


def first_of(ids: torch.Tensor, way: Callable) -> float:
    return called(way, ids, 1)


def token_of(ids: torch.Tensor, way: Callable) -> float:
    return (called(way, ids, NEW) - called(way, ids, SHORT)) / (NEW - SHORT)


def peak_GiB(call: Callable) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() / 2**30


def row_of(what: str, ways: Dict[str, Callable], clock: Callable, again: Callable):
    """The row of a clock: the first call of each way, and the median of turns. A way that raises
    is left out. Each row is given before the slowest peer has begun, too."""
    first, turns, peak = {}, {}, {}

    def row() -> dict:
        us = {name: statistics.median(found) for name, found in turns.items()}
        more = {"first_s": first} if clock.func is first_of else {}
        return {"what": what, "us": us, "turns": turns, "peak_GiB": peak, **more}

    def attempt(names: list) -> None:
        for turn, name in itertools.product(range(TURNS + 1), names):
            if turn and name not in first:
                continue
            try:
                us = clock(ways[name])
                if not turn:
                    first[name] = us / 1e6
                    peak[name] = peak_GiB(partial(again, ways[name]))
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
    model = model_of(family, device=DEVICE)
    layers = model.config.num_hidden_layers
    title = f"{name}, {layers} layers"
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{title}: {parameters / 1e9:.2f} billion parameters", flush=True)
    ways = sides(package, model, liger, options.peers)
    words = model.config.vocab_size
    ids = torch.randint(5, words, (1, PROMPT), device=DEVICE)
    prompts = {n: way for n, way in ways.items() if n not in ("ours, without graphs", "compile")}
    what = f"{title}, first token after a prompt of {PROMPT}"
    if "first" in options.what:
        yield from row_of(what, prompts, partial(first_of, ids), partial(first_of, ids))
    later = []
    for batch in options.batch if "token" in options.what else ():
        ids = torch.randint(5, words, (batch, LENGTH), device=DEVICE)
        again = partial(called, ids=ids, new=NEW)
        row = row_of(f"{title}, a token, batch {batch}", ways, partial(token_of, ids), again)
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
