"""Time and memory of a training step with the model's own loss and with kernelize(loss=True).

    python benchmarks/compare_loss.py [--json FILE]     on a GPU, with transformers and liger-kernel

One decoder layer of a Llama in bf16, so that little but the output projection and the loss is timed
and held: a deep model saves the same bytes. Times are by the clock, over steps that end idle.
"""

import argparse
import time
from pathlib import Path

import torch
import transformers
from kernel_time import RESULTS, load_package, parse_on_gpu, save

SIZES = [(128256, 4096, 4096), (248320, 2560, 4096)]  # vocabulary, width, tokens
STEPS = 4


def step(model, ids) -> float:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def measured(model, ids) -> tuple:
    """(microseconds of a step, MiB at its peak, loss)."""
    for _ in range(2):
        step(model, ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        loss = step(model, ids)
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / STEPS * 1e6
    return took, torch.cuda.max_memory_allocated() / 2**20, loss.item()


def measure(path: Path) -> None:
    package, rows = load_package(), []
    for vocabulary, width, tokens in SIZES:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=1024, num_hidden_layers=1,
            num_attention_heads=16, num_key_value_heads=4,
        )  # fmt: skip
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).bfloat16().train()
            ids = torch.randint(0, vocabulary, (1, tokens))
        row = {"what": f"vocabulary {vocabulary}, width {width}, {tokens} tokens", "us": {}}
        for way in ("its own loss", "ours"):
            if way == "ours":
                report = package.kernelize(model, only=[], loss=True)
                assert report.served, report
            row["us"][way], peak, loss = measured(model, ids)
            row.setdefault("peak_mib", {})[way] = peak
            row.setdefault("loss", {})[way] = loss
        rows.append(row)
        print(row, flush=True)
        del model
        torch.cuda.empty_cache()
    save(path, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "loss.json")
    measure(parse_on_gpu(parser).json)
