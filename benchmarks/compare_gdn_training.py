"""A training step of a Gated DeltaNet layer, before and after kernelize, on a GPU.

    python benchmarks/compare_gdn_training.py [--json FILE]

The layer of Qwen3.5-4B (hidden 2560, 16/32 heads), bf16, one sequence of 8192 tokens: forward and
backward, all gradients. Before means transformers with FLA's kernels as in compare_models.py, the
guard of FLA's backward off as in compare_gdn_backward.py. The contenders take turns. Then the
gradient of the rule alone at the same heads, for which FLA's kernels are tuned by then:
gdn_backward_fla.json, beside the record of the layer.
"""

import argparse
import copy
import gc
import statistics
from pathlib import Path

import compare_gdn_backward
import torch
from compare_models import (
    LAYER,
    PROMPT,
    install_fla_convolution,
    randomize,
    relative_error,
)
from kernel_time import RESULTS, load_package, parse_on_gpu, save, share_autotuning, warm_up

WAYS = ("recompute", "saved", "fla")
RULE = [shape for shape in compare_gdn_backward.SHAPES if shape[1:3] == (16, 32)]


def layer():
    import fla.ops.common.chunk_o as guarded
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    guarded.TRITON_ABOVE_3_7_1 = True
    config = transformers.Qwen3_5TextConfig(**LAYER)
    with torch.device("cuda"):
        return randomize(modeling.Qwen3_5GatedDeltaNet(config, 0)).bfloat16().train()


def tensors():
    torch.manual_seed(0)
    shape = (1, PROMPT, LAYER["hidden_size"])
    x, dy = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16).unbind(0)
    return x.clone().requires_grad_(), dy


def step(module, x, dy):
    """Gradients of x and the parameters."""
    return torch.autograd.grad(module(x), [x, *module.parameters()], dy)


def memory(module, x, dy) -> dict:
    """MiB beyond the parameters and inputs: held between forward and backward, and at the peak."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = module(x)
    held = torch.cuda.memory_allocated() - before
    torch.autograd.grad(y, [x, *module.parameters()], dy)
    peak = torch.cuda.max_memory_allocated() - before
    return {"held_mib": held / 2**20, "peak_mib": peak / 2**20}


def measure(modules: dict) -> dict:
    from triton.testing import do_bench

    x, dy = tensors()
    gradients = {name: step(module, x, dy) for name, module in modules.items()}
    differences = [relative_error(a, b) for a, b in zip(*gradients.values())]
    del gradients
    times = {name: {"step_ms": [], "forward_ms": []} for name in modules}
    for _ in range(5):
        for name, module in modules.items():
            for what, call in (
                ("step_ms", lambda m=module: step(m, x, dy)),
                ("forward_ms", lambda m=module: m(x)),
            ):
                times[name][what].append(do_bench(call, warmup=10, rep=60, return_mode="median"))
    row = {"tokens": PROMPT, "largest_difference": max(differences)}
    for name, module in modules.items():
        row[name] = {what: statistics.median(t) for what, t in times[name].items()}
        row[name].update(memory(module, x, dy))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "gdn_layer_training.json")
    parser.add_argument("--compiled", action="store_true", help="warm nothing up before")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parse_on_gpu(parser)
    if options.warm:
        share_autotuning(*map(int, options.warm.split("/")))
    elif not options.compiled:
        warm_up(__file__)
    install_fla_convolution()
    before = layer()
    if options.warm:
        step(before, *tensors())
        leaves, outer = compare_gdn_backward.tensors(*RULE[0])
        compare_gdn_backward.backward(compare_gdn_backward.forward(None, "fla"), leaves, outer)()
        return
    package, after = load_package(), copy.deepcopy(before)
    print(package.kernelize(after, mode="training"))
    row = measure({"before": before, "after": after})
    for name in ("before", "after"):
        print(name, {key: round(value, 3) for key, value in row[name].items()})
    print(f"{row['before']['step_ms'] / row['after']['step_ms']:.2f} times as fast", row)
    save(options.json, [row])
    rows = [compare_gdn_backward.measure(package, *shape, WAYS) for shape in RULE]
    save(options.json.with_name("gdn_backward_fla.json"), rows)


if __name__ == "__main__":
    main()
