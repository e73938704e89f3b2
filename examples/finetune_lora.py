"""Finetune a transformers model with LoRA, before and after kernelize(model).

    pip install peft                    (and bitsandbytes for --four-bits)
    python examples/finetune_lora.py [--steps 20] [--four-bits]

A Llama with random weights gets adapters on all its projections (the peft package) and learns a
few sequences by heart, once with transformers alone and once kernelized, from the same weights and
on the same batches: on the GPU if there is one, else on the CPU. Prints the losses, the seconds a
step and, on a GPU, the peak memory. With --four-bits the frozen weights are in NF4 (QLoRA): their
products are bitsandbytes' own, and all around them is ours.
"""

import argparse
import copy
import importlib.util
import statistics
import tempfile
import time

import torch
import transformers
from parts import load_kernel

SIZES = {
    "cpu": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2},
    "cuda": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8},
}
HEADS = {
    "cpu": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "cuda": {"num_attention_heads": 32, "num_key_value_heads": 8},
}
BATCH = {"cpu": (2, 32), "cuda": (2, 2048)}  # sequences, tokens


def in_four_bits(model, device: str):
    """The model as from_pretrained loads it in NF4, ready for adapters."""
    from peft import prepare_model_for_kbit_training

    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=model.dtype
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = type(model).from_pretrained(
            folder, quantization_config=how, device_map={"": device}, dtype=model.dtype
        )
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def adapted_model(device: str, four_bits: bool = False):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES[device], **HEADS[device], vocab_size=4096)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32)
    if four_bits:
        model = in_four_bits(model, device)
        torch.manual_seed(0)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def finetune(model, batches) -> tuple:
    """(losses, seconds of each step)."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=5e-3)
    losses, times = [], []
    for ids in batches:
        begin = time.perf_counter()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - begin)
    return losses, times


def run(kernel, device: str, steps: int, four_bits: bool = False) -> list:
    """The losses before and after kernelize."""
    model = adapted_model(device, four_bits).train()
    ids = torch.randint(5, 4096, BATCH[device], device=device)
    found = []
    for name in ("transformers alone", "kernelized"):
        mine = copy.deepcopy(model)
        if name == "kernelized":
            print(kernel.kernelize(mine))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses, times = finetune(mine, [ids] * steps)
        said = f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}"
        said += f", {statistics.median(times[1:]):.4f} seconds a step"
        if device == "cuda":
            said += f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(said)
        found.append(losses)
        del mine
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="how many to train, at least 2")
    parser.add_argument("--four-bits", action="store_true", help="frozen weights in NF4: QLoRA")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, the first is not timed: {options.steps}")
    for package in ("peft", *["bitsandbytes"] * options.four_bits):
        if importlib.util.find_spec(package) is None:
            parser.error(f"the package {package} is not installed: pip install {package}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run(load_kernel(), device, options.steps, options.four_bits)


if __name__ == "__main__":
    main()
