"""Swap the kernel into real transformers models and see that nothing changes but the time.

    make demo          (or: python examples/kernelize_llm.py)
    python examples/kernelize_llm.py --models "Gemma 4" "Kimi Linear"

Builds the kernel, loads it as a user does, and runs a small Llama and a small Qwen3.5 with random
weights before and after kernelize(model), or the models that are named: on the GPU if there is one,
else on the CPU. On a CPU no kernel runs: use_reference() has plain torch serve the modules that
kernels would serve on a GPU. Before and after have the same weights and are timed in turns, so that
a busy machine is unfair to neither.
"""

import argparse
import contextlib
import copy
import importlib.util
import inspect
import logging
import statistics
import sys
import time
from functools import partial
from unittest import mock

import parts
import torch
import transformers

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
HEADS = {  # of linear attention: of keys and of values, and their widths
    "cpu": (4, 8, 64),
    "cuda": (16, 32, 128),
}
PROMPT = {"cpu": 512, "cuda": 8192}
NEW_TOKENS = 32
SHOWN = {
    "cpu": "A CPU shows what is served on a GPU, and that results stay the same. What the kernels"
    "\ngain only a GPU can show: docs/benchmarks.md has an H200's times.",
    "cuda": "The kernels are tuned for Hopper GPUs; docs/benchmarks.md has an H200's times.",
}
REPEATS = 20  # pairs of timings, before and after
TOKENS = 8  # decoded in one timing


def load_kernel():
    kernel = parts.load_kernel()
    print(f'loaded {kernel.__name__}: get_kernel("{parts.REPOSITORY}", version=1)')
    return kernel


def llama(device: str) -> tuple:
    return "LlamaConfig", {}


def qwen3_5(device: str) -> tuple:
    keys, values, width = HEADS[device]
    return "Qwen3_5TextConfig", {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "layer_types": in_turn(device, "linear_attention"),
    }


def gemma4(device: str) -> tuple:
    """As the E2B: the last layers attend to keys and values of those before them, and each layer
    gets an embedding of its own."""
    layers = SIZES[device]["num_hidden_layers"]
    return "Gemma4TextConfig", {
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "num_kv_shared_layers": layers // 2,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 4096,
    }


def kimi_linear(device: str) -> tuple:
    """Kimi Delta Attention, latent attention in each fourth layer, experts but in the first."""
    _, heads, width = HEADS[device]
    sizes = SIZES[device]
    return "KimiLinearConfig", {
        "linear_num_heads": heads,
        "linear_head_dim": width,
        "layer_types": in_turn(device, "linear_attention"),
        "num_key_value_heads": sizes["num_attention_heads"],
        "kv_lora_rank": sizes["hidden_size"] // 4,
        "qk_nope_head_dim": width,
        "qk_rope_head_dim": width // 2,
        "v_head_dim": width,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes["intermediate_size"] // 4,
    }


MODELS = {
    "Llama": llama,
    "Qwen3.5": qwen3_5,
    "Gemma 4": gemma4,
    "Kimi Linear": kimi_linear,
}


def in_turn(device: str, kind: str) -> list:
    """The kinds of layers: each fourth one is full attention."""
    layers = SIZES[device]["num_hidden_layers"]
    return ["full_attention" if i % 4 == 3 else kind for i in range(layers)]


def random_model(family: str, device: str):
    name, own = MODELS[family](device)
    sizes = {
        **SIZES[device],
        "vocab_size": 4096,
        "max_position_embeddings": 16384,
        "initializer_range": 0.05,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        **own,
    }
    config = getattr(transformers, name)(**sizes)
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


def turns(calls, device: str):
    """Seconds of both calls, REPEATS pairs. They take turns, and turns to be first."""
    for call in calls:
        call()
    pairs = []
    for turn in range(REPEATS):
        order = (0, 1) if turn % 2 else (1, 0)
        taken = {which: seconds(calls[which], device) for which in order}
        pairs.append((taken[0], taken[1]))
    return pairs


@torch.no_grad()
def times(models, ids, device: str):
    """{what: pairs of seconds} of the two models for the prompt, and for one token after it."""

    def prompt(model):
        cache = transformers.DynamicCache(config=model.config)
        model(ids, **{cache_name(model): cache}, use_cache=True, logits_to_keep=1)
        return cache

    def decode(model, cache):
        for _ in range(TOKENS):
            model(ids[:, -1:], **{cache_name(model): cache})

    prompts = [partial(prompt, model) for model in models]
    steps = [partial(decode, model, prompt(model)) for model in models]
    tokens = [(a / TOKENS, b / TOKENS) for a, b in turns(steps, device)]
    return {f"prompt of {ids.shape[1]}": turns(prompts, device), "one token": tokens}


