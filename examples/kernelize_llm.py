"""Swap the kernel into real transformers models and see that nothing changes but the time.

    make demo          (or: python examples/kernelize_llm.py)

Builds the kernel, loads it as a user does, and runs a small Llama and a small Qwen3.5 with random
weights before and after kernelize(model): on the GPU if there is one, else on the CPU.
"""

import argparse
import copy
import logging
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from kernels import get_kernel

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "org/fused-swiglu-gdn"

SIZES = {  # what a CPU with two cores runs in seconds, and what keeps a GPU busy
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "cuda": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
GDN = {
    "cpu": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "cuda": {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
PROMPT = {"cpu": 512, "cuda": 8192}
NEW_TOKENS = 32


def load_kernel():
    """What `make build` writes, loaded by a Hub name; LOCAL_KERNELS stands in for the Hub."""
    subprocess.run([sys.executable, ROOT / "tools" / "build.py"], check=True)
    os.environ["LOCAL_KERNELS"] = f"{REPOSITORY}={ROOT}"
    kernel = get_kernel(REPOSITORY, version=1)
    print(f'loaded {kernel.__name__}: get_kernel("{REPOSITORY}", version=1)')
    return kernel


def random_model(family: str, device: str):
    sizes = {
        **SIZES[device],
        "vocab_size": 4096,
        "max_position_embeddings": 16384,
        "initializer_range": 0.05,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    if family == "Qwen3.5":
        layers = sizes["num_hidden_layers"]
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
        config = transformers.Qwen3_5TextConfig(**sizes, **GDN[device], layer_types=kinds)
    else:
        config = transformers.LlamaConfig(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


def seconds(call, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def best(calls, device: str, repeats: int = 7):
    """The least seconds of each call; they take turns, so a busy moment is unfair to none."""
    for call in calls:
        call()
    turns = [[seconds(call, device) for call in calls] for _ in range(repeats)]
    return [min(column) for column in zip(*turns)]


@torch.no_grad()
def times(models, ids, device: str):
    """Seconds of each model for the prompt, and for one token after it."""

    def prompt(model):
        return model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def decode(model, cache):
        for _ in range(8):
            model(ids[:, -1:], past_key_values=cache)

    prompts = [partial(prompt, model) for model in models]
    steps = [partial(decode, model, prompt(model)) for model in models]
    return best(prompts, device), [t / 8 for t in best(steps, device)]


@torch.no_grad()
def results(model, ids):
    """The logits of a prompt and the greedy tokens after it, in fp32 as the weights are."""
    new = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return model(ids).logits, new[:, ids.shape[1] :]


def progress(text: str) -> None:
    print(f"  ... {text}", flush=True)


def compare(kernel, family: str, device: str) -> bool:
    print(f"\n{family}, random weights, on {device}")
    progress("making the model")
    model = random_model(family, device)
    short = torch.randint(1, 4096, (2, 100), device=device)
    progress(f"generating {NEW_TOKENS} tokens with transformers alone, in fp32")
    logits, tokens = results(model, short)

    served = copy.deepcopy(model)
    report = kernel.kernelize(served)
    progress(f"generating {NEW_TOKENS} tokens after kernelize(model)")
    new_logits, new_tokens = results(served, short)
    same = torch.equal(tokens, new_tokens)

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    length = PROMPT[device]
    progress(f"timing a prompt of {length} tokens and decoding, {dtype}".replace("torch.", ""))
    model, served = model.to(dtype), served.to(dtype)
    report = kernel.kernelize(served)  # who serves depends on the dtype
    ids = torch.randint(1, 4096, (1, length), device=device)
    taken = times((model, served), ids, device)

    print()
    print(report)
    print()
    print(f"  largest difference of logits   {(logits - new_logits).abs().max():.1e}", end="")
    print(f"   (logits up to {logits.abs().max():.1f})")
    print(f"  {NEW_TOKENS} greedy tokens x 2 prompts    {'identical' if same else 'DIFFERENT'}")
    print()
    print(f"  {'':24}{'before':>12}{'after':>12}{'speed-up':>12}")
    for name, (a, b) in zip((f"prompt of {length}", "one token"), taken):
        print(f"  {name:24}{a * 1e3:9.2f} ms{b * 1e3:9.2f} ms{a / b:11.2f}x")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    transformers.logging.set_verbosity_error()
    logging.getLogger("kernels").setLevel(logging.ERROR)
    start = time.perf_counter()
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} cores"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device} ({where})")
    kernel = load_kernel()
    same = [compare(kernel, family, device) for family in ("Llama", "Qwen3.5")]
    print(f"\n{time.perf_counter() - start:.0f} s in all. restore(model) undoes kernelize(model).")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
