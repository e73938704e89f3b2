"""A Gated DeltaNet layer and whole models, before and after kernelize, on a GPU.

    python benchmarks/compare_models.py [--layer] [--model] [--json FILE]
    python benchmarks/compare_models.py --mixtures [--json FILE]        mixtures of experts

Before means transformers with FLA's kernels: its gated delta rule, which transformers calls where
`fla` is installed, and its Triton convolution, put where transformers looks for the CUDA package
causal_conv1d. Both run in one process, in turns.
"""

import copy
from functools import partial

import torch
from kernel_time import graphed, in_turns, kernels_of, wall
from model_cases import LAYER, PROMPT, model_of, prompts, tokens
from peers import install_fla_convolution, warm_up
from runner import kernelized, load_package, relative_error, run

KINDS = {  # option -> models, and the batches of their tokens
    "layer": (("layer",), (1, 64, 256)),
    "model": (("model",), (1, 64)),
    "mixtures": (("Qwen3.5-35B-A3B", "Qwen3-30B-A3B"), (1,)),
}
ARGUMENTS = {f"--{kind}": {"action": "store_true", "help": f"the {kind} alone"} for kind in KINDS}


def both(package, name: str) -> dict:
    before = model_of(name)
    after = copy.deepcopy(before)
    assert kernelized(package, after).served
    return {"before": before, "after": after}


def layer_calls(layers: dict, batches):
    """(what, {"before": call, "after": call}) of a layer, made as they are asked for."""
    import transformers

    config, width = transformers.Qwen3_5TextConfig(**LAYER), LAYER["hidden_size"]

    def prompt(layer, x):
        cache = transformers.DynamicCache(config=config)
        return layer(x, cache_params=cache), cache

    for batch in batches:
        x = torch.randn(batch, 64, width, device="cuda", dtype=torch.bfloat16)
        # both go on from the states that ours leaves: FLA would tune itself for each batch
        caches = {name: prompt(layers["after"], x)[1] for name in layers}
        calls = {n: partial(m, x[:, :1], cache_params=caches[n]) for n, m in layers.items()}
        yield f"layer: token, batch {batch}", calls
    x = torch.randn(1, PROMPT, width, device="cuda", dtype=torch.bfloat16)
    yield f"layer: prompt of {PROMPT}", {n: lambda m=m: prompt(m, x)[0] for n, m in layers.items()}


def model_calls(name: str, models: dict, batches):
    """The same of a whole model; a token is a greedy step on static states."""
    yield f"{name}: prompt of {PROMPT}", prompts(models)
    for batch in batches:
        yield f"{name}: token, batch {batch}", tokens(models, "after", batch)
    if name != "model":
        width = models["before"].config.hidden_size
        x = torch.randn(1, 1, width, device="cuda", dtype=torch.bfloat16)
        calls = {n: partial(m.model.layers[0].mlp, x) for n, m in models.items()}
        yield f"{name}: block of experts, 1 token", calls


def calls_of(package, kinds: list):
    for names, batches in map(KINDS.get, kinds):
        for name in names:
            pair = both(package, name)
            if name == "layer":
                yield from layer_calls(pair, batches)
            else:
                yield from model_calls(name, pair, batches)


@torch.no_grad()
def measured(what: str, calls: dict) -> dict:
    row, outs = {"what": what}, [calls[side]() for side in ("after", "before")]
    row["difference"] = relative_error(*outs)
    row["eager_us"] = in_turns(calls, 3, wall)
    if "token" in what:
        graphs = {name: graphed(call) for name, call in calls.items()}
        row["graph_us"] = in_turns(graphs, 3, wall)
    kernels = {name: kernels_of(call) for name, call in calls.items()}
    row["launches"] = {
        side: sum(not name.startswith("Memcpy HtoD") for name, _ in found)
        for side, found in kernels.items()
    }
    return row


def chosen(options) -> list:
    return [kind for kind in KINDS if getattr(options, kind)] or ["layer", "model"]


@torch.no_grad()
def warm(options) -> None:
    install_fla_convolution()
    for _, calls in calls_of(load_package(), chosen(options)):
        for call in calls.values():
            call()


@torch.no_grad()
def rows(package, options):
    if not (options.mixtures or options.compiled):  # one process fills a good part of the memory
        warm_up()
    install_fla_convolution()
    for what, calls in calls_of(package, chosen(options)):
        yield measured(what, calls)


def record(options) -> str:
    return "mixtures" if chosen(options) == ["mixtures"] else "models"


if __name__ == "__main__":
    run(__doc__, record, rows, ARGUMENTS, warm)