def cache_name(model) -> str:
    """The argument that takes a cache; transformers renamed it in release 5.24."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def summary(pairs) -> tuple:
    """Returns the pair whose ratio is the middle one, and the middle half of the ratios."""
    pairs = sorted(pairs, key=lambda pair: pair[0] / pair[1])
    low, _, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    return pairs[len(pairs) // 2], low, high


def show_times(rows) -> None:
    """The middle pair of timings, of which the speed-up is the ratio, and how far others differ."""
    print(f"  {'':16}{'before':>12}{'after':>12}   speed-up (middle half of {REPEATS} pairs)")
    for name, pairs in rows.items():
        (before, after), low, high = summary(pairs)
        ratio = "too noisy to tell" if low <= 1 <= high else f"{before / after:.2f}x"
        times = f"{before * 1e3:9.2f} ms{after * 1e3:9.2f} ms"
        print(f"  {name:16}{times}   {ratio} ({low:.2f} to {high:.2f})")


@torch.no_grad()
def generated(model, ids):
    """A prompt with the greedy tokens after it, in fp32 as the weights are."""
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)


def in_fp64(model):
    """A copy in fp64 by transformers' torch code. Where FLA is installed, the code of the model
    calls FLA's kernels, which know no fp64: it is loaded once more, without FLA."""
    found = importlib.util.find_spec(type(model).__module__)
    spec = importlib.util.spec_from_file_location(f"{found.name}_in_torch", found.origin)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"fla": None, "causal_conv1d": None, spec.name: module}):
        spec.loader.exec_module(module)
        with torch.device(model.device):
            copied = getattr(module, type(model).__name__)(copy.deepcopy(model.config))
        with contextlib.suppress(ValueError):  # raised by a model without experts
            copied.set_experts_implementation("eager")  # the others know no fp64
    copied.load_state_dict(model.state_dict())
    return copied.double().eval()


@torch.no_grad()
def same_results(models, texts) -> bool:
    """Prints how far the logits of two models are apart, how far each is from the first one in
    fp64, and whether what they generated is the same.

    FLA's kernels, which transformers takes where they are installed, round fp32 to TF32: the second
    may be nearer to fp64. Tokens may differ only where both are next to equally likely in fp64.
    """
    exact = in_fp64(models[0])(texts[0]).logits
    logits = [model(texts[0]).logits for model in models]
    difference, largest = (logits[0] - logits[1]).abs().max().item(), exact.abs().max().item()
    print(f"  largest difference of logits   {difference:.1e}   (logits up to {largest:.1f})")
    before, after = ((found - exact).abs().max().item() for found in logits)
    print(f"  largest error, beside fp64     {before:.1e} before, {after:.1e} after")
    allowed = max(1e-3 * largest, before)
    gaps = []
    for row, mine, theirs in zip(exact, *texts):
        for place in (mine != theirs).nonzero()[:1, 0].tolist():
            scores = row[place - 1]
            gaps.append((scores[mine[place]] - scores[theirs[place]]).item())
    equal = after <= allowed and all(gap <= 2 * allowed for gap in gaps)
    said = "DIFFERENT" if not equal else "the same but for a tie" if gaps else "identical"
    print(f"  {NEW_TOKENS} greedy tokens x {len(texts[0])} prompts    {said}")
    return equal


def progress(text: str) -> None:
    print(f"  ... {text}", flush=True)


def compare(kernel, family: str, device: str) -> bool:
    print(f"\n{family}, random weights, on {device}")
    progress("making the model")
    model = random_model(family, device)
    short = torch.randint(1, 4096, (2, 100), device=device)
    progress(f"generating {NEW_TOKENS} tokens with transformers alone, in fp32")
    text = generated(model, short)

    served = copy.deepcopy(model)
    with kernel.use_reference() if device == "cpu" else contextlib.nullcontext():
        report = kernel.kernelize(served)
        progress(f"generating {NEW_TOKENS} tokens after kernelize(model)")
        new_text = generated(served, short)
        print()
        same = same_results((model, served), (text, new_text))
        print()

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, served = model.to(dtype), served.to(dtype)
    here = kernel.kernelize(served)  # what is served depends on dtype and device
    print(here if device == "cuda" else report)
    print()
    if not here.served:
        print(
            "  nothing to time: without a GPU, and outside use_reference(), no module is replaced"
        )
        return same
    length = PROMPT[device]
    progress(f"timing a prompt of {length} tokens and decoding, {dtype}".replace("torch.", ""))
    ids = torch.randint(1, 4096, (1, length), device=device)
    show_times(times((model, served), ids, device))
    return same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help="where it runs")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["Llama", "Qwen3.5"],
        help="(default: Llama Qwen3.5)",
    )
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine")
    transformers.logging.set_verbosity_error()
    logging.getLogger("kernels").setLevel(logging.ERROR)
    start = time.perf_counter()
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} cores"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device} ({where})")
    kernel = load_kernel()
    same = [compare(kernel, family, device) for family in options.models]
    print(f"\n{time.perf_counter() - start:.0f} s in all. restore(model) undoes kernelize(model).")
    print(SHOWN[device])
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
