"""Training steps of a small model, where the host is slower than the GPU, beside transformers.

    python benchmarks/small_training.py [--rounds 40] [--adamw] [--json FILE]
    python benchmarks/small_training.py --tiny --device cpu --rounds 2 --json FILE

A Llama of SmolLM2-135M's sizes with random weights takes steps of AdamW on 4 x 1024 tokens: all of
its weights in fp32 under autocast, or in bf16, and LoRA's adapters (the peft package) on frozen
weights in bf16, under autocast and without. Of Qwen3-0.6B's sizes, all weights are trained. Both
models take each step in turns, from an idle GPU to an idle GPU; the record has the medians.
"""

import copy
from functools import partial
from typing import Callable, Dict

import torch
from compare_lora import MODELS
from kernel_time import in_turns, seconds
from real_model import TINY, adapted
from runner import run

# what is trained: sizes of compare_lora.py, the dtype of the weights, under autocast, with adapters
SMALL, QWEN = "SmolLM2-135M", "Qwen3-0.6B"
WAYS = {
    "AdamW, weights in fp32 under autocast": (SMALL, torch.float32, True, False),
    "AdamW, weights in bf16": (SMALL, torch.bfloat16, False, False),
    "LoRA on bf16 under autocast": (SMALL, torch.bfloat16, True, True),
    "LoRA on bf16": (SMALL, torch.bfloat16, False, True),
    f"{QWEN}, AdamW, weights in fp32 under autocast": (QWEN, torch.float32, True, False),
    f"{QWEN}, AdamW, weights in bf16": (QWEN, torch.bfloat16, False, False),
}


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


def times(steps: Dict[str, Callable], rounds: int, synchronize: Callable) -> Dict[str, float]:
    """Microseconds of each step."""
    for side in list(steps) * 4:
        steps[side]()
    return in_turns(steps, rounds, lambda step: seconds(step, synchronize) * 1e6)


ARGUMENTS = {
    "--rounds": {"type": int, "default": 40},
    "--adamw": {"action": "store_true", "help": "without LoRA"},
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
        base, steps = model_of(name, options.tiny, options.device), {}
        tokens = (2, 32) if options.tiny else (4, 1024)
        ids = torch.randint(base.config.vocab_size, tokens).to(options.device)
        for side in ("ours", "modeling"):
            model = copy.deepcopy(base).to(dtype)
            model = adapted(model) if adapters else model
            if side == "ours":
                print(package.kernelize(model, mode="training"), flush=True)
            steps[side] = step_of(model, ids, mixed)
        del base
        yield {"what": what, "us": times(steps, options.rounds, synchronize)}


main = partial(run, __doc__, "small_training", rows, ARGUMENTS, merge=True)

if __name__ == "__main__":
    main()
