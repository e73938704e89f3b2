"""A prompt and tokens of an FP8 checkpoint with block scales, before and after kernelize.

    python examples/fp8_checkpoint.py [--model FOLDER_OR_NAME] [--prompt 2048] [--tokens 32]

It needs a GPU of compute capability 9.0 and the package `accelerate`. Without --model a Qwen3 with
random weights is saved and loaded again with transformers' FineGrainedFP8Config, as any checkpoint
in 16 bits can be. transformers fetches its own kernel from the Hub: without it there is no row of
times before.
"""

import argparse
import tempfile
import time

import torch
import transformers
from parts import load_kernel

GPU = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
}


def serves_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def random_model() -> torch.nn.Module:
    config = transformers.Qwen3Config(**GPU, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def load_in_fp8(name: str) -> torch.nn.Module:
    """A checkpoint that is in FP8 already, or in 16 bits, by transformers."""
    options = {"device_map": "cuda"}
    if not hasattr(transformers.AutoConfig.from_pretrained(name), "quantization_config"):
        options["quantization_config"] = transformers.FineGrainedFP8Config()
    return transformers.AutoModelForCausalLM.from_pretrained(name, **options).eval()


def seconds(call) -> float:
    """Of the second of two calls."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def times(model, length: int, count: int, **options) -> tuple:
    """Milliseconds of a prompt, and of a token after it."""
    ids = torch.randint(1, 512, (1, length), device="cuda")
    words = {"do_sample": False, "eos_token_id": -1, **options}
    prompt, whole = (
        seconds(lambda n=n: model.generate(ids, max_new_tokens=n, **words)) for n in (1, count + 1)
    )
    return prompt * 1e3, (whole - prompt) / count * 1e3


def show(what: str, found: tuple) -> None:
    print(f"{what:34}{found[0]:12.1f}{found[1]:12.2f}", flush=True)


def run(kernel, model, length: int, count: int) -> None:
    print(f"{'milliseconds':34}{f'prompt {length}':>12}{'a token':>12}")
    try:
        show("before", times(model, length, count))
    except Exception as error:  # of a kernel that is fetched
        print(f"before: transformers' own FP8 kernel did not run here: {error}")
    kernel.kernelize(model)
    show("kernelize(model)", times(model, length, count))
    report = kernel.kernelize(model, cuda_graphs=True)
    show("kernelize(.., cuda_graphs=True)", times(model, length, count))
    print(f"\n{report}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", help="a folder or a name on the Hub")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    arguments = parser.parse_args()
    for name in ("prompt", "tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1: {getattr(arguments, name)}")
    if not serves_fp8():
        parser.error("FP8 needs a GPU of compute capability 9.0 (H100, H200); torch finds none")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kernel = load_kernel()
    if arguments.model is not None:
        run(kernel, load_in_fp8(arguments.model), arguments.prompt, arguments.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        random_model().save_pretrained(folder)
        model = load_in_fp8(folder)
    run(kernel, model, arguments.prompt, arguments.tokens)


if __name__ == "__main__":
    main()
