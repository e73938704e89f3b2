"""A token of transformers' generate on a static cache: eager, compiled, or a CUDA graph of ours.

    python benchmarks/compare_generate.py [--cases qwen:1 llama:1 qwen:64] [--without compile]
                                          [--wait-for FILE]
    python benchmarks/compare_generate.py --loop | --plain | --replay | --chosen

Random weights, bf16, 128 tokens after a prompt of 512, greedy, all ways in one process and on the
same weights, plain transformers before ours. Its GDN layers decode with FLA's kernels; prompts, for
which FLA would tune itself for minutes, are computed by ours: no token's time has a part in them. A
token is what a generate of 128 tokens takes longer than one of 16, by their number: the median of
several such pairs. Sequences may end by a token, which none of them meets.
--wait-for compiles all there is, and begins to measure once FILE exists: for a GPU that others use
meanwhile. What is said of first tokens then leaves compiling out.
--loop compares graphed tokens in transformers' own loop, which waits for the GPU in each of them,
with those in ours, in turns, and with the graph by itself.
--plain compares whole calls of generate without a word about caches, prompt and capture included:
transformers, kernelized, and with CUDA graphs, which then takes a static cache. Cases name also the
length of the prompt and the number of new tokens.
--replay compares ours with ours that write states of Gated DeltaNet once in 16 tokens, in turns,
and nothing else: graphed tokens.
--chosen compares tokens that the graph chooses with tokens that transformers' loop chooses of the
graph's logits, in turns: greedy, drawn (temperature .8, top-k 50, top-p .9), drawn without a top-k,
and greedy after a least number of new tokens.
"""

import gc
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, Optional

import model_cases
import torch
from kernel_time import seconds
from peers import install_fla_convolution, thin_autotuning
from runner import DEVICE, kernelized, run, wait_for

PROMPT, NEW, EAGER = 512, 128, 48  # tokens; EAGER of the slow ways
SHORT = 16  # tokens of the calls whose time is subtracted
TURNS = 5
MODELS = {  # with the vocabularies of the models whose layers these are
    "qwen": ("Qwen3.5, 16 layers", "qwen3_5", {"vocab_size": 248320}),
    "llama": ("Llama, 8 layers", "llama", {}),
    "llama32": ("Llama, 32 layers", "llama", {"num_hidden_layers": 32}),
    "kimi": ("Kimi Linear, 8 layers", "kimi_linear", {}),
    "moe": ("Qwen3.5-35B-A3B, 8 layers", "Qwen3.5-35B-A3B", {"vocab_size": 248320}),
}
KINDS = {  # option -> record and cases; without one, the first
    "": ("generate", ["qwen:1", "llama:1", "qwen:64"]),
    "loop": ("generate_loop", ["qwen:1", "llama:1"]),
    "plain": ("generate_plain", ["qwen:1:512:128", "llama:1:512:128", "llama:1:8192:32"]),
    "replay": ("replay_models", ["qwen:64", "qwen:256"]),
    "chosen": ("generate_chosen", ["qwen:1", "llama:1", "llama:64"]),
}
ARGUMENTS = {
    "--cases": {"nargs": "+", "help": "model:batch"},
    "--without": {"nargs": "+", "choices": ["compile", "transformers"], "default": []},
    **{f"--{kind}": {"action": "store_true"} for kind in KINDS if kind},
    "--wait-for": {"type": Path},
}


def decode_with_fla(package) -> None:
    """Before transformers' models are imported, which ask for these functions by name. Prompts are
    no token's: their convolution is ours, and FLA tries two configurations of each kernel."""

    def convolution(hidden_states, weight, bias=None, activation=None):
        return package.causal_conv1d_fn(hidden_states, weight, bias, activation)

    install_fla_convolution(convolution)
    thin_autotuning(2)


def model_of(name: str):
    _, family, sizes = MODELS[name]
    model = model_cases.model_of(family, device=DEVICE, **sizes)
    model.generation_config.eos_token_id = None
    return model


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


