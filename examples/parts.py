"""What the examples of training and serving share: the kernel, a model, its tokenizer, a text."""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "org/fused-swiglu-gdn"
WAYS = ("transformers alone", "kernelized")
TINY = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": 257,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def load_kernel(build: bool = True):
    """What `make build` writes, loaded by a Hub name; LOCAL_KERNELS stands in for the Hub."""
    from kernels import get_kernel

    if build:
        subprocess.run([sys.executable, ROOT / "tools" / "build.py"], check=True)
    os.environ["LOCAL_KERNELS"] = f"{REPOSITORY}={ROOT}"
    return get_kernel(REPOSITORY, version=1)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def tiny_model(family: str = "qwen3_5"):
    """Random weights; the same at each call. Of a Qwen3.5, plain torch serves layers on a CPU."""
    if family == "qwen3_5":
        config = transformers.Qwen3_5TextConfig(**TINY, **GDN)
    else:
        config = transformers.LlamaConfig(**TINY)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def byte_tokenizer():
    """The tokenizer of tiny models: a token is a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary.update({"<pad>": 256, "<eos>": 257})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def gguf_place(model: str) -> dict:
    """Arguments of from_pretrained for a name, a folder, or a .gguf file, which is unpacked: its
    packed weights cannot be trained, and there are kernels for them on few devices."""
    if not model.endswith(".gguf"):
        return {"pretrained_model_name_or_path": model}
    path = Path(model)
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def model_of(name: str, family: str = "qwen3_5"):
    """The model of this name (from the Hub, a folder or a .gguf file), or a tiny one for None."""
    if name is None:
        return tiny_model(family)
    how = gguf_place(name)
    if "gguf_file" in how:
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(**how, dtype=torch.float32)


def tokenizer_of(name: str):
    if name is None:
        return byte_tokenizer()
    return transformers.AutoTokenizer.from_pretrained(**gguf_place(name))


def attempt(way: str, call):
    """call(), or where transformers alone raises, what it says: FLA's kernels, which transformers
    takes where they are installed, refuse some GPUs with some Triton."""
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        if way == "kernelized":
            raise
        print(f"{way} does not run here: {error}")
        return str(error)


def sections(count: int) -> list:
    """Sections of Python's own manual, the shortest first."""
    from pydoc_data.topics import topics

    return sorted(topics.values(), key=len)[:count]


def parser_of(doc: str, packages=(), model: bool = True) -> argparse.ArgumentParser:
    """With --model, unless it is False; packages are those that have to be installed."""
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if model:
        parser.add_argument("--model", help="a Hub name, a folder or a .gguf file, not a tiny one")
    parser.set_defaults(packages=packages)
    return parser


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options; the program ends with one line where a package is missing."""
    options = parser.parse_args()
    for package in options.packages:
        if importlib.util.find_spec(package) is None:
            parser.error(f"the package {package} is not installed: pip install {package}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return options
