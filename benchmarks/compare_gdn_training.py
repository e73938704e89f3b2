"""A training step of Qwen3.5-4B's Gated DeltaNet layer, before and after kernelize, with memory.

    python benchmarks/compare_gdn_training.py [--compiled] [--json FILE]     on a GPU

Hidden 2560, 16 and 32 heads of 128, 8192 tokens, bf16; a step is forward and backward, all
gradients. Before means transformers with FLA's kernels as in compare_models.py, the guard of FLA's
backward off as in compare_gdn_backward.py. The contenders take turns.
"""

import copy
import gc
from functools import partial

import torch
from kernel_time import memory, milliseconds
from model_cases import LAYER, PROMPT, randomize
from peers import install_fla_convolution, lift_fla_guard, warm_up
from runner import kernelized, relative_error, run


def layer():
    lift_fla_guard()
    install_fla_convolution()
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    config = transformers.Qwen3_5TextConfig(**LAYER)
    with torch.device("cuda"):
        return randomize(modeling.Qwen3_5GatedDeltaNet(config, 0)).bfloat16().train()


def tensors():
    torch.manual_seed(0)
    shape = (1, PROMPT, LAYER["hidden_size"])
    x, dy = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16).unbind(0)
    return x.clone().requires_grad_(), dy


def gradients(module, x, dy, y):
    """Of x and the parameters, y being module(x)."""
    return torch.autograd.grad(y, [x, *module.parameters()], dy)


def step(module, x, dy):
    return gradients(module, x, dy, module(x))


def rows(package, options):
    if not options.compiled:
        warm_up()
    before = layer()
    modules = {"before": before, "after": copy.deepcopy(before)}
    kernelized(package, modules["after"], mode="training")
    x, dy = tensors()
    found = [step(module, x, dy) for module in modules.values()]
    row = {"tokens": PROMPT, "largest_difference": max(map(relative_error, *found))}
    del found
    calls = {}
    for name, module in modules.items():
        calls[name, "step_ms"] = lambda m=module: step(m, x, dy)
        calls[name, "forward_ms"] = lambda m=module: m(x)
    times = milliseconds(calls, rounds=5, rep=60)
    for name, module in modules.items():
        row[name] = {what: times[name, what] for what in ("step_ms", "forward_ms")}
        gc.collect()
        held, peak = memory(partial(module, x), partial(gradients, module, x, dy))
        row[name].update(held_mib=held, peak_mib=peak)
    yield row


if __name__ == "__main__":
    run(__doc__, "gdn_layer_training", rows, warm=lambda options: step(layer(), *tensors()))
