"""Training steps of a small model, where the host is slower than the GPU, beside transformers.

    python benchmarks/small_training.py [--rounds 40] [--adamw] [--seconds 90] [--json FILE]
    python benchmarks/small_training.py --tiny --device cpu --rounds 2 --json FILE

A Llama of SmolLM2-135M's sizes and a Qwen3 of Qwen3-0.6B's, with random weights, take steps of
AdamW on 4 x 1024 tokens: all of their weights in fp32 under autocast, or in bf16, and LoRA's
adapters (the peft package) on frozen weights in bf16, under autocast and without. The models take
each step in turns, from an idle GPU to an idle GPU: the record has the medians, the memory of the
device that each side takes for its steps, without its weights, and what it keeps between steps.
"""

import copy
import gc
from functools import partial
from typing import Callable

import torch
from compare_lora import MODELS
from kernel_time import in_turns, seconds
from real_model import TINY, adapted
from runner import SECONDS, run

# what is trained: sizes of compare_lora.py, the dtype of the weights, under autocast, with adapters
SMALL, QWEN = "SmolLM2-135M", "Qwen3-0.6B"
WAYS = {
    "LoRA on bf16": (SMALL, torch.bfloat16, False, True),
    f"{QWEN}, LoRA on bf16": (QWEN, torch.bfloat16, False, True),
    "AdamW, weights in bf16": (SMALL, torch.bfloat16, False, False),
    f"{QWEN}, AdamW, weights in bf16": (QWEN, torch.bfloat16, False, False),
    "LoRA on bf16 under autocast": (SMALL, torch.bfloat16, True, True),
    "AdamW, weights in fp32 under autocast": (SMALL, torch.float32, True, False),
    f"{QWEN}, AdamW, weights in fp32 under autocast": (QWEN, torch.float32, True, False),
}
SIDES = {"ours": {}, "ours, training_graphs": {"training_graphs": True}, "modeling": None}
WARM = 4  # steps; the third captures graphs


def step_of(model, ids: torch.Tensor, mixed: bool) -> Callable[[], None]:
    """A training step of a model."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=1e-5, fused=ids.is_cuda)

    def step():
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=mixed):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def reserved(device: str) -> float:
    """MiB of the device that torch has, without what it could give back."""
    if device == "cpu":
        return 0.0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**20


def warm(step: Callable, device: str) -> dict:
    """MiB that first steps take at most, and that they leave taken."""
    before = reserved(device)
    for _ in range(WARM):
        step()
    after = reserved(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_reserved() / 2**20 if device == "cuda" else 0.0
    return {"in": peak - before, "between": after - before}


ARGUMENTS = {
    "--rounds": {"type": int, "default": 40},
    "--adamw": {"action": "store_true", "help": "without LoRA"},
    **SECONDS,
    "--tiny": {"action": "store_true", "help": "a model of two small layers"},
    "--device": {"choices": ("cpu", "cuda"), "default": "cuda"},
}


def model_of(name: str, tiny: bool, device: str):
    import transformers

    kind, sizes, _ = MODELS[name]
    sizes = {**TINY, **({"head_dim": 16} if kind == "Qwen3" else {})} if tiny else sizes
    with torch.device(device):
        config = getattr(transformers, f"{kind}Config")(**sizes)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def rows(package, options):
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    for what, (name, dtype, mixed, adapters) in WAYS.items():
        if adapters and options.adamw:
            continue
        base, steps, memory = model_of(name, options.tiny, options.device), {}, {}
        tokens = (2, 32) if options.tiny else (4, 1024)
        ids = torch.randint(base.config.vocab_size, tokens).to(options.device)
        for side, how in SIDES.items():
            model = copy.deepcopy(base).to(dtype)
            model = adapted(model) if adapters else model
            if how is not None:
                print(package.kernelize(model, mode="training", **how), flush=True)
            steps[side] = step_of(model, ids, mixed)
            memory[side] = warm(steps[side], options.device)
        us = in_turns(steps, options.rounds, lambda step: seconds(step, synchronize) * 1e6)
        row = {"what": what, "us": us}
        for when in ("in", "between"):
            row[f"mib_{when}_steps"] = {side: round(x[when]) for side, x in memory.items()}
        yield row
        del base, model, steps
        reserved(options.device)


main = partial(run, __doc__, "small_training", rows, ARGUMENTS, merge=True)

if __name__ == "__main__":
    main()