def prompt_of(batch: int, length: int = PROMPT) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(1, 1000, (batch, length), device=DEVICE)


def generate(model, batch: int, new: int, prompt: int = PROMPT, **options) -> list:
    """Seconds from the call of generate to each token; the cache is one for NEW of them. The
    criterion that knows them makes it transformers' own loop."""
    ids = prompt_of(batch, prompt)
    torch.cuda.synchronize()
    ticks = clock(new)
    model.generate(
        ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, stopping_criteria=[ticks],
        cache_implementation="static", **options,
    )  # fmt: skip
    torch.cuda.synchronize()
    return [t - ticks.times[0] for t in ticks.times[1:]]


def token_us(way: Callable, batch: int, new: int = NEW, **options) -> float:
    """Microseconds of a token, by two calls of a way, which is called as generate is."""
    ids = prompt_of(batch)
    words = {"do_sample": False, "pad_token_id": 0, "cache_implementation": "static", **options}
    words["eos_token_id"] = 2**31  # beyond any vocabulary
    # in this order, so that both have a cache of the same length
    long, short = (seconds(partial(way, ids, max_new_tokens=n, **words)) for n in (new, SHORT))
    return (long - short) / (new - SHORT) * 1e6


def in_turns(
    ways: Dict[str, Callable], begin: Optional[Path] = None, turns: Optional[int] = None
) -> Dict[str, List[float]]:  # fmt: skip
    """What each way gives in each turn but the first, which compiles. A capture collects garbage,
    which takes the longer the more objects there are: those of before are left out of it."""
    found: Dict[str, List[float]] = {name: [] for name in ways}
    for turn in range((turns or TURNS) + 1):
        if turn == 1:
            gc.collect()
            gc.freeze()
            wait_for(begin)
        for name, way in ways.items():
            found[name].append(way())
    gc.unfreeze()
    return {name: times[1:] for name, times in found.items()}


def row_of(name: str, batch: int, turns: Dict[str, List[float]]) -> dict:
    us = {way: statistics.median(times) for way, times in turns.items()}
    return {"what": f"{MODELS[name][0]}, batch {batch}, a token", "us": us, "turns": turns}


def graph_us(model, batch: int) -> float:
    """Microseconds of a replay of a token's graph among others."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
    model.generate(
        prompt_of(batch), past_key_values=cache, max_new_tokens=SHORT, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    step = model.get_compiled_call.steps[cache]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    marks[0].record()
    for _ in range(NEW - SHORT):  # there is a slot for each
        step.graph.replay()
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) / (NEW - SHORT) * 1e3


@torch.no_grad()
def looped(package, name: str, batch: int, begin: Optional[Path] = None) -> list:
    """Graphed tokens in our loop, in one that waits for each of them, and by themselves."""
    model = model_of(name)
    kernelized(package, model, cuda_graphs=True)
    waiting = type(model).generate.__get__(model)
    ways = {
        "ours": lambda: token_us(model.generate, batch),
        "ours, waiting": lambda: token_us(waiting, batch),
        "graph": lambda: graph_us(model, batch),
    }
    return [row_of(name, batch, in_turns(ways, begin))]


CHOSEN = {  # how tokens are chosen
    "greedy": {},
    "drawn": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "drawn without a top-k": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9},
    "greedy, least": {"min_new_tokens": SHORT // 2},
}


@torch.no_grad()
def chosen(package, name: str, batch: int, begin: Optional[Path] = None) -> list:
    """Tokens that the graph chooses, and those that the loop chooses of the graph's logits."""
    model = model_of(name)
    kernelized(package, model, cuda_graphs=True)
    late = sys.modules[f"{package.__name__}.decoding.late"]
    hands_on = late.hands_on

    def way(inside: bool, **options) -> float:
        late.hands_on = hands_on if inside else lambda loop: False
        gc.collect()
        try:
            return token_us(model.generate, batch, **options)
        finally:
            late.hands_on = hands_on

    ways = {}
    for what, options in CHOSEN.items():
        ways[what] = partial(way, True, **options)
        ways[f"{what}, by the loop"] = partial(way, False, **options)
    ways["graph"] = lambda: graph_us(model, batch)
    way(True)  # the first call of a turn is not to free what another kind of call has left
    return [row_of(name, batch, in_turns(ways, begin))]


