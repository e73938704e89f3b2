"""Training steps of a small model, where the host is slower than the GPU, beside transformers.

    python benchmarks/small_training.py [--rounds 40] [--json FILE]
    python benchmarks/small_training.py --tiny --device cpu --rounds 2 --json FILE

A Llama of SmolLM2-135M's sizes with random weights takes steps of AdamW on 4 x 1024 tokens: all of
its weights in fp32 under autocast, or in bf16, and LoRA's adapters (the peft package) on frozen
weights in bf16, under autocast and without. Both models take each step in turns, from an idle GPU
to an idle GPU; the record has the medians.
"""

import copy
from functools import partial
from typing import Callable, Dict

import torch
from kernel_time import in_turns, seconds
from real_model import TINY, adapted
from runner import run

SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
# what is trained: the dtype of the weights, under autocast, with adapters
WAYS = {
    "AdamW, weights in fp32 under autocast": (torch.float32, True, False),
    "AdamW, weights in bf16": (torch.bfloat16, False, False),
    "LoRA on bf16 under autocast": (torch.bfloat16, True, True),
    "LoRA on bf16": (torch.bfloat16, False, True),
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
    "--tiny": {"action": "store_true", "help": "a model of two small layers"},
    "--device": {"choices": ("cpu", "cuda"), "default": "cuda"},
}


def rows(package, options):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(TINY if options.tiny else SIZES))
    base = LlamaForCausalLM(config).train()
    tokens = (2, 32) if options.tiny else (4, 1024)
    ids = torch.randint(config.vocab_size, tokens).to(options.device)
    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    for what, (dtype, mixed, adapters) in WAYS.items():
        steps = {}
        for side in ("ours", "modeling"):
            model = copy.deepcopy(base).to(options.device, dtype)
            model = adapted(model) if adapters else model
            if side == "ours":
                print(package.kernelize(model, mode="training"), flush=True)
            steps[side] = step_of(model, ids, mixed)
        yield {"what": what, "us": times(steps, options.rounds, synchronize)}


main = partial(run, __doc__, "small_training", rows, ARGUMENTS)

if __name__ == "__main__":
    main()
