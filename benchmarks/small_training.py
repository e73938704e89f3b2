"""Training steps of a small model, where the host is slower than the GPU, beside transformers.

    python benchmarks/small_training.py [--rounds 40] [--json FILE]
    python benchmarks/small_training.py --tiny --device cpu --rounds 2 --json FILE

A Llama of SmolLM2-135M's sizes with random weights takes steps of AdamW on 4 x 1024 tokens: all of
its weights in fp32 under autocast, or in bf16, and LoRA's adapters (the peft package) on frozen
weights in bf16, under autocast and without. Both models take each step in turns, from an idle GPU
to an idle GPU; the record has the medians.
"""

import argparse
import copy
import statistics
from pathlib import Path
from typing import Callable, Dict

import torch
from kernel_time import RESULTS, installed, load_package, machine, need_gpu, seconds, write

SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
# what is trained: the dtype of the weights, under autocast, with adapters
WAYS = {
    "AdamW, weights in fp32 under autocast": (torch.float32, True, False),
    "AdamW, weights in bf16": (torch.bfloat16, False, False),
    "LoRA on bf16 under autocast": (torch.bfloat16, True, True),
    "LoRA on bf16": (torch.bfloat16, False, True),
}


def adapted(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


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
    """Microseconds of each step; each is first in every other round."""
    found = {side: [] for side in steps}
    for side in list(steps) * 4:
        steps[side]()
    for i in range(rounds):
        for side in sorted(steps, reverse=i % 2 == 1):
            found[side].append(seconds(steps[side], synchronize))
    return {side: statistics.median(taken) * 1e6 for side, taken in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, default=RESULTS / "small_training.json")
    options = need_gpu(parser, parser.parse_args())
    from transformers import LlamaConfig, LlamaForCausalLM

    package, device = load_package(), options.device
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY if options.tiny else SIZES))
    base = LlamaForCausalLM(config).train()
    tokens = (2, 32) if options.tiny else (4, 1024)
    ids = torch.randint(config.vocab_size, tokens).to(device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows = []
    for what, (dtype, mixed, adapters) in WAYS.items():
        steps = {}
        for side in ("ours", "modeling"):
            model = copy.deepcopy(base).to(device, dtype)
            model = adapted(model) if adapters else model
            if side == "ours":
                print(package.kernelize(model, mode="training"), flush=True)
            steps[side] = step_of(model, ids, mixed)
        rows.append({"what": what, "us": times(steps, options.rounds, synchronize)})
        print(rows[-1], flush=True)
    versions = installed(("transformers", "peft"))
    write(options.json, {**machine(), "versions": versions, "rows": rows})


if __name__ == "__main__":
    main()
