"""Whole models of FP8 checkpoints on a GPU: a prompt, an eager token, a token in a CUDA graph.

    python benchmarks/compare_fp8_models.py [--model llama qwen3_5] [--json FILE]

The models of compare_whole.py, random weights; every linear of their layers whose sizes are
multiples of 128 is an FP8Linear with block scales, as transformers makes it. `ours` is that model
kernelized, `ours, bf16` the one in bf16 kernelized, `transformers_fp8` the FP8 model untouched,
with compare_fp8.py's stand-in for the kernels that transformers loads from the Hub, for Llama
alone: for Qwen3.5 FLA would tune itself. Eager tokens are of 16 sequences, the fewest that
cuBLAS's product of FP8 blocks takes. `extra_mib` is what the prompt holds at its peak beyond the
weights, and `kernelize_mib` what kernelizing both models has allocated. Rows take the places of the
record's of the same name.
"""

import copy
import gc
from functools import partial

import torch
from compare_fp8 import PEER, in_fp8, stand_in_for_hub
from compare_generate import TURNS, decode_with_fla, graph_us
from kernel_time import in_turns, memory, wall
from model_cases import PROMPT, model_of, prompts, tokens
from runner import kernelized, relative_error, run

TITLES = {"llama": "Llama, 8 layers", "qwen3_5": "Qwen3.5, 16 layers"}
EAGER, GRAPHED = 16, (1, 64)  # sequences


def all_in_fp8(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares what is not in FP8."""
    memo = {id(p): p for p in model.parameters()}
    other = copy.deepcopy(model, memo)
    for parent in list(other.model.layers.modules()):
        for name, part in parent.named_children():
            if type(part) is torch.nn.Linear and not (part.weight.shape[0] % 128):
                setattr(parent, name, in_fp8(part))
    return other


def rows_of(package, name: str):
    bf16 = model_of(name, cast=True)
    bf16.generation_config.eos_token_id = None
    models = {"ours": all_in_fp8(bf16), "ours, bf16": bf16}
    if name == "llama":
        models[PEER] = copy.deepcopy(
            models["ours"], {id(p): p for p in models["ours"].parameters()}
        )
    before = torch.cuda.memory_allocated()
    for side in ("ours", "ours, bf16"):
        kernelized(package, models[side], cuda_graphs=True)
    kernelize_mib = (torch.cuda.memory_allocated() - before) / 2**20
    title, calls = TITLES[name], prompts(models)
    error = {n: call().double() for n, call in calls.items()}
    row = {"what": f"{title}, prompt of {PROMPT} tokens in FP8"}
    row["us"] = in_turns(calls, TURNS, wall)
    plain = error.pop("ours, bf16")
    row["from_bf16"] = {name: relative_error(y, plain) for name, y in error.items()}
    row["kernelize_mib"] = kernelize_mib
    row["extra_mib"] = {n: memory(call)[1] for n, call in calls.items()}
    yield row
    steps = tokens(models, "ours", EAGER)
    yield {
        "what": f"{title}, an eager token of {EAGER} sequences in FP8",
        "us": in_turns(steps, TURNS, wall),
    }
    for batch in GRAPHED:
        graphs = {n: partial(graph_us, models[n], batch) for n in ("ours", "ours, bf16")}
        yield {
            "what": f"{title}, a token's CUDA graph in FP8, batch {batch}",
            "us": in_turns(graphs, TURNS, lambda graph: graph()),
        }


@torch.no_grad()
def rows(package, options):
    decode_with_fla(package)
    stand_in_for_hub()
    for name in options.model:
        yield from rows_of(package, name)
        gc.collect()
        torch.cuda.empty_cache()


ARGUMENTS = {"--model": {"nargs": "+", "choices": TITLES, "default": list(TITLES)}}

if __name__ == "__main__":
    run(__doc__, "fp8_models", rows, ARGUMENTS, merge=True)
