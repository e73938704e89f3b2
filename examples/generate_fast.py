"""Tokens a second and the time to the first tokens of generate: eager, compiled, and graphed.

    python examples/generate_fast.py [--device cuda] [--tokens 128] [--ways eager compiled graphed]
                                     [--choices greedy drawn drafted predicted]

A Qwen3.5 with random weights decodes on a static cache, greedily, with tokens that are drawn
(temperature .8, top-k 50, top-p .9): for a seed all ways draw the same; and greedily with drafts,
which transformers refuses for this model: only "graphed" has them. They are looked up in the text
("drafted"): random weights repeat their text sooner or later, so drafts become right. Or an MTP
layer makes them ("predicted"), here of weights that predict nothing: load_mtp(model, folder) reads
those of a checkpoint. "compiled" is what
transformers does with such a cache on a GPU, "graphed" is kernelize(model, cuda_graphs=True). On a
CPU, where there are no CUDA graphs, the model is tiny and the report says that decoding was left
alone.
"""

import argparse
import logging
import time

import torch
import transformers
from parts import load_kernel

WAYS = ("eager", "compiled", "graphed")
CHOICES = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "drafted": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "predicted": {"do_sample": False},
}
DRAFTED = ("drafted", "predicted")
FEWEST = 5  # tokens
GPU = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 32768,
}
CPU = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 512,
}


def random_model(device: str):
    sizes = GPU if device == "cuda" else CPU
    config = transformers.Qwen3_5TextConfig(**sizes, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def mtp_layer(kernel, model):
    """An MTP layer with the weights of the model's last layer, which has attention."""
    inner, head = model.model, model.lm_head.weight
    weights = {f"mtp.layers.0.{n}": x for n, x in inner.layers[-1].state_dict().items()}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights[f"mtp.{name}.weight"] = inner.norm.weight
    weights["mtp.fc.weight"] = torch.randn(head.shape[1], 2 * head.shape[1]) * 0.02
    return kernel.load_mtp(model, weights)


class Clock(transformers.generation.BaseStreamer):
    """Knows when each token came. A graphed one comes when the next one has been launched, and the
    tokens of a round come at once."""

    def __init__(self):
        self.start, self.times = time.perf_counter(), []

    def put(self, value):
        tokens = 1 if not self.times else value.numel()  # the first is the prompt
        self.times += [time.perf_counter() - self.start] * tokens

    def end(self):
        pass


def generate(model, ids, count: int, way: str, choice: str, **words):
    """The tokens, and seconds from the call to each of them."""
    clock = Clock()
    torch.manual_seed(0)
    tokens = model.generate(
        ids,
        max_new_tokens=count,
        **CHOICES[choice],
        cache_implementation=None if choice in DRAFTED else "static",
        disable_compile=way == "eager",
        streamer=clock,
        **words,
    )
    return tokens, clock.times[1:]  # the first is when the prompt came


def run(kernel, device: str, count: int, ways, choices=tuple(CHOICES)) -> dict:
    """{(way, choice): (tokens, seconds to each)}, printed as they come."""
    model = random_model(device)
    ids = torch.randint(1, 512, (1, 32), device=device)
    print(f"{'':20}{'first token':>14}{'fifth token':>14}{'tokens/s':>12}")
    found = {}
    for way in ways:
        if way == "graphed":
            report = kernel.kernelize(model, cuda_graphs=True)
        for choice in choices:
            if choice in DRAFTED and way != "graphed":
                continue
            words = {"assistant_model": mtp_layer(kernel, model)} if choice == "predicted" else {}
            tokens, times = generate(model, ids, count, way, choice, **words)
            half = len(times) // 2
            while times[half] == times[-1]:  # tokens of one round
                half -= 1
            rate = (len(times) - 1 - half) / (times[-1] - times[half])
            name = f"{way}, {choice}"
            print(f"{name:20}{times[0]:12.2f} s{times[4]:12.2f} s{rate:12.1f}", flush=True)
            found[way, choice] = tokens, times
    if "graphed" in ways:
        print(f"\n{report}")
        kernel.restore(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help="where it runs")
    parser.add_argument(
        "--tokens", type=int, default=128, help=f"how many to generate, at least {FEWEST}"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="which ways of decoding to time"
    )
    parser.add_argument(
        "--choices", nargs="+", choices=CHOICES, default=list(CHOICES), help="how tokens are chosen"
    )
    arguments = parser.parse_args()
    if arguments.tokens < FEWEST:
        parser.error(f"--tokens must be at least {FEWEST}, the fifth is timed: {arguments.tokens}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine")
    transformers.logging.set_verbosity_error()
    logging.getLogger("kernels").setLevel(logging.ERROR)
    run(load_kernel(), arguments.device, arguments.tokens, arguments.ways, arguments.choices)


if __name__ == "__main__":
    main()
