"""Training steps of LoRA by the peft package: transformers alone, and kernelized.

    python benchmarks/compare_lora.py [--rounds 8] [--bf16] [--json FILE]     on a GPU

Models of random weights in bf16 with adapters of rank 16 on all projections, under AdamW. Adapters
are in fp32 as PEFT makes them, or with --bf16 as with its autocast_adapter_dtype=False.
All sides take each step in turns, from an idle GPU to an idle GPU: the record has the medians, the
launches and the GPU's own time of a step, and its peak memory with the model in it. `skip_lora` is
kernelize(model, skip=["lora"]). With dropout, masks of ours and of PEFT's are not the same.
"""

import copy
import statistics

import torch
from kernel_time import kernels_of, seconds
from runner import run

COMMON = {"tie_word_embeddings": True}
MODELS = {  # the class, its sizes, sequences and tokens
    "Llama-8B's shape, 8 layers": ("Llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
    }, (1, 4096)),
    "SmolLM2-135M": ("Llama", {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, **COMMON,
    }, (8, 512)),
    "Qwen3-0.6B": ("Qwen3", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, **COMMON,
    }, (4, 1024)),
}  # fmt: skip
SIDES = {"ours": {}, "skip_lora": {"skip": ["lora"]}, "modeling": None}


def model_of(name: str, sizes: dict, dropout: float, low: bool):
    import peft
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    how = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=dropout, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model.train(), how, autocast_adapter_dtype=not low)


def step_of(model, ids: torch.Tensor):
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=1e-5, fused=True)

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(package, what: str, dropout: float, rounds: int, low: bool) -> dict:
    name, sizes, shape = MODELS[what]
    torch.manual_seed(0)
    base = model_of(name, sizes, dropout, low)
    ids = torch.randint(sizes["vocab_size"], shape, device="cuda")
    steps = {}
    for side, options in SIDES.items():
        model = copy.deepcopy(base)
        if options is not None:
            package.kernelize(model, mode="training", **options)
        steps[side] = step_of(model, ids)
    peaks = {}
    for side, step in steps.items():
        step()
        step()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peaks[side] = (torch.cuda.max_memory_allocated() - held) / 2**20
    times: dict = {side: [] for side in steps}
    for _ in range(rounds):
        for side, step in steps.items():
            times[side].append(seconds(step) * 1e6)
    more = f", dropout {dropout}" * (dropout > 0) + ", adapters in bf16" * low
    row: dict = {"what": f"{what}, {shape[0]} x {shape[1]} tokens{more}"}
    row["us"] = {side: statistics.median(found) for side, found in times.items()}
    kernels = {side: kernels_of(step) for side, step in steps.items()}
    row["launches"] = {side: len(found) for side, found in kernels.items()}
    row["busy_us"] = {side: sum(us for _, us in found) for side, found in kernels.items()}
    row["peak_mib"] = peaks
    return row


def rows(package, options):
    for what in MODELS:
        yield measure(package, what, 0.0, options.rounds, options.bf16)
        torch.cuda.empty_cache()
    if not options.bf16:
        yield measure(package, "Llama-8B's shape, 8 layers", 0.05, options.rounds, False)


ARGUMENTS = {
    "--rounds": {"type": int, "default": 8},
    "--bf16": {"action": "store_true", "help": "adapters in bf16"},
}


if __name__ == "__main__":
    run(__doc__, "lora", rows, ARGUMENTS, merge=True)