@torch.no_grad()
def plainly(package, name: str, batch: int, prompt: int, new: int) -> list:
    """generate as people write it."""
    model, ids = model_of(name), prompt_of(batch, prompt)
    words = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 2**31, "max_new_tokens": new}

    def way(serve: Callable) -> float:
        package.restore(model)
        serve(model)
        return seconds(partial(model.generate, ids, **words)) * 1e6

    ways = {
        "ours": lambda: way(partial(kernelized, package, cuda_graphs=True)),
        "ours, eager": lambda: way(partial(kernelized, package)),
        "transformers": lambda: way(lambda model: None),
    }
    row = row_of(name, batch, in_turns(ways))
    row["what"] = f"{MODELS[name][0]}, batch {batch}, prompt of {prompt} and {new} tokens"
    return [row]


def compile_all(package, model, batch: int) -> None:
    kernelized(package, model, cuda_graphs=True)
    for prompt in (PROMPT, PROMPT // 2):
        generate(model, batch + 2 * (prompt < PROMPT), 4, prompt)
    package.restore(model)
    generate(model, batch, 4, disable_compile=True)
    generate(model, batch, 4)


@torch.no_grad()
def replayed(package, name: str, batch: int, begin: Optional[Path] = None) -> list:
    """Tokens in CUDA graphs whose layers write states at every token, and once in 16."""
    model = model_of(name)

    def way(rows: int) -> float:
        kernelized(package, model, cuda_graphs=True, replay=rows)
        return token_us(model.generate, batch)

    ways = {"ours": lambda: way(0), "ours, replay": lambda: way(16)}
    return [row_of(name, batch, in_turns(ways, begin))]


def measured(model, batch: int, new: int = NEW, **options) -> dict:
    """One way to decode: when its first and fifth token came, a token's time, and memory."""
    start = generate(model, batch, SHORT, **options)
    times = generate(model, batch, SHORT, **options)
    turns = in_turns({"": lambda: token_us(model.generate, batch, new, **options)})[""]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    generate(model, batch, SHORT, **options)
    return {
        "us": statistics.median(turns),
        "turns": turns,
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
        print(f"{title}, {shown:13}", found, flush=True)
        return found

    ours, plain = {}, {}
    if "compile" not in without:
        ours["compile"] = way("compile")
        torch.compiler.reset()
        del model._compiled_call
    if "transformers" not in without:
        plain["transformers"] = way("transformers", EAGER, disable_compile=True)
    kernelized(package, model, cuda_graphs=True)
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


def kind_of(options) -> str:
    found = [kind for kind in KINDS if kind and getattr(options, kind)]
    if len(found) > 1:
        raise SystemExit(f"not together: {', '.join(found)}")
    return found[0] if found else ""


def rows(package, options):
    kind, begin = kind_of(options), options.wait_for
    if kind not in ("loop", "replay", "chosen"):
        decode_with_fla(package)
    for case in options.cases or KINDS[kind][1]:
        name, batch, *lengths = case.split(":")
        found = package, name, int(batch)
        if kind == "plain":
            yield from plainly(*found, *map(int, lengths))
        elif kind:
            yield from {"loop": looped, "replay": replayed, "chosen": chosen}[kind](*found, begin)
        else:
            yield from compare(*found, options.without, begin)
        gc.collect()
        torch.cuda.empty_cache()


main = partial(
    run, __doc__, lambda options: KINDS[kind_of(options)][0], rows, ARGUMENTS, merge=True
)

if __name__ == "__main__":
    main()
