"""A token of transformers' generate on a static cache: eager, compiled, or a CUDA graph of ours.

    python benchmarks/compare_generate.py [--cases qwen:1 llama:1 qwen:64] [--without compile]
                                          [--wait-for FILE]
    python benchmarks/compare_generate.py --replay

Random weights, bf16, 128 tokens after a prompt of 512, greedy, all ways in one process and on the
same weights, plain transformers before ours. Its GDN layers decode with FLA's kernels; prompts, for
which FLA would tune itself for minutes, are computed by ours: no token's time has a part in them. A
token is the median of the times between two calls of a stopping criterion, inside generate.
--wait-for compiles all there is, and begins to measure once FILE exists: for a GPU that others use
meanwhile. What is said of first tokens then leaves compiling out.
--replay compares ours with ours that write states of Gated DeltaNet once in 16 tokens, in turns,
and nothing else: graphed tokens.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Optional

import torch
from compare_models import install_fla_convolution, randomize
from compare_whole import LLAMA, QWEN
from kernel_time import RESULTS, load_package, merged, parse_on_gpu, save, wait_for

PROMPT, NEW, EAGER = 512, 128, 48  # tokens; EAGER of the slow ways
TURNS = 3  # of --replay
MODELS = {  # with the vocabularies of the models whose layers these are
    "qwen": ("Qwen3.5, 16 layers", "qwen3_5_text", {**QWEN, "vocab_size": 248320}),
    "llama": ("Llama, 8 layers", "llama", LLAMA),
}


def decode_with_fla(package) -> None:
    """Before transformers' models are imported, which ask for these functions by name."""
    import fla.ops.gated_delta_rule as rules

    def convolution(hidden_states, weight, bias=None, activation=None):
        return package.causal_conv1d_fn(hidden_states, weight, bias, activation)

    install_fla_convolution()
    sys.modules["causal_conv1d"].causal_conv1d_fn = convolution
    rules.chunk_gated_delta_rule = package.chunk_gated_delta_rule


def model_of(name: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    _, family, sizes = MODELS[name]
    config = AutoConfig.for_model(family, **sizes)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return randomize(model).eval()


def clock(stop: int):
    """A stopping criterion that knows when it was called, and stops at this call."""
    from transformers import StoppingCriteria

    class Clock(StoppingCriteria):
        def __init__(self):
            self.times = [time.perf_counter()]

        def __call__(self, input_ids, scores, **kwargs):
            self.times.append(time.perf_counter())
            done = len(self.times) > stop
            return torch.full((len(input_ids),), done, device=input_ids.device)

    return Clock()


def generate(model, batch: int, new: int, prompt: int = PROMPT, **options) -> list:
    """Seconds from the call of generate to each token; the cache is one for NEW of them."""
    torch.manual_seed(0)
    ids = torch.randint(1, 1000, (batch, prompt), device="cuda")
    torch.cuda.synchronize()
    ticks = clock(new)
    model.generate(
        ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, stopping_criteria=[ticks],
        cache_implementation="static", **options,
    )  # fmt: skip
    torch.cuda.synchronize()
    return [t - ticks.times[0] for t in ticks.times[1:]]


def compile_all(package, model, batch: int) -> None:
    package.kernelize(model, cuda_graphs=True)
    for prompt in (PROMPT, PROMPT // 2):
        generate(model, batch + 2 * (prompt < PROMPT), 4, prompt)
    package.restore(model)
    generate(model, batch, 4, disable_compile=True)
    generate(model, batch, 4)


@torch.no_grad()
def replayed(package, name: str, batch: int, begin: Optional[Path] = None) -> list:
    """Tokens in CUDA graphs whose layers write states at every token, and once in 16."""
    title, model, times = f"{MODELS[name][0]}, batch {batch}", model_of(name), {}
    ways = {"ours": 0, "ours, replay": 16}

    def turn(new: int) -> None:
        for shown, rows in ways.items():
            package.kernelize(model, cuda_graphs=True, replay=rows)
            ticks = generate(model, batch, new)
            steps = [b - a for a, b in zip(ticks[8:], ticks[9:])]
            times.setdefault(shown, []).append(statistics.mean(steps) * 1e6)
            package.restore(model)

    turn(12)
    if begin is not None:
        wait_for(begin)
    times.clear()
    for _ in range(TURNS):
        turn(NEW)
    us = {shown: statistics.median(found) for shown, found in times.items()}
    row = {"what": f"{title}, a token", "us": us, "turns": times}
    print(row, flush=True)
    return [row]


def measured(model, batch: int, new: int = NEW, **options) -> dict:
    """One way to decode: when its first and fifth token came, a token's time, and memory."""
    start = generate(model, batch, 16, **options)
    times = generate(model, batch, new, **options)
    steps = [b - a for a, b in zip(times[8:], times[9:])]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    generate(model, batch, 16, **options)
    return {
        "us": statistics.median(steps) * 1e6,
        "first_s": start[0],
        "fifth_s": start[4],
        "again_fifth_s": times[4],
        "reserved_mib": (torch.cuda.max_memory_reserved() - before) / 2**20,
    }


@torch.no_grad()
def compare(package, name: str, batch: int, without, begin: Optional[Path] = None) -> list:
    title = f"{MODELS[name][0]}, batch {batch}"
    model = model_of(name)
    if begin is not None:
        compile_all(package, model, batch)
        wait_for(begin)

    def way(shown: str, *arguments, **options) -> dict:
        found = measured(model, batch, *arguments, **options)
        print(f"{title}, {shown:13}", json.dumps(found), flush=True)
        return found

    ours, plain = {}, {}
    if "compile" not in without:
        ours["compile"] = way("compile")
        torch.compiler.reset()
        del model._compiled_call
    if "transformers" not in without:
        plain["transformers"] = way("transformers", EAGER, disable_compile=True)
    print(package.kernelize(model, cuda_graphs=True), flush=True)
    ours["ours"] = way("ours")
    plain["ours"] = way("ours, eager", EAGER, disable_compile=True)
    rows = []
    for what, ways in (("a token", ours), ("an eager token", plain)):
        times = {shown: facts["us"] for shown, facts in ways.items()}
        rows.append({"what": f"{title}, {what}", "us": times, "more": ways})
    for again in ("first", "again"):  # of another batch and length
        other = generate(model, batch + 2, 8, PROMPT // 2)
        rows[0][f"another_batch_and_length_{again}_fifth_s"] = other[4]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", help="model:batch")
    parser.add_argument("--without", nargs="+", choices=["compile", "transformers"], default=[])
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--wait-for", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parse_on_gpu(parser)
    cases, record = ["qwen:1", "llama:1", "qwen:64"], RESULTS / "generate.json"
    if arguments.replay:
        cases, record = ["qwen:64", "qwen:256"], RESULTS / "replay_models.json"
    record = arguments.json or record
    package = load_package()
    if not arguments.replay:
        decode_with_fla(package)
    for case in arguments.cases or cases:
        name, batch = case.split(":")
        if arguments.replay:
            rows = replayed(package, name, int(batch), arguments.wait_for)
        else:
            rows = compare(package, name, int(batch), arguments.without, arguments.wait_for)
        save(record, merged(record, rows))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
